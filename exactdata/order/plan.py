"""Plan a data order, and continue a run with a changed plan.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from exactdata.order.exclusions import (
    Exclusions,
    Selections,
    check_selections,
    excluded_from,
    samples_in_force,
    withdrawn,
)
from exactdata.order.segments import Segment, segment_at, segments_from_json
from exactdata.order.sequence import ElasticSequence

_MOST_CHANGES = 10  # maximum changes listed in a message


@dataclass(frozen=True)
class OrderPlan:
    """The segments that a sampler was constructed with, starting at position 0, and the samples to exclude."""

    segments: tuple[Segment, ...]
    exclude: Selections

    def to_json(self) -> dict[str, Any]:
        return {"segments": [one.to_json() for one in self.segments], "exclude": self.exclude.to_json()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> OrderPlan:
        return cls(segments_from_json(value["segments"]), Selections.parse(value["exclude"]))

    def changes_from(self, saved: OrderPlan, position: int) -> list[str]:
        """List the differences between this plan and a plan saved at `position`, one message each.

        A segment that has not begun may have a different start, because phases begin at steps, and a new global batch
        size changes the positions of later steps.
        """
        changes: list[str] = []
        same = saved.segments == self.segments
        for i in range(0 if same else max(len(saved.segments), len(self.segments))):
            if len(changes) == _MOST_CHANGES:
                changes.append("and so on")
                break
            before, after = (plan.segments[i] if i < len(plan.segments) else None for plan in (saved, self))
            if not _is_same(before, after, position):
                changes.append(f"segment {i} was {before or 'absent'} and is {after or 'absent'}")
        if saved.exclude != self.exclude:
            changes.append(f"exclude was {saved.exclude} and is {self.exclude}")
        return changes

    def continued(
        self,
        saved: OrderPlan,
        segments: tuple[Segment, ...],
        exclusions: Exclusions,
        position: int,
        sizes: Mapping[str, int],
        order: Callable[[Exclusions], ElasticSequence],
    ) -> tuple[tuple[Segment, ...], Exclusions]:
        """Return the segments and exclusions of a run that was saved at `position` and continues with this plan.

        Nothing before `position` changes. Later changes that were made during the run are kept, unless this plan has a
        segment with the same start.

        Args:
            saved: the plan of the saved run.
            segments: all segments of the saved run, including changes made while it ran.
            exclusions: all exclusions of the saved run, including those made while it ran.
            position: number of samples consumed.
            sizes: number of samples by source name.
            order: called with exclusions, returns the order of the saved run with these exclusions instead.

        Raises:
            SamplerError: an exclusion is invalid.
        """
        if saved == self:
            return self.segments if segments in (saved.segments, self.segments) else segments, exclusions
        before, now = (segment_at(plan.segments, position) for plan in (saved, self))
        later = {one.start: one for one in self.segments if one.start > position}
        if replace(before, start=now.start) == now:
            kept = [one for one in segments if one.start <= position]
        else:
            kept = [*(one for one in segments if one.start < position), replace(now, start=position)]
        planned = {one.start: one for one in saved.segments}
        for one in segments:
            if one.start > position and one != planned.get(one.start):
                later.setdefault(one.start, self._adapted(one, sizes))
        result = (*kept, *(later[start] for start in sorted(later)))
        return result, self._exclusions(saved, exclusions, position, sizes, order)

    def _adapted(self, made: Segment, sizes: Mapping[str, int]) -> Segment:
        """Adapt a weight change that was made during the run and has not begun to this plan's sources and caps."""
        now = segment_at(self.segments, made.start)
        weights = {name: made.weights.get(name, now.weights.get(name, 0.0)) for name in sizes}
        if not any(weights.values()):  # no source with a weight exists any more
            return replace(now, start=made.start)
        return replace(made, weights=weights, max_epochs=now.max_epochs)

    def _exclusions(
        self,
        saved: OrderPlan,
        exclusions: Exclusions,
        position: int,
        sizes: Mapping[str, int],
        order: Callable[[Exclusions], ElasticSequence],
    ) -> Exclusions:
        """From `position` on, exclude the samples that this plan adds, and withdraw exclusions that it no longer has.

        Exclusions made by a call during the run are kept, even if the saved plan had the same samples. Positions are
        resolved again, because they may contain different samples now.
        """
        added = self.exclude.without(saved.exclude).without(samples_in_force(exclusions))
        check_selections(added, position, sizes)
        result, *rest = withdrawn(exclusions, saved.exclude.without(self.exclude), position)
        for selections in rest:  # samples before positions, because they change which samples are at the positions
            before = result
            result += excluded_from(selections, position, lambda *at: order(before).key_ranges(*at))  # noqa: B023
        return result + excluded_from(added, position, lambda *at: order(exclusions).key_ranges(*at))


def _is_same(before: Segment | None, after: Segment | None, position: int) -> bool:
    """Return whether two planned segments are equal. The starts of segments that have not begun may differ."""
    if before is None or after is None:
        return False
    ahead = before.start >= position and after.start >= position
    return before == (replace(after, start=before.start) if ahead else after)

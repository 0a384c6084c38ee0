"""What the configuration asks of the data order, and how a run continues under a changed plan.

Does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from runner.data.order.segments import Exclusion, Segment, as_segment, parse_exclusions, segment_at
from runner.data.order.weights import SamplerError


@dataclass(frozen=True)
class OrderPlan:
    """The segments that the configuration asks for, from position 0 on, and the samples to exclude."""

    segments: tuple[Segment, ...]
    exclude: tuple[str, ...]

    @classmethod
    def make(
        cls,
        base: Segment,
        segments: Iterable[Segment | Mapping[str, Any] | Sequence[Any]],
        exclude: Iterable[str],
    ) -> OrderPlan:
        """The base segment and the planned ones, sorted; one that starts at 0 replaces the base.

        Raises:
            SamplerError: an invalid segment, or two with the same start.
        """
        planned = sorted((as_segment(value, base) for value in segments), key=lambda segment: segment.start)
        starts = [segment.start for segment in planned]
        if len(set(starts)) != len(starts):
            raise SamplerError(f"two segments start at the same position: {starts}")
        return cls(tuple(planned) if starts[:1] == [0] else (base, *planned), tuple(str(text) for text in exclude))

    def to_json(self) -> dict[str, Any]:
        return {"segments": [segment.to_json() for segment in self.segments], "exclude": sorted(self.exclude)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> OrderPlan:
        return cls(tuple(map(Segment.from_json, value["segments"])), tuple(value["exclude"]))

    def changes_from(self, saved: OrderPlan, position: int) -> list[str]:
        """How this plan differs from one saved at `position`, one message per difference.

        A segment that has not begun may have moved: a phase begins at a step, and another global batch changes the
        position of that step.
        """
        changes = []
        for i in range(max(len(saved.segments), len(self.segments))):
            before, after = (plan.segments[i] if i < len(plan.segments) else None for plan in (saved, self))
            if not _is_same(before, after, position):
                changes.append(f"segment {i} was {before or 'absent'} and is {after or 'absent'}")
        if sorted(saved.exclude) != sorted(self.exclude):
            changes.append(f"exclude was {sorted(saved.exclude)} and is {sorted(self.exclude)}")
        return changes

    def continued(
        self,
        saved: OrderPlan,
        segments: Sequence[Segment],
        exclusions: Sequence[Exclusion],
        position: int,
        sizes: Mapping[str, int],
    ) -> tuple[list[Segment], list[Exclusion]]:
        """Segments and exclusions of a run that was saved at `position` and continues under this plan.

        What was in force before `position` stays.

        Args:
            saved: the plan of the saved run.
            segments: all segments of the saved run, including changes made while it ran.
            exclusions: all exclusions of the saved run.
            position: samples consumed.
            sizes: samples by source name.
        """
        if saved.to_json() == self.to_json():
            return list(segments), list(exclusions)
        before, now = (segment_at(plan.segments, position) for plan in (saved, self))
        later = [segment for segment in self.segments if segment.start > position]
        if replace(before, start=now.start) == now:
            kept = [segment for segment in segments if segment.start <= position]
        else:
            kept = [segment for segment in segments if segment.start < position]
            kept.append(replace(now, start=position))
        known = set(saved.exclude)
        added = [text for text in self.exclude if text not in known]
        still = [entry for entry in exclusions if entry.at < position or entry.text in self.exclude]
        return [*kept, *later], [*still, *parse_exclusions(added, position, sizes)]


def _is_same(before: Segment | None, after: Segment | None, position: int) -> bool:
    """Whether two planned segments are equal, except for the start of one that has not begun."""
    if before is None or after is None:
        return False
    ahead = before.start >= position and after.start >= position
    return before == (replace(after, start=before.start) if ahead else after)

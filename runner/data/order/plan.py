"""What the configuration asks of the data order, and how a run continues under a changed plan.

Does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from runner.data.order.exclusions import POSITIONS, Exclusion, Selection, check_selections, parsed, without
from runner.data.order.segments import Segment, as_segment, segment_at
from runner.data.order.sequence import ElasticSequence
from runner.data.order.weights import SamplerError


@dataclass(frozen=True)
class OrderPlan:
    """The segments that the configuration asks for, from position 0 on, and the samples to exclude, normalized."""

    segments: tuple[Segment, ...]
    exclude: tuple[Selection, ...]

    @classmethod
    def make(
        cls,
        base: Segment,
        segments: Iterable[Segment | Mapping[str, Any] | Sequence[Any]],
        exclude: Iterable[str],
    ) -> OrderPlan:
        """The base segment and the planned ones, sorted; one that starts at 0 replaces the base.

        Raises:
            SamplerError: an invalid segment or exclusion, or two segments with the same start.
        """
        if isinstance(segments, str | Mapping) or not isinstance(segments, Iterable):
            raise SamplerError(f"segments {segments!r}: it must be a list of segments")
        planned = sorted((as_segment(value, base) for value in segments), key=lambda segment: segment.start)
        starts = [segment.start for segment in planned]
        if len(set(starts)) != len(starts):
            raise SamplerError(f"two segments start at the same position: {starts}")
        return cls(tuple(planned) if starts[:1] == [0] else (base, *planned), parsed(exclude))

    def to_json(self) -> dict[str, Any]:
        return {
            "segments": [segment.to_json() for segment in self.segments],
            "exclude": [str(one) for one in self.exclude],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> OrderPlan:
        return cls(tuple(map(Segment.from_json, value["segments"])), parsed(value["exclude"]))

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
        if saved.exclude != self.exclude:
            was, now = (", ".join(map(str, plan.exclude)) or "nothing" for plan in (saved, self))
            changes.append(f"exclude was {was} and is {now}")
        return changes

    def continued(
        self,
        saved: OrderPlan,
        segments: Sequence[Segment],
        exclusions: Sequence[Exclusion],
        position: int,
        sizes: Mapping[str, int],
        order: Callable[[Sequence[Exclusion]], ElasticSequence],
    ) -> tuple[list[Segment], list[Exclusion]]:
        """Segments and exclusions of a run that was saved at `position` and continues under this plan.

        What was in force before `position` stays, and so do changes made in the run that begin later, except where
        this plan has a segment of its own.

        Args:
            saved: the plan of the saved run.
            segments: all segments of the saved run, including changes made while it ran.
            exclusions: all exclusions of the saved run, too.
            position: samples consumed.
            sizes: samples by source name.
            order: the order of the saved run with other exclusions.

        Raises:
            SamplerError: an invalid exclusion.
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
        planned = {segment.start for segment in later}
        made = (one for one in segments if one.start > position and one not in saved.segments)
        later += [self._adapted(one, sizes) for one in made if one.start not in planned]
        later.sort(key=lambda segment: segment.start)
        return [*kept, *later], self._exclusions(saved, exclusions, position, sizes, order)

    def _adapted(self, made: Segment, sizes: Mapping[str, int]) -> Segment:
        """A change of weights that was made in the run and has not begun, for the sources and caps of this plan."""
        now = segment_at(self.segments, made.start)
        weights = {name: made.weights.get(name, now.weights.get(name, 0.0)) for name in sizes}
        if not any(weights.values()):  # none of the sources that it wants is left
            return replace(now, start=made.start)
        return replace(made, weights=weights, max_epochs=now.max_epochs)

    def _exclusions(
        self,
        saved: OrderPlan,
        exclusions: Sequence[Exclusion],
        position: int,
        sizes: Mapping[str, int],
        order: Callable[[Sequence[Exclusion]], ElasticSequence],
    ) -> list[Exclusion]:
        """What this plan adds is excluded from `position` on, what it no longer has is withdrawn; the rest stays.

        So does what a call in the run excluded, whether the plan has had the same samples or not. The same positions
        are other samples by now.
        """
        active = [one.what for one in exclusions if one.until is None and one.what.source != POSITIONS]
        added = without(self.exclude, (*saved.exclude, *active))
        removed = without(saved.exclude, self.exclude)
        check_selections(added, position, sizes)
        result: list[Exclusion] = []
        positions: list[Selection] = []  # of withdrawn exclusions, in part
        for one in exclusions:
            rest = without([one.what], removed) if one.planned else (one.what,)
            if one.until is not None or rest == (one.what,):
                result.append(one)
                continue
            if one.at < position:
                result.append(replace(one, until=position))
            if one.what.source == POSITIONS:
                positions += rest
            else:
                result += [Exclusion(position, what) for what in rest]
        if positions:
            result += excluded_from(positions, position, order(result))
        if added:
            result += excluded_from(added, position, order(exclusions))
        return result


def excluded_from(selections: Iterable[Selection], at: int, order: ElasticSequence) -> list[Exclusion]:
    """What a run records when these samples are excluded from position `at` on.

    All positions are counted in `order`, the order before this change; those before `at` have no effect.

    Raises:
        SamplerError: the positions are too large.
    """
    made = []
    for one in selections:
        if one.source != POSITIONS:
            made.append(Exclusion(at, one))
        elif one.last >= at:
            what = one._replace(first=max(at, one.first))
            made.append(Exclusion(at, what, order.key_ranges(what.first, what.last)))
    return made


def _is_same(before: Segment | None, after: Segment | None, position: int) -> bool:
    """Whether two planned segments are equal, except for the start of one that has not begun."""
    if before is None or after is None:
        return False
    ahead = before.start >= position and after.start >= position
    return before == (replace(after, start=before.start) if ahead else after)

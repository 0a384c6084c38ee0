"""Define segments, which set weights, temperature and epoch caps from a position on."""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from itertools import pairwise
from typing import Any

from exactdata.errors import nearest
from exactdata.order.permutation import MAX_SIZE
from exactdata.order.weights import SamplerError, check_names, check_weights, integer, is_finite

_LARGEST_FLOAT = sys.float_info.max


@dataclass(frozen=True)
class Segment:
    """Weights, temperature and caps from position `start` on, until the next segment.

    Attributes:
        start: position, counted over all ranks from the start of the run.
        weights: weights by source name. A source without a weight is not drawn.
        temperature: shares are proportional to weight^(1/temperature).
        max_epochs: epoch caps by source name. A source at its cap is no longer drawn.
    """

    start: int
    weights: Mapping[str, float]
    temperature: float = 1.0
    max_epochs: Mapping[str, float] = field(default_factory=dict)

    def cap(self, name: str, size: int) -> int | None:
        """Return the number of samples, counted over all epochs of a source, after which it is no longer drawn.

        The result is exact for the cap as a decimal number. For example, 4.35 epochs of 100 samples are 435 samples.

        Returns:
            None if the source has no cap.
        """
        epochs = self.max_epochs.get(name)
        return None if epochs is None else _samples_of(epochs, size)

    def to_json(self) -> dict[str, Any]:
        return {
            "start": self.start,
            "weights": {name: float(weight) for name, weight in sorted(self.weights.items())},
            "temperature": float(self.temperature),
            "max_epochs": {name: float(cap) for name, cap in sorted(self.max_epochs.items())},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Segment:
        return cls(int(value["start"]), dict(value["weights"]), value["temperature"], dict(value["max_epochs"]))

    def __str__(self) -> str:
        weights = ", ".join(f"{name} {weight:g}" for name, weight in sorted(self.weights.items()))
        caps = ", ".join(f"{name} {cap:g}" for name, cap in sorted(self.max_epochs.items()))
        return (
            f"[from position {self.start}: {weights}, temperature {self.temperature:g}"
            + (f", max_epochs {caps}" if caps else "")
            + "]"
        )


@cache
def _samples_of(epochs: float, size: int) -> int:
    return math.floor(Fraction(str(float(epochs))) * size)


def planned_segments(
    values: Iterable[Segment | Mapping[str, Any] | Sequence[Any]], base: Segment
) -> tuple[Segment, ...]:
    """Convert planned segments from any accepted form, and sort them. `base` is first unless a segment starts at 0.

    Raises:
        SamplerError: a segment is invalid, or two segments have the same start.
    """
    if isinstance(values, str | Mapping) or not isinstance(values, Iterable):
        raise SamplerError(f"segments {values!r}: it must be a list of segments")
    made = sorted((as_segment(value, base) for value in values), key=lambda one: one.start)
    for before, after in pairwise(made):
        if before.start == after.start:
            raise SamplerError(f"two segments start at the same position: {after.start}")
    found = (*([] if made and made[0].start == 0 else [base]), *made)
    check_values(found)
    return found


def segments_from_json(value: Any) -> tuple[Segment, ...]:
    """Parse a list of results of `Segment.to_json`.

    Raises:
        ValueError: the list is empty, or not sorted by start.
    """
    found = tuple(Segment.from_json(one) for one in value)
    if not found or any(before.start >= after.start for before, after in pairwise(found)):
        raise ValueError("segments that do not follow one another")
    check_values(found)
    return found


def segment_at(segments: Sequence[Segment], position: int) -> Segment:
    """Return the segment that applies at a position. The segments must be sorted by start."""
    return segments[bisect_right(segments, position, key=lambda one: one.start) - 1]


def check_sizes(sizes: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of the sources as Python integers.

    Raises:
        SamplerError: there is no source, or a size or the total is not an integer from 0 to 2^62.
    """
    if not sizes:
        raise SamplerError("no sources: sizes must map at least one source name to its number of samples")
    check_names(sizes)
    for name, size in sizes.items():
        if isinstance(size, bool) or not hasattr(size, "__index__") or not 0 <= size <= MAX_SIZE:
            raise SamplerError(f"source {name!r} has size {size!r}: expected an integer between 0 and 2^62")
    checked = {name: integer("size", size) for name, size in sizes.items()}
    if sum(checked.values()) > MAX_SIZE:
        raise SamplerError(
            f"the {len(checked)} sources have {sum(checked.values())} samples together: at most 2^62 ({MAX_SIZE}) can "
            "be indexed; leave out sources or split the run"
        )
    return checked


def check_sources(segments: Iterable[Segment], sizes: Mapping[str, int]) -> None:
    """Check that all sources named in segments exist.

    Raises:
        SamplerError: a source is unknown or empty.
    """
    filled = {name for name, size in sizes.items() if size}
    for segment in segments:
        if segment.weights.keys() <= filled and segment.max_epochs.keys() <= sizes.keys():
            continue
        for what, names in (("weight", segment.weights), ("max_epochs", segment.max_epochs)):
            for name in names:
                if name not in sizes:
                    raise SamplerError(
                        f"{what} for unknown source {name!r}{nearest(name, sizes)}; the sources are {', '.join(sizes)}"
                    )
        for name, weight in segment.weights.items():
            if weight > 0 and name not in filled:
                raise SamplerError(f"source {name!r} has weight {weight:g} but no samples: set its weight to 0")


def check_values(segments: Sequence[Segment]) -> None:
    """Check the numeric values in segments.

    Raises:
        SamplerError: a start, weight, temperature or cap is invalid.
    """
    numbers = [number for one in segments for number in (*one.weights.values(), *one.max_epochs.values())]
    numbers += [one.temperature for one in segments]
    if (
        set(map(type, numbers)) <= {int, float}
        and all(any(one.weights.values()) and one.temperature > 0 and 0 <= one.start <= MAX_SIZE for one in segments)
        and all(0 <= number <= _LARGEST_FLOAT for number in numbers)
    ):
        return  # this checks all segments at once; the slow check below finds the invalid value
    for segment in segments:
        check_weights(list(segment.weights.values()), segment.temperature, segment.weights)
        for name, cap in segment.max_epochs.items():
            if not (is_finite(cap) and cap >= 0):
                raise SamplerError(f"max_epochs {cap!r} of source {name!r}: expected a finite number of 0 or more")
        if not 0 <= integer("start", segment.start) <= MAX_SIZE:
            raise SamplerError(f"segment start {segment.start}: expected a position from 0 to 2^62")


def as_segment(value: Segment | Mapping[str, Any] | Sequence[Any], base: Segment) -> Segment:
    """Convert a planned segment from any of its accepted forms. Omitted values are taken from `base`.

    Args:
        value: a Segment, a mapping with `start` and any of `weights`, `temperature`, `max_epochs`, or a tuple
            (start, weights) or (start, weights, temperature).
        base: the segment that provides omitted values.

    Raises:
        SamplerError: the value has none of these forms or has an unknown key, or `start` is not an integer >= 0.
    """
    expected = "expected start (a position from 0 to 2^62), weights (by source name), temperature, max_epochs"
    if isinstance(value, (tuple, list)) and 0 < len(value) <= 3:  # isinstance is fastest with a tuple of types
        start, weights, temperature = (*value, None, None)[:3]
        caps: Any = None
        unknown = False
    elif isinstance(value, (dict, Segment, Mapping)):
        given = vars(value) if isinstance(value, Segment) else dict(value)
        unknown = not given.keys() <= {"start", "weights", "temperature", "max_epochs"}
        start, weights, temperature, caps = map(given.get, ("start", "weights", "temperature", "max_epochs"))
    else:
        raise SamplerError(f"segment {value!r}: {expected}")
    weights, caps = weights or {}, caps or {}
    mappings = isinstance(weights, (dict, Mapping)) and isinstance(caps, (dict, Mapping))
    begin = integer("start", start) if hasattr(start, "__index__") else -1
    if unknown or not mappings or not 0 <= begin <= MAX_SIZE:
        raise SamplerError(f"segment {value!r}: {expected}")
    return Segment(
        begin,
        {**base.weights, **weights},
        base.temperature if temperature is None else temperature,
        {**base.max_epochs, **caps},
    )

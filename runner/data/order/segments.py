"""Segments: from a position on, these weights, this temperature and these caps.

A train state records them. Does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runner.data.order.packed import pack_columns, unpack_columns
from runner.data.order.permutation import MAX_SIZE
from runner.data.order.weights import SamplerError, check_weights, integer, is_finite
from runner.errors import nearest

I64 = NDArray[np.int64]
F64 = NDArray[np.float64]

_LISTED = 100  # so many are written one by one, for people to read


@dataclass(frozen=True)
class Segment:
    """From position `start` on, until the next segment, these weights hold.

    Attributes:
        start: position, counted over all ranks from the start of the run.
        weights: by source name; a source without a weight is not drawn.
        temperature: shares are proportional to weight^(1/temperature).
        max_epochs: cap by source name: after that many epochs of it the source is no longer drawn.
    """

    start: int
    weights: Mapping[str, float]
    temperature: float = 1.0
    max_epochs: Mapping[str, float] = field(default_factory=dict)

    def cap(self, name: str, size: int) -> int | None:
        """The number of samples, counted through all epochs of the source, after which it is no longer drawn.

        Exact for the decimal number that was written: 4.35 epochs of 100 samples are 435.

        Returns:
            None if the source has no cap.
        """
        epochs = self.max_epochs.get(name)
        return None if epochs is None else math.floor(Fraction(str(epochs)) * size)

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


class Segments(Sequence[Segment]):
    """Segments sorted by their starts, in columns: a run may have 100,000, one for each change that it has made.

    Args:
        names: the sources, sorted.
        start: int64 of shape (count,).
        temperature: float64 of the same shape.
        weights: float64 of shape (count, sources); NaN: no weight.
        caps: the same of `max_epochs`; None if no segment has any.
    """

    def __init__(
        self, names: Sequence[str], start: I64, temperature: F64, weights: F64, caps: F64 | None = None
    ) -> None:
        self.names, self.start, self.temperature, self.weights = tuple(names), start, temperature, weights
        self.caps = None if caps is None or np.isnan(caps).all() else caps

    @classmethod
    def of(cls, segments: Iterable[Segment]) -> Segments:
        """Any segments.

        Raises:
            SamplerError: a start, weight, temperature or cap that none can have.
        """
        if isinstance(segments, Segments):
            return segments
        ones = sorted(segments, key=lambda one: one.start)
        made = cls._of_columns(
            [one.start for one in ones],
            [one.temperature for one in ones],
            [one.weights for one in ones],
            [one.max_epochs for one in ones],
        )
        if made is not None and made._is_valid():
            return made
        for one in ones:
            check_values(one)
        plain = [
            Segment(one.start, _floats(one.weights), float(one.temperature), _floats(one.max_epochs)) for one in ones
        ]
        return cls.of(plain)

    @classmethod
    def planned(cls, values: Iterable[Segment | Mapping[str, Any] | Sequence[Any]], base: Segment) -> Segments:
        """The base segment and planned ones in any of their accepted forms; one that starts at 0 replaces the base.

        Raises:
            SamplerError: an invalid segment, or two with the same start.
        """
        if isinstance(values, str | Mapping) or not isinstance(values, Iterable):
            raise SamplerError(f"segments {values!r}: it must be a list of segments")
        values = list(values)
        if not values:
            return cls.of([base])
        made = cls._of_pairs(values, base) or cls.of([as_segment(value, base) for value in values])
        twice = np.flatnonzero(made.start[1:] == made.start[:-1])
        if twice.size:
            raise SamplerError(f"two segments start at the same position: {made.start[twice[0]]}")
        return made if len(made) and made.start[0] == 0 else cls.of([base]).joined(made)

    @classmethod
    def _of_pairs(cls, values: list[Any], base: Segment) -> Segments | None:
        """Many pairs (start, weights) at once; None if there are other forms, or there is anything to be refused."""
        if set(map(type, values)) != {tuple} or set(map(len, values)) != {2}:
            return None
        start, weights = [one[0] for one in values], [one[1] for one in values]
        if set(map(type, weights)) != {dict}:
            return None
        changed: set[str] = set().union(*weights)
        if not changed <= base.weights.keys():
            return None
        ones = cls.of([base]).select(np.zeros(len(values), np.int64))
        begins, held = _column(start, int), ones.weights
        for name in changed:
            default = base.weights[name]
            column = _column([one.get(name, default) for one in weights])
            if column is None or np.isnan(column).any():
                return None
            held[:, ones.names.index(name)] = column
        if begins is None or not 0 <= begins.min() <= begins.max() <= MAX_SIZE:
            return None
        made = cls(ones.names, begins, ones.temperature, held, ones.caps)
        return made.select(np.argsort(begins, kind="stable")) if made._is_valid() else None

    @classmethod
    def _of_columns(
        cls, start: list[Any], temperature: list[Any], weights: list[Mapping[str, Any]], caps: list[Mapping[str, Any]]
    ) -> Segments | None:
        """None if a value is no Python number, or NaN."""
        names = sorted(set().union(*weights, *caps))
        begins, heat = _column(start, int), _column(temperature)
        held, capped = _table(weights, names), _table(caps, names)
        if begins is None or heat is None or held is None or capped is None:
            return None
        return cls(names, begins, heat, held, capped) if ((begins >= 0) & (begins <= MAX_SIZE)).all() else None

    def _is_valid(self) -> bool:
        tables = (self.weights,) if self.caps is None else (self.weights, self.caps)
        return bool(
            all((((table >= 0) & (table < np.inf)) | np.isnan(table)).all() for table in tables)
            and ((self.temperature > 0) & (self.temperature < np.inf)).all()
            and (self.weights > 0).any(axis=1).all()
        )

    def check(self, sizes: Mapping[str, int]) -> None:
        """Check the segments against the sources.

        Raises:
            SamplerError: an unknown or empty source.
        """
        wrong = np.zeros(len(self), bool)
        for i, name in enumerate(self.names):
            if name not in sizes:
                wrong |= ~np.isnan(self.weights[:, i])
                wrong |= False if self.caps is None else ~np.isnan(self.caps[:, i])
            elif not sizes[name]:
                wrong |= self.weights[:, i] > 0
        if wrong.any():
            check_segment(self[int(np.argmax(wrong))], sizes)

    def at(self, position: int) -> Segment:
        """The segment that holds at a position."""
        found: Segment = self[int(np.searchsorted(self.start, position, side="right")) - 1]
        return found

    def select(self, chosen: NDArray[Any]) -> Segments:
        """The chosen ones, by flags or by their numbers."""
        caps = None if self.caps is None else self.caps[chosen]
        return Segments(self.names, self.start[chosen], self.temperature[chosen], self.weights[chosen], caps)

    def joined(self, other: Segments) -> Segments:
        """These and the others, in the order of their starts."""
        if not len(self) or not len(other):
            return other if len(other) else self
        names = sorted({*self.names, *other.names})
        one, two = self._over(names), other._over(names)
        caps = None
        if one.caps is not None or two.caps is not None:
            caps = np.concatenate(
                [np.full_like(each.weights, np.nan) if each.caps is None else each.caps for each in (one, two)]
            )
        made = Segments(
            names,
            np.concatenate([one.start, two.start]),
            np.concatenate([one.temperature, two.temperature]),
            np.concatenate([one.weights, two.weights]),
            caps,
        )
        return made if one.start[-1] < two.start[0] else made.select(np.argsort(made.start, kind="stable"))

    def without(self, other: Segments) -> Segments:
        """Those that are not among the others."""
        names = sorted({*self.names, *other.names})
        one, two = self._over(names), other._over(names)
        place = np.minimum(np.searchsorted(two.start, one.start), max(0, len(two) - 1))
        if not len(two):
            return self
        return self.select(~one._is_equal(two.select(place)))

    def _is_equal(self, other: Segments) -> NDArray[np.bool_]:
        """Whether each is equal to that of the other ones, as many of the same sources."""
        same: NDArray[np.bool_] = (self.start == other.start) & (self.temperature == other.temperature)
        for mine, theirs in ((self.weights, other.weights), (self.caps, other.caps)):
            if mine is not theirs:
                one, two = (np.full((1, 1), np.nan) if each is None else each for each in (mine, theirs))
                same &= ((one == two) | (np.isnan(one) & np.isnan(two))).all(axis=1)
        return same

    def _over(self, names: Sequence[str]) -> Segments:
        """The same with columns for more sources."""
        if tuple(names) == self.names:
            return self
        place = [names.index(name) for name in self.names]

        def wider(values: F64) -> F64:
            made = np.full((len(self), len(names)), np.nan)
            made[:, place] = values
            return made

        caps = None if self.caps is None else wider(self.caps)
        return Segments(names, self.start, self.temperature, wider(self.weights), caps)

    def __len__(self) -> int:
        return len(self.start)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]

        def named(values: F64 | None) -> dict[str, float]:
            row = [] if values is None else values[index].tolist()
            return {name: value for name, value in zip(self.names, row, strict=False) if not math.isnan(value)}

        return Segment(int(self.start[index]), named(self.weights), float(self.temperature[index]), named(self.caps))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Segments):
            return NotImplemented
        if self is other or len(self) != len(other):
            return self is other
        names = sorted({*self.names, *other.names})
        return bool(self._over(names)._is_equal(other._over(names)).all())

    __hash__ = None  # type: ignore[assignment]

    def to_json(self) -> Any:
        """A list of them; of many, columns as packed texts."""
        return [one.to_json() for one in self] if len(self) <= _LISTED else dict(self._packed)

    @cached_property
    def _packed(self) -> dict[str, Any]:
        columns = [self.temperature, *self.weights.T, *([] if self.caps is None else self.caps.T)]
        values, codes = np.unique(np.concatenate(columns), return_inverse=True, equal_nan=True)
        numbers = codes.reshape(len(columns), -1)
        return {
            "count": len(self),
            "sources": list(self.names),
            "caps": self.caps is not None,
            "starts": pack_columns([self.start, *numbers]),
            "values": pack_columns([values.view(np.int64)]),
        }

    @classmethod
    def from_json(cls, value: Any) -> Segments:
        """The inverse of `to_json`.

        Raises:
            ValueError: it is not what `to_json` gives.
        """
        if isinstance(value, list | tuple):
            return cls.of([Segment.from_json(one) for one in value])
        names = [str(name) for name in value["sources"]]
        width = 1 + len(names) * (2 if value["caps"] else 1)
        start, *codes = unpack_columns(value["starts"], 1 + width)
        values = unpack_columns(value["values"], 1)[0].view(np.float64)
        if not len(start) == value["count"] or names != sorted(set(names)) or (np.diff(start) < 0).any():
            raise ValueError(f"{value['count']} segments of {len(names)} sources")
        if not len(start) or start[0] < 0 or start[-1] > MAX_SIZE:
            raise ValueError("segments that start outside 0 to 2^62")
        numbers = np.stack(codes)
        if numbers.min() < 0 or numbers.max() >= len(values):
            raise ValueError("a segment has a number that is not there")
        held = values[numbers]
        weights, caps = held[1 : 1 + len(names)].T, held[1 + len(names) :].T
        made = cls(
            names, start, held[0], np.ascontiguousarray(weights), np.ascontiguousarray(caps) if value["caps"] else None
        )
        if not made._is_valid():
            raise ValueError("a segment has a weight, temperature or cap that is none")
        return made


def _column(values: Sequence[Any], *kinds: type) -> NDArray[Any] | None:
    """Numbers of Python, or of one kind of them, as float64 or int64; None if there are others, or too large ones."""
    if set(map(type, values)) - set(kinds or (int, float)):
        return None
    try:
        return np.array(values, np.int64 if int in kinds else np.float64)
    except OverflowError:
        return None


def _table(mappings: Sequence[Mapping[str, Any]], names: Sequence[str]) -> F64 | None:
    """Their values as float64 of shape (mappings, names), NaN where there is none; None if one is no number."""
    if not any(mappings):
        return np.full((len(mappings), len(names)), np.nan)
    values = _column([one.get(name, math.nan) for name in names for one in mappings])
    absent = len(names) * len(mappings) - sum(map(len, mappings))
    if values is None or np.isnan(values).sum() != absent:
        return None  # or somebody has written NaN
    return values.reshape(len(names), len(mappings)).T


def _floats(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}


def segment_at(segments: Iterable[Segment], position: int) -> Segment:
    """The segment that holds at a position."""
    if isinstance(segments, Segments):
        return segments.at(position)
    return max((segment for segment in segments if segment.start <= position), key=lambda segment: segment.start)


def check_sizes(sizes: Mapping[str, Any]) -> dict[str, int]:
    """The sizes of the sources as Python integers.

    Raises:
        SamplerError: there is no source, or a size or the sum of all is not an integer from 0 to 2^62.
    """
    if not sizes:
        raise SamplerError("no sources: sizes must map at least one source name to its number of samples")
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


def check_segment(segment: Segment, sizes: Mapping[str, int]) -> None:
    """Check a segment against the sources.

    Raises:
        SamplerError: an unknown or empty source, an invalid weight, temperature or cap.
    """
    for what, names in (("weight", segment.weights), ("max_epochs", segment.max_epochs)):
        for name in names:
            if name not in sizes:
                raise SamplerError(
                    f"{what} for unknown source {name!r}{nearest(name, sizes)}; the sources are {', '.join(sizes)}"
                )
    check_values(segment)
    for name, weight in segment.weights.items():
        if weight > 0 and sizes[name] == 0:
            raise SamplerError(f"source {name!r} has weight {weight:g} but no samples: set its weight to 0")


def check_values(segment: Segment) -> None:
    """Check the numbers of a segment.

    Raises:
        SamplerError: a start, weight, temperature or cap that none can have.
    """
    check_weights(list(segment.weights.values()), segment.temperature, segment.weights)
    for name, cap in segment.max_epochs.items():
        if not (is_finite(cap) and cap >= 0):
            raise SamplerError(f"max_epochs {cap!r} of source {name!r}: expected a finite number of 0 or more")
    if not 0 <= integer("start", segment.start) <= MAX_SIZE:
        raise SamplerError(f"segment start {segment.start}: expected a position from 0 to 2^62")


def as_segment(value: Segment | Mapping[str, Any] | Sequence[Any], base: Segment) -> Segment:
    """A planned segment from any of its accepted forms. What it leaves out is taken from `base`.

    Args:
        value: a Segment, a mapping with `start` and any of `weights`, `temperature`, `max_epochs`, or a tuple
            (start, weights) or (start, weights, temperature).
        base: the segment in force without the planned one.

    Raises:
        SamplerError: none of these forms, an unknown key, or `start` is not an integer of 0 or more.
    """
    expected = "expected start (a position from 0 to 2^62), weights (by source name), temperature, max_epochs"
    if isinstance(value, Segment):
        given = vars(value)
    elif isinstance(value, Mapping):
        given = dict(value)
    elif isinstance(value, Sequence) and 0 < len(value) <= 3:
        given = dict(zip(("start", "weights", "temperature"), value, strict=False))
    else:
        raise SamplerError(f"segment {value!r}: {expected}")
    unknown = set(given) - {"start", "weights", "temperature", "max_epochs"}
    start, temperature = given.get("start"), given.get("temperature")
    weights, caps = (given.get(key) or {} for key in ("weights", "max_epochs"))
    mappings = isinstance(weights, Mapping) and isinstance(caps, Mapping)
    if unknown or not mappings or not hasattr(start, "__index__") or not 0 <= integer("start", start) <= MAX_SIZE:
        raise SamplerError(f"segment {given!r}: {expected}")
    return Segment(
        integer("start", start),
        {**base.weights, **weights},
        base.temperature if temperature is None else temperature,
        {**base.max_epochs, **caps},
    )

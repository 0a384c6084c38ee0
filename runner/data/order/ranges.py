"""Sets of integers as sorted ranges: what 100,000 exclusions are made of. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]
Flags = NDArray[np.bool_]

_NONE = np.zeros(0, np.int64)
_LARGEST = np.int64(1 << 62)
_TOTALLED = 16  # values of which the total is kept as a whole


@dataclass(frozen=True, eq=False)
class Ranges:
    """Ranges `first` to `last`, inclusive, sorted, disjoint and not touching: equal if and only if the integers are.

    Attributes:
        first: int64 of shape (count,).
        last: the same.
    """

    first: I64 = field(default_factory=lambda: _NONE)
    last: I64 = field(default_factory=lambda: _NONE)

    @classmethod
    def of(cls, first: NDArray[Any], last: NDArray[Any]) -> Ranges:
        """Any ranges, in any order."""
        first, last = np.asarray(first, np.int64), np.asarray(last, np.int64)
        if len(first) > 1 and not (first[1:] > last[:-1] + 1).all():
            order = np.argsort(first, kind="stable")
            first, last = first[order], np.maximum.accumulate(last[order])
            begins = np.flatnonzero(np.concatenate([[True], first[1:] > last[:-1] + 1]))
            first, last = first[begins], last[np.append(begins[1:], len(last)) - 1]
        return cls(first, last)

    def __len__(self) -> int:
        return len(self.first)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self.first.tolist(), self.last.tolist(), strict=True)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ranges):
            return NotImplemented
        return np.array_equal(self.first, other.first) and np.array_equal(self.last, other.last)

    def __hash__(self) -> int:
        return hash((self.first.tobytes(), self.last.tobytes()))

    @property
    def total(self) -> int:
        """How many integers they are."""
        return int((self.last - self.first).sum()) + len(self)

    def contains(self, values: I64) -> Flags:
        """Whether each value is in a range."""
        if not len(self):
            return np.zeros(len(values), bool)
        at = np.searchsorted(self.first, values, side="right") - 1
        return (at >= 0) & (values <= self.last[at])

    def from_on(self, lowest: int) -> Ranges:
        """Those of the integers that are `lowest` or more."""
        begin = int(np.searchsorted(self.last, lowest))
        return Ranges(np.maximum(self.first[begin:], lowest), self.last[begin:])

    def union(self, other: Ranges) -> Ranges:
        """The integers of both."""
        return Ranges.of(np.concatenate([self.first, other.first]), np.concatenate([self.last, other.last]))

    def without(self, other: Ranges) -> Ranges:
        """Those of the integers that are not in `other`."""
        first, last, _ = rest_of(self.first, self.last, other)
        return Ranges(first, last)

    def touches(self, first: I64, last: I64) -> Flags:
        """Which of the ranges `first` to `last` have integers of these."""
        return np.searchsorted(self.last, first) < np.searchsorted(self.first, last, side="right")

    def pieces(self, size: int) -> Iterator[I64]:
        """All integers, sorted, up to `size` at a time."""
        lengths = self.last - self.first + 1
        ends = np.cumsum(lengths)
        for begin in range(0, self.total, size):
            stop = min(begin + size, self.total)
            low, high = np.searchsorted(ends, [begin, stop - 1], side="right").tolist()
            counts = lengths[low : high + 1].copy()
            firsts = self.first[low : high + 1].copy()
            skipped = begin - int(ends[low] - lengths[low])
            firsts[0] += skipped
            counts[0] -= skipped
            counts[-1] = stop - begin - int(counts[:-1].sum())
            starts = np.cumsum(counts) - counts
            yield np.repeat(firsts - starts, counts) + np.arange(stop - begin)


def rest_of(first: I64, last: I64, removed: Ranges) -> tuple[I64, I64, I64]:
    """What is left of each range, whether they overlap or not, without the integers of `removed`.

    Returns:
        First and last of each piece, and the number of the range that it is of.
    """
    gap_first = np.concatenate([[-_LARGEST], removed.last + 1])
    gap_last = np.concatenate([removed.first - 1, [_LARGEST]])
    low, high = np.searchsorted(gap_last, first), np.searchsorted(gap_first, last, side="right")
    counts = np.maximum(high - low, 0)
    owner = np.repeat(np.arange(len(first)), counts)
    gap = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts) + low[owner]
    return np.maximum(first[owner], gap_first[gap]), np.minimum(last[owner], gap_last[gap]), owner


def narrow(values: NDArray[Any]) -> NDArray[Any]:
    """The same integers in the smallest type that holds them, and smaller and larger ones; once if all are equal."""
    if not values.size:
        return values.astype(np.int8)
    lowest, highest = int(values.min()), int(values.max())
    fits = (
        kind for kind in (np.int8, np.int16, np.int32) if np.iinfo(kind).min < lowest <= highest < np.iinfo(kind).max
    )
    kind = next(fits, np.int64)
    return values.astype(kind) if lowest < highest else np.broadcast_to(kind(lowest), values.shape)


def search(column: NDArray[Any], values: I64, side: Literal["left", "right"] = "left") -> NDArray[np.intp]:
    """np.searchsorted of a `narrow` column, which numpy would widen at every call."""
    limits = np.iinfo(column.dtype)
    return np.searchsorted(column, np.clip(values, limits.min, limits.max).astype(column.dtype), side=side)


class RunningTotals:
    """How much the values before each place come to, for each value and for all: a byte each, if they are small."""

    def __init__(self, values: I64) -> None:
        totals = np.concatenate([[0], np.cumsum(values)])
        before = totals[::_TOTALLED]
        self._before = narrow(before)
        self._since = narrow(totals - np.repeat(before, _TOTALLED)[: len(totals)])

    def __getitem__(self, places: NDArray[np.intp]) -> I64:
        totals: I64 = self._before[places // _TOTALLED].astype(np.int64)
        totals += self._since[places]
        return totals


class NarrowRanges:
    """Ranges in as few bytes as hold them."""

    def __init__(self, ranges: Ranges) -> None:
        self._first, self._more = narrow(ranges.first), narrow(ranges.last - ranges.first)

    def __len__(self) -> int:
        return len(self._first)

    def widened(self) -> Ranges:
        """The ranges."""
        first = self._first.astype(np.int64)
        return Ranges(first, first + self._more)

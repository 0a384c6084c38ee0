"""Represent sets of integers as sorted ranges, for exclusions. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from exactdata.order.arrays import I64
from exactdata.order.state_checks import LARGEST

_EMPTY = np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class Ranges:
    """A set of integers, as sorted ranges `first` to `last` (both included) that neither overlap nor touch.

    Attributes:
        first: first integer of each range, int64 of shape (count,).
        last: last integer of each range, int64 of shape (count,).
    """

    first: I64 = field(default_factory=lambda: _EMPTY)
    last: I64 = field(default_factory=lambda: _EMPTY)

    @classmethod
    def of(cls, pairs: Sequence[tuple[int, int]]) -> Ranges:
        """Merge ranges (first, last) in any order. They may overlap."""
        first, last = np.fromiter(chain.from_iterable(pairs), np.int64, 2 * len(pairs)).reshape(-1, 2).T
        order = np.argsort(first, kind="stable")
        first, last = first[order], np.maximum.accumulate(last[order])
        begins = np.flatnonzero(np.append(True, first[1:] > last[:-1] + 1)[: len(first)])
        return cls(first[begins], last[np.append(begins[1:], len(last)) - 1] if len(first) else last)

    def __len__(self) -> int:
        return len(self.first)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self.first.tolist(), self.last.tolist(), strict=True)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ranges):
            return NotImplemented
        return np.array_equal(self.first, other.first) and np.array_equal(self.last, other.last)

    __hash__ = None  # type: ignore[assignment]

    @property
    def total(self) -> int:
        """Return the number of integers in the set."""
        return int((self.last - self.first).sum()) + len(self)

    def values(self) -> I64:
        """Return all integers in the set, sorted, int64 of shape (total,)."""
        counts = self.last - self.first + 1
        return np.repeat(self.first - (np.cumsum(counts) - counts), counts) + np.arange(self.total)

    def from_on(self, lowest: int) -> Ranges:
        """Return the integers that are >= `lowest`."""
        begin = int(np.searchsorted(self.last, lowest))
        return Ranges(np.maximum(self.first[begin:], lowest), self.last[begin:])

    def without(self, other: Ranges) -> Ranges:
        """Return the integers that are not in `other`."""
        gap_first = np.append(-LARGEST, other.last + 1)
        gap_last = np.append(other.first - 1, LARGEST)
        low, high = np.searchsorted(gap_last, self.first), np.searchsorted(gap_first, self.last, side="right")
        counts = high - low  # number of gaps that each range overlaps
        owner = np.repeat(np.arange(len(self)), counts)
        gap = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts) + low[owner]
        return Ranges(np.maximum(self.first[owner], gap_first[gap]), np.minimum(self.last[owner], gap_last[gap]))

"""Pack pieces of documents into rows using best-fit decreasing. Handles millions of documents.

Pieces are placed from the longest to the shortest, each into the fullest row in which it fits (Ding et al. 2024, "Fewer
Truncations Improve Language Modeling"). Pieces of the same length are interchangeable, and so are rows whose pieces
have the same lengths. Both are processed in groups, so the cost is two passes over the documents and one step for each
distinct length.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from exactdata.order.arrays import I64

U32 = npt.NDArray[np.uint32]


@dataclass
class _Group:
    """A group of rows whose pieces have the same lengths.

    Attributes:
        count: the number of rows.
        content: tuples of a length, the pieces of this length in each row, and the index of the group's first piece
            among all pieces of this length.
    """

    count: int
    content: list[tuple[int, int, int]] = field(default_factory=list)

    def split(self, count: int) -> tuple[_Group, _Group]:
        """Split the group into its first `count` rows and the remaining rows."""
        others = [(length, each, first + count * each) for length, each, first in self.content]
        return _Group(count, self.content), _Group(self.count - count, others)


class _Rows:
    """The rows filled so far, grouped by the free tokens in each."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.by_room: dict[int, list[_Group]] = defaultdict(list)
        self._rooms: list[int] = []  # free tokens of the groups that have rows, ascending

    def _put(self, room: int, group: _Group) -> None:
        if not group.count:
            return
        if not self.by_room[room]:
            insort(self._rooms, room)
        self.by_room[room].append(group)

    def _take(self, least: int) -> tuple[int, _Group] | None:
        """Remove and return a group of the fullest rows that have at least `least` free tokens."""
        at = bisect_left(self._rooms, least)
        if at == len(self._rooms):
            return None
        room = self._rooms[at]
        group = self.by_room[room].pop()
        if not self.by_room[room]:
            del self._rooms[at]
        return room, group

    def add(self, length: int, count: int) -> None:
        """Add `count` pieces of length `length`, which must not exceed any length added before."""
        done = 0
        while done < count:
            room, group = self._take(length) or (self.capacity, _Group(count - done))
            each = room // length
            full, rest = (group.count, 0) if count - done >= group.count * each else divmod(count - done, each)
            filled, others = group.split(full)
            filled.content.append((length, each, done))
            self._put(room - each * length, filled)
            done += full * each
            if rest:
                last, others = others.split(1)
                last.content.append((length, rest, done))
                self._put(room - rest * length, last)
                done += rest
            if others.content:  # keeps existing rows, drops new rows that were not needed
                self._put(room, others)


def best_fit(lengths: npt.NDArray[np.integer], capacity: int) -> tuple[U32, U32]:
    """Assign pieces to rows.

    Args:
        lengths: number of tokens in each piece, from 1 to `capacity`, shape (n,).
        capacity: number of tokens in a row.

    Returns:
        The indices of the pieces, row by row, shape (n,), and where each row begins among them, shape (rows + 1,).
    """
    kind = np.uint16 if capacity <= np.iinfo(np.uint16).max else np.uint32  # numpy uses a radix sort for 16 bits
    by_length = np.argsort(lengths.astype(kind), kind="stable").astype(np.uint32)
    counts = np.bincount(lengths)
    firsts = np.cumsum(counts) - counts
    rows = _Rows(capacity)
    for length in np.flatnonzero(counts)[::-1].tolist():
        rows.add(length, int(counts[length]))
    return _written(rows, by_length, firsts)


def _written(rows: _Rows, by_length: U32, firsts: I64) -> tuple[U32, U32]:
    order = np.empty(len(by_length), np.uint32)
    groups = [group for room in sorted(rows.by_room) for group in rows.by_room[room]]
    sizes = np.array([sum(each for _, each, _ in group.content) for group in groups], np.int64)
    counts = np.array([group.count for group in groups], np.int64)
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.repeat(sizes, counts))]).astype(np.uint32)
    end = 0
    for group, size in zip(groups, sizes.tolist(), strict=True):
        block = order[end : end + group.count * size].reshape(group.count, size)
        column = 0
        for length, each, first in group.content:
            begin = int(firsts[length]) + first
            block[:, column : column + each] = by_length[begin : begin + group.count * each].reshape(-1, each)
            column += each
        end += group.count * size
    return order, starts

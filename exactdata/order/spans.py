"""Resolve segments, exclusions and epoch caps into spans, which are ranges of positions with constant shares.

Lookups are vectorized over spans, so the cost of a batch does not depend on how many spans it touches. This module does
not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exactdata.order.arrays import I64
from exactdata.order.exclusions import Exclusions, LeftOut
from exactdata.order.hashing import keys_of
from exactdata.order.interleave import Interleave
from exactdata.order.segments import Segment
from exactdata.order.source_stream import SourceStream
from exactdata.order.weights import SamplerError, shares

END = 1 << 62  # upper bound of all positions and numbers
_QUANTUM = 1 << 44  # multiples of 2^-44, so that no platform's exp() changes the order

Chosen = I64 | slice


class Spans:
    """All spans of an order, with vectorized lookups.

    Args:
        seed: seed of the order.
        names: names of the sources of the order, sorted.
        starts: sorted positions at which a span may begin, int64 of shape (count,). The first is 0.
        quanta: share of each source from each start on, times 2^44, int64 of shape (count, sources). If shares do not
            change at a start, the span continues. If all shares are 0, the order ends.

    Attributes:
        start: first position of each span, and the position after the last span, int64 of shape (spans + 1,).
        begin: number of samples drawn from each source before each position in `start`, int64 of shape (spans + 1,
            sources).
        stop: one past the last position, or 2^62 in an endless order.
    """

    def __init__(self, seed: int, names: Sequence[str], starts: I64, quanta: I64) -> None:
        begun = np.append(True, (quanta[1:] != quanta[:-1]).any(axis=1)).nonzero()[0]
        ended = (quanta[begun].sum(axis=1) == 0).nonzero()[0][:1]
        self.stop = int(starts[begun[ended[0]]]) if ended.size else END
        begun = begun[: ended[0]] if ended.size else begun
        self.start = start = np.append(starts[begun], self.stop)
        self._quanta = quanta = quanta[begun]
        self._mixtures: list[tuple[I64, Interleave]] = []  # one Interleave for each set of mixed sources
        self._set_of, self._place = np.zeros((2, len(quanta)), np.int64)  # each span's set, and mixture within it
        present = quanta > 0
        sets = present[:1]
        if len(present) > 1 and (present != sets).any():
            sets, self._set_of = np.unique(present, axis=0, return_inverse=True)
            self._set_of = self._set_of.reshape(-1)
        given = np.zeros((len(start), len(names)), np.int64)
        for i, has_source in enumerate(sets):
            rows, sources = (self._set_of == i).nonzero()[0], has_source.nonzero()[0]
            self._place[rows] = np.arange(len(rows))
            mixed = "".join(f"\x1fstr:{names[source]}" for source in sources.tolist())
            keys = keys_of(f"int:{seed}\x1fstr:interleave\x1fint:{at}{mixed}" for at in start[rows].tolist())
            mixtures = Interleave(quanta[rows[:, None], sources], keys)
            self._mixtures.append((sources, mixtures))
            ended = (start[rows + 1] < END).nonzero()[0]
            if ended.size:
                slots = start[rows[ended] + 1] - start[rows[ended]]
                given[rows[ended, None] + 1, sources] = mixtures.counts(slots, ended)
        if self.stop == END:
            given[-1, present[-1]] = END
        total = np.cumsum(given, axis=0).view(np.uint64)  # correct even beyond 2^63
        self.begin = np.minimum(total, np.uint64(END)).view(np.int64)

    def __len__(self) -> int:
        return len(self._quanta)

    def quanta_at(self, position: int) -> list[int]:
        """Return the share of each source at a position, times 2^44. After the last span, return the last shares."""
        quanta: list[int] = self._quanta[np.searchsorted(self.start[1:-1], position, side="right")].tolist()
        return quanta

    def numbers(self, positions: I64) -> tuple[I64, I64]:
        """Return the source at each position, and the number of earlier samples of that source."""
        ids, numbers = np.empty((2, len(positions)), np.int64)
        for rows, chosen, sources, mixtures, place in self._parts(self._rows_of(positions)):
            member, counted = mixtures.locate((positions[chosen] - self.start[rows]).view(np.uint64), place)
            found = member if len(sources) == self.begin.shape[1] else sources[member]
            counts = counted.view(np.int64) + self.begin[rows, found]
            if isinstance(chosen, slice):
                return found, counts
            ids[chosen], numbers[chosen] = found, counts
        return ids, numbers

    def numbers_at(self, positions: I64) -> I64:
        """Count the samples drawn from each source before each position, int64 of shape (count, sources)."""
        rows = self._rows_of(positions)
        numbers = (
            np.repeat(self.begin[rows : rows + 1], len(positions), 0) if isinstance(rows, int) else self.begin[rows]
        )
        for of, chosen, sources, mixtures, place in self._parts(rows):
            counts = mixtures.counts(positions[chosen] - self.start[of], place)
            if isinstance(chosen, slice) and len(sources) == numbers.shape[1]:
                numbers += counts
            else:
                numbers[np.arange(len(positions))[chosen, None], sources] += counts
        numbers[positions >= self.start[-1]] = self.begin[-1]
        return numbers

    def find(self, source: int, numbers: I64) -> I64:
        """Return the position of each sample of a source, given its number, or -1 if the order does not contain it."""
        positions = np.full(len(numbers), -1, np.int64)
        rows = np.searchsorted(self.begin[1:-1, source], numbers, side="right")
        here = np.flatnonzero((numbers >= self.begin[rows, source]) & (numbers < self.begin[rows + 1, source]))
        for of, chosen, sources, mixtures, place in self._parts(rows[here]):
            number = numbers[here[chosen]] - self.begin[of, source]
            member = np.full(len(number), np.searchsorted(sources, source))
            found = mixtures.find(member, number.view(np.uint64), place).view(np.int64) + self.start[of]
            positions[here[chosen]] = np.where(found < self.start[np.asarray(of) + 1], found, np.int64(-1))
        return positions

    def share_bound(self, source: int) -> float:
        """Return an upper bound on |samples of this source - share * slots| within any span."""
        return max(
            (
                mixtures.share_bound(int(np.searchsorted(sources, source)), mixture)
                for sources, mixtures in self._mixtures
                if source in sources
                for mixture in range(len(mixtures.keys))
            ),
            default=0.0,
        )

    def _rows_of(self, positions: I64) -> int | I64:
        """Return the span of each position, or a single number if all positions are in the same span."""
        if len(self) == 1 or not len(positions):
            return 0
        rows: I64 = np.searchsorted(self.start[1:-1], positions, side="right")
        return rows if (rows != rows[:1]).any() else int(rows[0])

    def _parts(self, rows: int | I64) -> Iterator[tuple[int | I64, Chosen, I64, Interleave, int | I64]]:
        """Yield groups of spans that mix the same sources: their rows, the indices in `rows`, and their mixtures."""
        if isinstance(rows, int):
            yield rows, slice(None), *self._mixtures[self._set_of[rows]], int(self._place[rows])
        elif len(self._mixtures) == 1:
            yield rows, slice(None), *self._mixtures[0], rows
        else:
            set_of = self._set_of[rows]
            for i in np.unique(set_of).tolist():
                chosen = np.flatnonzero(set_of == i)
                yield rows[chosen], chosen, *self._mixtures[i], self._place[rows[chosen]]


def resolved(seed: int, streams: Sequence[SourceStream], segments: Sequence[Segment], exclusions: Exclusions) -> Spans:
    """Resolve the spans of an order, and add the exclusions to the streams.

    Segments and exclusions are processed in the order of their positions. An exclusion affects the streams only from
    the position at which it was made. Even if it leaves a source without samples below its cap, the samples consumed
    before must not change.

    Args:
        seed: seed of the order.
        streams: one stream per source, sorted by source name.
        segments: at least one segment, sorted by start.
        exclusions: exclusions of existing sources.

    Raises:
        SamplerError: the order is empty, every sample of a source is excluded, or a source is unknown.
    """
    known = {stream.name: i for i, stream in enumerate(streams)}
    left_out = LeftOut(exclusions)
    for name in sorted(set().union(*left_out.changes.values()) - known.keys()):
        raise SamplerError(f"exclude: unknown source {name!r}")
    rows = _Rows(seed, streams, [one for one in segments if one.start < END])  # positions are below END
    at = 0
    while True:
        numbers = rows.spans.numbers_at(np.array([at]))[0] if at else np.zeros(len(streams), np.int64)
        for name in sorted(left_out.changes.get(at, ())):
            streams[known[name]].leave_out(int(numbers[known[name]]), *left_out.at(name, at))
        reached = rows.drop_capped(at, numbers)
        following = min([change for change in left_out.changes if change > at] + reached, default=END)
        if following >= END or following > rows.spans.stop:
            return rows.spans
        at = following


class _Rows:
    """The shares at each position where a span may begin, and the resulting spans.

    Args:
        seed: seed of the order.
        streams: one stream per source, sorted by source name.
        segments: segments sorted by start.
    """

    def __init__(self, seed: int, streams: Sequence[SourceStream], segments: Sequence[Segment]) -> None:
        self._seed, self._streams, self._names = seed, streams, [stream.name for stream in streams]
        self._starts = np.array([one.start for one in segments], np.int64)
        self._planned = _quanta(segments, self._names)  # shares without caps
        self._drawn = self._planned.copy()  # shares with caps, as far as they are known
        caps = [[one.cap(stream.name, stream.size) for stream in streams] for one in segments if one.max_epochs]
        self._caps: NDArray[Any] | None = None  # the key at which each source reaches its cap, for each row, or None
        if caps:
            self._caps = np.full(self._planned.shape, None)
            self._caps[[bool(one.max_epochs) for one in segments]] = caps
        self.spans = Spans(seed, self._names, self._starts, self._drawn)

    def drop_capped(self, at: int, numbers: I64) -> list[int]:
        """From position `at` on, draw only sources that are below their cap there.

        Args:
            at: position from which sources at their cap are dropped.
            numbers: number of samples drawn from each source before `at`.

        Returns:
            A list with the next position at which a source reaches its cap, or an empty list if none does.

        Raises:
            SamplerError: no source can be drawn from position 0 on.
        """
        if self._caps is None:
            return []
        first = int(np.searchsorted(self._starts, at, side="right")) - 1
        limits = self._limits(first)
        drawn = np.where(numbers < limits, self._planned[first:], 0)
        if (drawn != self._drawn[first:]).any():
            if self._starts[first] < at:
                self._starts = np.insert(self._starts, first + 1, at)
                self._planned, self._drawn, self._caps = (
                    np.insert(each, first, each[first], axis=0) for each in (self._planned, self._drawn, self._caps)
                )
                first += 1
            self._drawn[first:] = drawn
            if not self._drawn[0].any():
                raise SamplerError(
                    "the order is empty: caps and exclusions leave no sample of any source with a weight; raise "
                    "max_epochs, or exclude less"
                )
            self.spans = Spans(self._seed, self._names, self._starts, self._drawn)
        counts = self.spans.numbers_at(np.append(self._starts[first:], END))
        hit = (drawn > 0) & (limits < END) & (counts[1:] >= limits)
        if not hit.any():
            return []
        row = int(np.argmax(hit.any(axis=1)))
        sources = np.flatnonzero(hit[row])
        if (counts[row, sources] >= limits[row, sources]).any():  # a segment with a lower cap begins at this row
            return [int(self._starts[first + row])]
        last = [self.spans.find(source, limits[row, [source]] - 1)[0] for source in sources.tolist()]
        return [int(min(last)) + 1]

    def _limits(self, first: int) -> I64:
        """Return how many samples each source yields until its cap (END without a cap), in the rows from `first` on."""
        assert self._caps is not None
        limits = np.full((len(self._starts) - first, len(self._streams)), END, np.int64)
        for stream, caps, column in zip(self._streams, self._caps[first:].T, limits.T, strict=True):
            for key in set(caps.tolist()) - {None}:
                column[caps == key] = min(END, stream.number_before(key))
        return limits


def _quanta(segments: Sequence[Segment], names: Sequence[str]) -> I64:
    """Return each source's share in each segment, times 2^44 (0 without a weight), int64 (segments, sources)."""
    none = dict.fromkeys(names, 0.0)
    weights = np.array([[*{**none, **one.weights}.values()] for one in segments], np.float64)
    temperature = np.array([one.temperature for one in segments], np.float64)
    with np.errstate(over="ignore"):
        total = np.add.accumulate(weights, axis=1)[:, -1]  # add in sequence, as `shares` does
    plain = (temperature == 1) & np.isfinite(total)
    values = np.zeros_like(weights)
    values[plain] = weights[plain] / total[plain, None]
    if not plain.all():
        distinct, which = np.unique(np.column_stack([temperature, weights])[~plain], axis=0, return_inverse=True)
        values[~plain] = np.array([shares(mixed, heat) for heat, *mixed in distinct.tolist()])[which.reshape(-1)]
    quanta: I64 = np.where(weights > 0, np.maximum(1, np.rint(values * _QUANTUM)), 0).astype(np.int64)
    return quanta

"""Resolves segments, exclusions and epoch caps into spans: ranges of positions with constant shares.

Without caps the spans follow from the segments alone, and are resolved as far as somebody looks, some hundred at a
time: a run that has changed its weights 100,000 times starts as fast as one that never has. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from runner.data.order.caching import cached
from runner.data.order.exclusions import Exclusions
from runner.data.order.hashing import stream_key
from runner.data.order.interleave import Interleave
from runner.data.order.segments import Segment, Segments
from runner.data.order.source_stream import SourceStream
from runner.data.order.weights import SamplerError, shares

END = 1 << 62  # all positions and numbers are below this
_QUANTUM = 1 << 44  # shares are rounded to multiples of 2^-44, so that no platform's exp() changes the order

_TABLE = 256  # spans resolved together, fewer of many sources
_CELLS = 1 << 16  # spans resolved together, times sources
_TABLES = 4  # kept as they were resolved

I64 = NDArray[np.int64]
Chosen = I64 | slice


class Quanta(Protocol):
    """Shares, times 2^44, of every source of the order, 0 for those that are not drawn."""

    def __getitem__(self, rows: slice) -> I64:
        """Of some spans that may begin, int64 of shape (spans, sources)."""
        ...


@dataclass(frozen=True)
class Span:
    """Positions [start, stop) with constant shares.

    Attributes:
        start: first position; slot 0 of its mixture.
        stop: one past the last position; 2^62 in an endless order.
        sources: ids of the sources of the mixture.
        quanta: share of each of them, times 2^44.
        key: of the mixture.
    """

    start: int
    stop: int
    sources: I64
    quanta: tuple[int, ...]
    key: int


class SpanTable:
    """Consecutive spans, looked up together however many of them some positions touch.

    Args:
        seed: of the order.
        names: of the sources of the order, sorted.
        start: of each span and of what follows the last, int64 of shape (spans + 1,).
        quanta: of each span, 0 for sources that it does not have, int64 of shape (spans, sources).
        begin: how many samples each source has given before the first span.

    Attributes:
        start: as above.
        begin: how many samples each source has given before each span, and before what follows the last, int64 of
            shape (spans + 1, sources).
    """

    def __init__(self, seed: int, names: Sequence[str], start: I64, quanta: I64, begin: I64) -> None:
        self.start, self._quanta = start, quanta
        self._mixtures: list[tuple[I64, Interleave]] = []  # by the set of sources that they mix
        self._set_of, self._place = np.zeros((2, len(quanta)), np.int64)  # its set, and the number of its mixture
        present = quanta > 0
        sets = present[:1]
        if len(present) > 1 and (present != sets).any():
            sets, self._set_of = np.unique(present, axis=0, return_inverse=True)
            self._set_of = self._set_of.reshape(-1)
        given = np.zeros((len(start), len(names)), np.int64)
        given[0] = begin
        for i, has_source in enumerate(sets):
            rows, sources = (self._set_of == i).nonzero()[0], has_source.nonzero()[0]
            self._place[rows] = np.arange(len(rows))
            mixed = [names[source] for source in sources.tolist()]
            keys = [stream_key(seed, "interleave", at, *mixed) for at in start[rows].tolist()]
            mixtures = Interleave(quanta[rows[:, None], sources], np.array(keys, np.uint64))
            self._mixtures.append((sources, mixtures))
            ended = (start[rows + 1] < END).nonzero()[0]
            if ended.size:
                slots = start[rows[ended] + 1] - start[rows[ended]]
                given[rows[ended, None] + 1, sources] = mixtures.counts(slots, ended)
        if start[-1] == END:
            given[-1, present[-1]] = END
        total = np.cumsum(given, axis=0).view(np.uint64)  # beyond 2^63, too
        self.begin = np.minimum(total, np.uint64(END)).view(np.int64)

    def __len__(self) -> int:
        return len(self._quanta)

    def __getitem__(self, row: int) -> Span:
        sources, mixtures = self._mixtures[self._set_of[row]]
        quanta = tuple(self._quanta[row, sources].tolist())
        key = int(mixtures.keys[self._place[row]])
        return Span(int(self.start[row]), int(self.start[row + 1]), sources, quanta, key)

    def row_of(self, position: int) -> int:
        """The span that has a position, or the last one."""
        return int(np.searchsorted(self.start[1:-1], position, side="right"))

    def numbers(self, positions: I64) -> tuple[I64, I64]:
        """Source of each position, and how many samples the source has given before."""
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
        """How many samples each source has given before each position, int64 of shape (count, sources)."""
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
        """The position of each sample of a source, by its number; -1 if these spans do not have it."""
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
        """Upper bound on |samples of this source - share * slots| within any of the spans."""
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
        """The span of each position; a number if it is the same of all."""
        if len(self) == 1 or not len(positions):
            return 0
        rows: I64 = np.searchsorted(self.start[1:-1], positions, side="right")
        return rows if (rows != rows[:1]).any() else int(rows[0])

    def _parts(self, rows: int | I64) -> Iterator[tuple[int | I64, Chosen, I64, Interleave, int | I64]]:
        """The spans that mix the same sources: their rows, which of `rows` these are, and their mixtures."""
        if isinstance(rows, int):
            yield rows, slice(None), *self._mixtures[self._set_of[rows]], int(self._place[rows])
        elif len(self._mixtures) == 1:
            yield rows, slice(None), *self._mixtures[0], rows
        else:
            set_of = self._set_of[rows]
            for i in np.unique(set_of).tolist():
                chosen = np.flatnonzero(set_of == i)
                yield rows[chosen], chosen, *self._mixtures[i], self._place[rows[chosen]]


class Spans:
    """All spans of an order, resolved table by table as far as they are looked at.

    Args:
        seed: of the order.
        names: of the sources of the order, sorted.
        starts: where a span may begin, sorted; the first is 0.
        quanta: from each of the starts on. A span continues where they stay the same.
        stop: one past the last position; 2^62 in an endless order.
    """

    def __init__(self, seed: int, names: Sequence[str], starts: I64, quanta: Quanta, stop: int = END) -> None:
        self._seed, self._names, self._starts, self._quanta, self.stop = seed, names, starts, quanta, stop
        self._size = min(_TABLE, max(1, _CELLS // len(names)))
        self._first_span = {0: (0, np.zeros(len(names), np.int64))}  # of each table: its start, and samples before it
        self._tables: dict[int, SpanTable] = {}

    def __iter__(self) -> Iterator[Span]:
        found: Span | None = None
        for table in self.tables():
            for span in map(table.__getitem__, range(len(table))):
                if found is not None and found.start != span.start:
                    yield found
                found = span
        assert found is not None
        yield found

    def tables(self) -> Iterator[SpanTable]:
        """All spans, table by table; one that continues in the next table is in both."""
        return map(self._table, range(-(-len(self._starts) // self._size)))

    def at(self, position: int) -> Span:
        """The span that contains a position, or the last one."""
        table = self.table_at(position)
        return table[table.row_of(position)]

    def table_at(self, position: int) -> SpanTable:
        """The table with that span."""
        return self._table((int(np.searchsorted(self._starts, position, side="right")) - 1) // self._size)

    def of(self, positions: I64) -> Iterator[tuple[SpanTable, Chosen]]:
        """The tables of these positions, one or more, each with its part of them."""
        if len(self._starts) <= self._size:
            return iter([(self._table(0), slice(None))])
        return self._grouped((np.searchsorted(self._starts, positions, side="right") - 1) // self._size)

    def of_numbers(self, source: int, numbers: I64) -> Iterator[tuple[SpanTable, Chosen]]:
        """The tables that have the samples of a source with these numbers, each with its part of them."""
        last = (len(self._starts) - 1) // self._size
        highest = int(numbers.max(initial=0))
        while (known := len(self._first_span)) <= last and self._first_span[known - 1][1][source] <= highest:
            self._table(known - 1)
        begins = np.array([self._first_span[i][1][source] for i in range(known)])
        tables = np.searchsorted(begins, np.maximum(numbers, 0), side="right") - 1
        return self._grouped(np.minimum(tables, last))

    def _grouped(self, table_of: I64) -> Iterator[tuple[SpanTable, Chosen]]:
        distinct = np.unique(table_of).tolist()
        for number in distinct:
            yield self._table(number), np.flatnonzero(table_of == number) if len(distinct) > 1 else slice(None)

    def _table(self, number: int) -> SpanTable:
        for earlier in range(len(self._first_span) - 1, number):
            self._table(earlier)
        return cached(self._tables, number, _TABLES, partial(self._resolve, number))

    def _resolve(self, number: int) -> SpanTable:
        first, last = number * self._size, min((number + 1) * self._size, len(self._starts))
        low, high = max(0, first - 1), min(last + 1, len(self._starts))  # with one more on both sides
        quanta = self._quanta[low:high]
        is_new = np.append((quanta[1:] != quanta[:-1]).any(axis=1), True)  # of each but the first, and after the last
        begun = np.append(0, np.flatnonzero(is_new[first - low : last - low - 1]) + 1)
        start, begin = self._first_span[number]
        starts = np.append(self._starts[first + begun], self.stop if last == high else self._starts[last])
        starts[0] = start
        table = SpanTable(self._seed, self._names, starts, quanta[first - low + begun], begin)
        if last < high:
            following = -1 if is_new[last - low - 1] else -2
            self._first_span[number + 1] = int(starts[following]), table.begin[following].copy()
        return table


def resolved(seed: int, streams: Sequence[SourceStream], segments: Segments, exclusions: Exclusions) -> Spans:
    """The spans of an order. Exclusions are entered in the streams.

    Args:
        seed: of the order.
        streams: one per source, sorted by name.
        segments: at least one.
        exclusions: of sources that there are.

    Raises:
        SamplerError: the order is empty, every sample of a source is excluded, or a source is unknown.
    """
    known = {stream.name: i for i, stream in enumerate(streams)}
    for name in sorted(exclusions.sources()) if len(exclusions) else ():
        if name not in known:
            raise SamplerError(f"exclude: unknown source {name!r}")
    if segments.caps is not None:
        return SpanResolver(seed, streams).resolve(segments, exclusions)
    starts = segments.start[: np.searchsorted(segments.start, END)]  # one that begins with the last position has none
    spans = Spans(seed, list(known), starts, _SegmentQuanta(segments, known))
    for at in exclusions.changes() if len(exclusions) else ():
        numbers = spans.table_at(at).numbers_at(np.array([at]))[0]
        for name in exclusions.changed_at(at):
            streams[known[name]].leave_out(int(numbers[known[name]]), partial(exclusions.left_out, name, at))
    return spans


class _SegmentQuanta:
    """What the weights and temperatures of segments without caps come to.

    Args:
        segments: the segments.
        known: the sources of the order, numbered.
    """

    def __init__(self, segments: Segments, known: Mapping[str, int]) -> None:
        self._segments, self._count = segments, len(known)
        self._columns = np.array([i for i, name in enumerate(segments.names) if name in known], np.int64)
        self._sources = np.array([known[segments.names[i]] for i in self._columns.tolist()], np.int64)

    def __getitem__(self, rows: slice) -> I64:
        weights, temperature = self._segments.weights[rows][:, self._columns], self._segments.temperature[rows]
        weights = np.where(weights > 0, weights, 0.0)
        with np.errstate(over="ignore"):
            total = np.add.accumulate(weights, axis=1)[:, -1]  # one after another, as `shares` adds them
        plain = (temperature == 1) & np.isfinite(total)
        values = np.zeros_like(weights)
        values[plain] = weights[plain] / total[plain, None]
        for row in np.flatnonzero(~plain).tolist():
            drawn = np.flatnonzero(weights[row])
            values[row, drawn] = shares(weights[row, drawn].tolist(), float(temperature[row]))
        quanta = np.zeros((len(weights), self._count), np.int64)
        quanta[:, self._sources] = np.where(weights > 0, np.maximum(1, np.rint(values * _QUANTUM)), 0)
        return quanta


@dataclass(frozen=True)
class _Mixture:
    """What a span without its end is: its start, its sources and their shares, and the samples given before."""

    start: int
    sources: I64
    quanta: I64
    mixture: Interleave
    begin: I64


class SpanResolver:
    """Plays segments with caps and exclusions through in the order of their positions, when an order is built.

    An exclusion acts on the streams from the position at which it was made, and not before: that a source has nothing
    left below its cap must not change what was consumed until then.

    Args:
        seed: of the order.
        streams: one per source, sorted by name. Exclusions are entered in them.
    """

    def __init__(self, seed: int, streams: Sequence[SourceStream]) -> None:
        self._seed, self._streams = seed, streams
        self._id = {stream.name: i for i, stream in enumerate(streams)}
        self._numbers = np.zeros(len(streams), np.int64)
        self._current: _Mixture | None = None  # in force
        self._begun: list[_Mixture] = []

    def resolve(self, segments: Segments, exclusions: Exclusions) -> Spans:
        """The spans from position 0 to the end of the order.

        Raises:
            SamplerError: the order is empty, or every sample of a source is excluded.
        """
        changes = {*segments.start.tolist(), *exclusions.changes()}
        position, segment = 0, segments[0]
        for at in sorted(changes):
            position = self._advance(segment, position, at)
            if position < at:
                break  # every source has reached its cap
            segment = segments.at(at)
            self._exclude(at, exclusions)
        stop = self._advance(segment, position, END)
        if not self._begun:
            raise SamplerError(
                "the order is empty: every source with a weight is capped at 0 samples; raise max_epochs"
            )
        starts = np.array([one.start for one in self._begun], np.int64)
        quanta = np.zeros((len(starts), len(self._streams)), np.int64)
        for row, one in zip(quanta, self._begun, strict=True):
            row[one.sources] = one.quanta
        return Spans(self._seed, list(self._id), starts, quanta, stop)

    def _exclude(self, at: int, exclusions: Exclusions) -> None:
        """Let the exclusions act that are made or withdrawn at this position."""
        for name in exclusions.changed_at(at):
            source = self._id[name]
            self._streams[source].leave_out(int(self._numbers[source]), partial(exclusions.left_out, name, at))

    def _advance(self, segment: Segment, position: int, until: int) -> int:
        """Advance to position `until`, dropping sources that reach their caps.

        Returns:
            `until`, or the position at which the last source reached its cap.
        """
        while position < until:
            current = self._mixture_at(segment, position)
            if current is None:
                return position
            stop = min(until, self._end_of_shares(segment, current))
            assert stop > position, f"the span from {position} would end at {stop}"
            end = current.begin.copy()
            slots = np.array([stop - current.start])
            end[current.sources] += END if stop == END else current.mixture.counts(slots)[0]
            np.minimum(end, END, out=end)
            if not self._begun or self._begun[-1] is not current:
                self._begun.append(current)
            self._numbers, position = end, stop
        return position

    def _mixture_at(self, segment: Segment, position: int) -> _Mixture | None:
        """The mixture in force, or a new one that begins at `position`; None if every source has reached its cap."""
        quanta = self._quanta(segment)
        if not quanta:
            return None
        sources, values = np.array(list(quanta), np.int64), np.array(list(quanta.values()), np.int64)
        current = self._current
        if current is None or not (np.array_equal(values, current.quanta) and np.array_equal(sources, current.sources)):
            names = (self._streams[source].name for source in quanta)
            key = stream_key(self._seed, "interleave", position, *names)
            mixture = Interleave(values[None], np.array([key], np.uint64))
            self._current = _Mixture(position, sources, values, mixture, self._numbers)
        return self._current

    def _quanta(self, segment: Segment) -> dict[int, int]:
        """Share, times 2^44, of each source that has a weight and is below its cap."""
        names = [stream.name for stream in self._streams if segment.weights.get(stream.name, 0) > 0]
        values = shares([segment.weights[name] for name in names], segment.temperature)
        quanta = {}
        for name, share in zip(names, values, strict=True):
            source = self._id[name]
            if self._numbers[source] < self._cap(segment, source):
                quanta[source] = max(1, round(share * _QUANTUM))
        return quanta

    def _cap(self, segment: Segment, source: int) -> int:
        """How many samples the source gives until its cap; END without a cap."""
        stream = self._streams[source]
        key = segment.cap(stream.name, stream.size)
        return END if key is None else min(END, stream.number_before(key))

    def _end_of_shares(self, segment: Segment, current: _Mixture) -> int:
        """The position at which the first source has reached its cap; END if none has one."""
        caps = np.array([self._cap(segment, source) for source in current.sources.tolist()], np.int64)
        capped = np.flatnonzero(caps < END)
        if not capped.size:
            return END
        last = (caps - 1 - current.begin[current.sources])[capped]
        return min(END, current.start + int(current.mixture.find(capped, last.astype(np.uint64)).min()) + 1)

"""Resolves segments, exclusions and epoch caps into spans: ranges of positions with constant shares.

Without caps the spans follow from the segments alone, and are resolved as far as somebody looks, some hundred at a
time: a run that has changed its weights 100,000 times starts as fast as one that never has. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from runner.data.order.exclusions import Exclusions
from runner.data.order.hashing import stream_key
from runner.data.order.interleave import Interleave, counts_of_many
from runner.data.order.segments import Segment, Segments
from runner.data.order.source_stream import SourceStream
from runner.data.order.weights import SamplerError, shares

END = 1 << 62  # all positions and numbers are below this
_QUANTUM = 1 << 44  # shares are rounded to multiples of 2^-44, so that no platform's exp() changes the order

_SEGMENTS = 256  # resolved together
_BLOCKS = 4  # kept as they were resolved

I64 = NDArray[np.int64]
Chosen = I64 | slice


@dataclass(frozen=True)
class Span:
    """Positions [start, stop) with constant shares. Numbers are arrays with one entry per source of the order.

    Attributes:
        start: first position; slot 0 of `mixture`.
        stop: one past the last position; 2^62 in an endless order.
        mixture: how the sources are interleaved.
        sources: ids of the sources of `mixture`, in its order.
        begin: how many samples each source has given before `start`.
        end: the same before `stop`.
        quanta: share of each source of `mixture`, times 2^44.
    """

    start: int
    stop: int
    mixture: Interleave
    sources: I64
    begin: I64
    end: I64
    quanta: tuple[int, ...]

    def numbers_at(self, position: int) -> I64:
        """How many samples each source has given before this position of the span, or before its end."""
        if position >= self.stop:
            return self.end
        numbers = self.begin.copy()
        numbers[self.sources] += self.mixture.counts(position - self.start)
        return numbers

    def many_numbers_at(self, positions: I64) -> I64:
        """The same for each position, int64 of shape (count, sources of the order)."""
        numbers = np.repeat(self.begin[None], len(positions), axis=0)
        numbers[:, self.sources] += self.mixture.many_counts(positions - self.start)
        numbers[positions >= self.stop] = self.end
        return numbers


class Spans(Protocol):
    """All spans of an order.

    Attributes:
        stop: one past the last position; 2^62 in an endless order.
    """

    stop: int

    def __iter__(self) -> Iterator[Span]: ...

    def at(self, position: int) -> Span:
        """The span that contains a position, or the last one."""
        ...

    def of(self, positions: I64) -> Iterator[tuple[Span, Chosen]]:
        """The spans of these positions, one or more, each with its part of them."""
        ...

    def of_numbers(self, source: int, numbers: I64) -> Iterator[tuple[Span, Chosen]]:
        """The spans that have the samples of a source with these numbers, each with its part of them."""
        ...


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
    for name in sorted(exclusions.sources()):
        if name not in known:
            raise SamplerError(f"exclude: unknown source {name!r}")
    if segments.caps is not None:
        return _ListedSpans(SpanResolver(seed, streams).resolve(segments, exclusions))
    spans = _UncappedSpans(seed, [stream.name for stream in streams], segments)
    for at in exclusions.changes():
        numbers = spans.at(at).numbers_at(at)
        for name in exclusions.changed_at(at):
            streams[known[name]].leave_out(int(numbers[known[name]]), partial(exclusions.left_out, name, at))
    return spans


class _ListedSpans:
    def __init__(self, spans: list[Span]) -> None:
        self._spans, self.stop = spans, spans[-1].stop
        self._starts = np.array([span.start for span in spans])

    def __iter__(self) -> Iterator[Span]:
        return iter(self._spans)

    def at(self, position: int) -> Span:
        return self._spans[int(np.searchsorted(self._starts, position, side="right")) - 1]

    def of(self, positions: I64) -> Iterator[tuple[Span, Chosen]]:
        if len(self._spans) == 1:
            yield self._spans[0], slice(None)
        else:
            yield from _grouped(np.searchsorted(self._starts, positions, side="right") - 1, self._spans.__getitem__)

    def of_numbers(self, source: int, numbers: I64) -> Iterator[tuple[Span, Chosen]]:
        begins = np.array([span.begin[source] for span in self._spans])
        yield from _grouped(np.searchsorted(begins, numbers, side="right") - 1, self._spans.__getitem__)


def _grouped(span_of: I64, span: Callable[[int], Span]) -> Iterator[tuple[Span, Chosen]]:
    distinct = np.unique(span_of).tolist()
    for i in distinct:
        yield span(i), slice(None) if len(distinct) == 1 else np.flatnonzero(span_of == i)


@dataclass(frozen=True)
class _Block:
    """The spans that begin in some consecutive segments, or go on in the first of them.

    Attributes:
        start: of each span and of what follows the last, int64 of shape (spans + 1,).
        begin: how many samples each source has given before, int64 of shape (spans + 1, sources).
        quanta: of each span, 0 for sources that it does not have, int64 of shape (spans, sources).
    """

    start: I64
    begin: I64
    quanta: I64


class _UncappedSpans:
    """The spans of segments without caps, resolved block by block as far as they are looked at.

    Args:
        seed: of the order.
        names: of the sources, sorted.
        segments: at least one.
    """

    def __init__(self, seed: int, names: Sequence[str], segments: Segments) -> None:
        self._seed, self._names, self._segments = seed, names, segments
        self._columns = np.array([i for i, name in enumerate(segments.names) if name in names], np.int64)
        self._sources = np.array([names.index(segments.names[i]) for i in self._columns.tolist()], np.int64)
        self._first_span = [(0, np.zeros(len(names), np.int64))]  # of each block: its start, and samples before it
        self._blocks: dict[int, _Block] = {}
        self._spans: dict[int, Span] = {}  # by start
        self.stop = END

    def __iter__(self) -> Iterator[Span]:
        found: Span | None = None
        for number in range(-(-len(self._segments) // _SEGMENTS)):
            block = self._block(number)
            for i in range(len(block.quanta)):
                span = self._span(block, i)
                if found is not None and found.start != span.start:
                    yield found
                found = span
        assert found is not None
        yield found

    def at(self, position: int) -> Span:
        row = int(np.searchsorted(self._segments.start, position, side="right")) - 1
        block = self._block(row // _SEGMENTS)
        return self._span(block, int(np.searchsorted(block.start[:-1], position, side="right")) - 1)

    def of(self, positions: I64) -> Iterator[tuple[Span, Chosen]]:
        if len(self._segments) == 1:
            yield self.at(0), slice(None)
            return
        rows = np.searchsorted(self._segments.start, positions, side="right") - 1
        yield from self._in_blocks(rows // _SEGMENTS, positions, lambda block: block.start)

    def of_numbers(self, source: int, numbers: I64) -> Iterator[tuple[Span, Chosen]]:
        last = (len(self._segments) - 1) // _SEGMENTS
        highest = int(numbers.max(initial=0))
        while len(self._first_span) <= last and self._first_span[-1][1][source] <= highest:
            self._block(len(self._first_span) - 1)
        begins = np.array([begin[source] for _, begin in self._first_span])
        numbers = np.maximum(numbers, 0)
        blocks = np.minimum(np.searchsorted(begins, numbers, side="right") - 1, last)
        yield from self._in_blocks(blocks, numbers, lambda block: block.begin[:, source])

    def _in_blocks(self, blocks: I64, values: I64, column: Callable[[_Block], I64]) -> Iterator[tuple[Span, Chosen]]:
        """The spans of values of a column, from the blocks that have them."""
        distinct = np.unique(blocks).tolist()
        for number in distinct:
            block = self._block(number)
            mine = np.flatnonzero(blocks == number) if len(distinct) > 1 else slice(None)
            span_of = np.searchsorted(column(block)[:-1], values[mine], side="right") - 1
            for span, chosen in _grouped(span_of, partial(self._span, block)):
                yield span, chosen if isinstance(mine, slice) else mine[chosen]

    def _span(self, block: _Block, i: int) -> Span:
        start, stop = int(block.start[i]), int(block.start[i + 1])
        found = self._spans.get(start)
        if found is None or found.stop < stop:  # it may go on in the next block
            sources = np.flatnonzero(block.quanta[i])
            quanta = tuple(block.quanta[i][sources].tolist())
            if found is None:
                names = (self._names[source] for source in sources.tolist())
                mixture = Interleave(quanta, stream_key(self._seed, "interleave", start, *names))
            else:
                mixture = found.mixture
            while len(self._spans) >= _SEGMENTS:
                del self._spans[next(iter(self._spans))]
            found = Span(start, stop, mixture, sources, block.begin[i], block.begin[i + 1], quanta)
            self._spans[start] = found
        return found

    def _block(self, number: int) -> _Block:
        for earlier in range(len(self._first_span) - 1, number):
            self._block(earlier)
        found = self._blocks.get(number)
        if found is None:
            found = self._resolve(number)
            while len(self._blocks) >= _BLOCKS:
                del self._blocks[next(iter(self._blocks))]
            self._blocks[number] = found
        return found

    def _resolve(self, number: int) -> _Block:
        first, last = number * _SEGMENTS, min((number + 1) * _SEGMENTS, len(self._segments))
        quanta = self._quanta(max(0, first - 1), last)  # with that of the segment before
        is_new = np.concatenate([[first == 0], (quanta[1:] != quanta[:-1]).any(axis=1)])
        start, begin = self._first_span[number]
        starts = np.concatenate([self._segments.start[max(0, first - 1) : last], [END]])
        if last < len(self._segments):
            starts[-1] = self._segments.start[last]
        if first and not is_new[1]:  # the span goes on
            is_new[1] = True
            starts[1] = start
        if first:
            quanta, starts, is_new = quanta[1:], starts[1:], is_new[1:]
        kept = np.flatnonzero(is_new)
        quanta, starts = quanta[kept], np.append(starts[kept], starts[-1])
        begins = begin + np.concatenate([[np.zeros_like(begin)], np.cumsum(self._counts(quanta, starts), axis=0)])
        begins = np.where((begins < 0) | (begins > END), END, begins)
        if len(self._first_span) == number + 1 and last < len(self._segments):
            following = self._quanta(last - 1, last + 1)
            goes_on = bool((following[0] == following[1]).all())
            self._first_span.append((int(starts[-2]), begins[-2]) if goes_on else (int(starts[-1]), begins[-1]))
        return _Block(starts, begins, quanta)

    def _counts(self, quanta: I64, starts: I64) -> I64:
        """Samples that each source gives in each span."""
        counts = np.zeros_like(quanta)
        present, set_of = np.unique(quanta > 0, axis=0, return_inverse=True)
        for i, sources in enumerate(present):
            rows, columns = np.flatnonzero(set_of.reshape(-1) == i), np.flatnonzero(sources)
            names = [self._names[source] for source in columns.tolist()]
            keys = [stream_key(self._seed, "interleave", start, *names) for start in starts[rows].tolist()]
            found = counts_of_many(
                quanta[np.ix_(rows, columns)], np.array(keys, np.uint64), starts[rows + 1] - starts[rows]
            )
            counts[np.ix_(rows, columns)] = found
        counts[starts[1:] == END] = np.where(quanta[starts[1:] == END] > 0, END, 0)
        return counts

    def _quanta(self, first: int, last: int) -> I64:
        """Shares, times 2^44, in the segments `first` to `last` - 1, of every source of the order."""
        weights = np.nan_to_num(self._segments.weights[first:last][:, self._columns])
        quanta = np.zeros((last - first, len(self._names)), np.int64)
        with np.errstate(over="ignore"):
            total = np.add.accumulate(weights, axis=1)[:, -1]  # one after another, as `shares` adds them
        plain = (self._segments.temperature[first:last] == 1) & np.isfinite(total)
        values = np.zeros_like(weights)
        values[plain] = weights[plain] / total[plain, None]
        for row in np.flatnonzero(~plain).tolist():
            drawn = np.flatnonzero(weights[row])
            values[row, drawn] = shares(weights[row, drawn].tolist(), float(self._segments.temperature[first + row]))
        quanta[:, self._sources] = np.where(weights > 0, np.maximum(1, np.rint(values * _QUANTUM)), 0)
        return quanta


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
        self._spans: list[Span] = []
        self._current: Span | None = None  # the mixture in force, without its end

    def resolve(self, segments: Segments, exclusions: Exclusions) -> list[Span]:
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
        self._advance(segment, position, END)
        if not self._spans:
            raise SamplerError(
                "the order is empty: every source with a weight is capped at 0 samples; raise max_epochs"
            )
        return self._spans

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
            end[current.sources] += END if stop == END else current.mixture.counts(stop - current.start)
            np.minimum(end, END, out=end)
            if self._spans and self._spans[-1].mixture is current.mixture:
                self._spans.pop()
            self._spans.append(replace(current, stop=stop, end=end))
            self._numbers, position = end, stop
        return position

    def _mixture_at(self, segment: Segment, position: int) -> Span | None:
        """The mixture in force, or a new one that begins at `position`; None if every source has reached its cap."""
        quanta = self._quanta(segment)
        if not quanta:
            return None
        sources, values = np.array(list(quanta), np.int64), tuple(quanta.values())
        current = self._current
        if current is None or values != current.quanta or not np.array_equal(sources, current.sources):
            names = (self._streams[source].name for source in quanta)
            mixture = Interleave(values, stream_key(self._seed, "interleave", position, *names))
            self._current = Span(position, position, mixture, sources, self._numbers, self._numbers, values)
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

    def _end_of_shares(self, segment: Segment, current: Span) -> int:
        """The position at which the first source has reached its cap; END if none has one."""
        caps = np.array([self._cap(segment, source) for source in current.sources.tolist()], np.int64)
        capped = np.flatnonzero(caps < END)
        if not capped.size:
            return END
        last = (caps - 1 - current.begin[current.sources])[capped]
        return min(END, current.start + int(current.mixture.find(capped, last.astype(np.uint64)).min()) + 1)

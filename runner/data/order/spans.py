"""Resolves segments, exclusions and epoch caps into spans: ranges of positions with constant shares.

Does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from runner.data.order.exclusions import Exclusions
from runner.data.order.hashing import stream_key
from runner.data.order.interleave import Interleave
from runner.data.order.segments import Segment, segment_at
from runner.data.order.source_stream import SourceStream
from runner.data.order.weights import SamplerError, shares

END = 1 << 62  # all positions and numbers are below this
_QUANTUM = 1 << 44  # shares are rounded to multiples of 2^-44, so that no platform's exp() changes the order

I64 = NDArray[np.int64]


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


class SpanResolver:
    """Plays segments and exclusions through in the order of their positions, once, when an order is built.

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

    def resolve(self, segments: Sequence[Segment], exclusions: Exclusions) -> list[Span]:
        """The spans from position 0 to the end of the order.

        Raises:
            SamplerError: the order is empty, every sample of a source is excluded, or a source is unknown.
        """
        for name in sorted(exclusions.sources()):
            if name not in self._id:
                raise SamplerError(f"exclude: unknown source {name!r}")
        changes = {segment.start for segment in segments} | set(exclusions.changes())
        position, segment = 0, segments[0]
        for at in sorted(changes):
            position = self._advance(segment, position, at)
            if position < at:
                break  # every source has reached its cap
            segment = segment_at(segments, at)
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

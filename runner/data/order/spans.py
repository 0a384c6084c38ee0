"""Resolves segments, exclusions and epoch caps into spans: ranges of positions with constant shares.

Does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runner.data.order.hashing import stream_key
from runner.data.order.interleave import Interleave
from runner.data.order.segments import Exclusion, Segment
from runner.data.order.source_stream import SourceStream
from runner.data.order.weights import SamplerError, shares

END = 1 << 62  # all positions and keys are below this
_QUANTUM = 1 << 44  # shares are rounded to multiples of 2^-44, so that no platform's exp() changes the order

I64 = NDArray[np.int64]


@dataclass(frozen=True)
class Span:
    """Positions [start, stop) with constant shares. Keys are arrays with one entry per source of the order.

    Attributes:
        start: first position.
        stop: one past the last position; 2^62 in an endless order.
        slot: slot of `start` in `mixture`.
        mixture: how the sources are interleaved. Consecutive spans may share one.
        sources: ids of the sources of `mixture`, in its order.
        base: keys at slot 0 of `mixture`.
        begin: keys at `start`.
        end: keys at `stop`.
        quanta: share of each source of `mixture`, times 2^44.
    """

    start: int
    stop: int
    slot: int
    mixture: Interleave
    sources: I64
    base: I64
    begin: I64
    end: I64
    quanta: tuple[int, ...]


@dataclass(frozen=True)
class _CurrentMixture:
    """The mixture that the resolver is advancing through; `base` has the keys of all sources at its slot 0."""

    mixture: Interleave
    sources: I64
    base: I64
    quanta: tuple[int, ...]

    def keys(self, slot: int) -> I64:
        """Keys of all sources after `slot` slots."""
        keys = self.base.copy()
        if slot < END:
            keys[self.sources] += self.mixture.counts(slot)
        else:
            keys[self.sources] = END
        return keys


class SpanResolver:
    """Plays segments and exclusions through in the order of their positions, once, when an order is built.

    Args:
        seed: of the order.
        streams: one per source, sorted by name. Excluded samples are entered in them.
    """

    def __init__(self, seed: int, streams: Sequence[SourceStream]) -> None:
        self._seed, self._streams = seed, streams
        self._id = {stream.name: i for i, stream in enumerate(streams)}
        self._keys = np.zeros(len(streams), np.int64)
        self._spans: list[Span] = []
        self._current: _CurrentMixture | None = None
        self._slot = 0  # of the current mixture

    def resolve(self, segments: Sequence[Segment], exclusions: Sequence[Exclusion]) -> list[Span]:
        """The spans from position 0 to the end of the order.

        Raises:
            SamplerError: the order is empty, or every sample of a source is excluded.
        """
        events: list[tuple[int, int, int, Segment | Exclusion]] = [
            (segment.start, 0, i, segment) for i, segment in enumerate(segments)
        ]
        events += [(exclusion.at, 1, i, exclusion) for i, exclusion in enumerate(exclusions)]
        events.sort(key=lambda event: event[:3])
        position, segment = 0, segments[0]
        for at, _, _, event in events:
            position = self._advance(segment, position, at)
            if position < at:
                break  # every source has reached its cap
            if isinstance(event, Segment):
                segment = event
                self._enter_segment(segment)
            else:
                self._exclude(segment, event)
        self._advance(segment, position, END)
        if not self._spans:
            raise SamplerError(
                "the order is empty: every source with a weight is capped at 0 samples; raise max_epochs"
            )
        return self._spans

    def _exclude(self, segment: Segment, exclusion: Exclusion) -> None:
        if exclusion.source is None:
            skipped = exclusion.last + 1 - max(exclusion.first, exclusion.at)
            self._advance(segment, exclusion.at, exclusion.at + skipped, consume=False)
        else:
            source = self._id[exclusion.source]
            self._streams[source].exclude(int(self._keys[source]), exclusion.first, exclusion.last)

    def _advance(self, segment: Segment, position: int, until: int, consume: bool = True) -> int:
        """Advance to position `until`, dropping sources that reach their caps.

        Returns:
            `until`, or the position at which the last source reached its cap.
        """
        while position < until:
            current = self._mixture_at(segment, position)
            if current is None:
                return position
            to_cap = self._slots_to_cap(segment, current)
            slots = min(until - position, to_cap)
            endless = position + slots == END
            end = current.keys(END if endless else self._slot + slots)
            if consume:
                self._spans.append(
                    Span(
                        position,
                        position + slots,
                        self._slot,
                        current.mixture,
                        current.sources,
                        current.base,
                        self._keys,
                        end,
                        current.quanta,
                    )
                )
            self._keys = end
            self._slot += slots
            position += slots
            if slots == to_cap:
                self._current = None
        return position

    def _mixture_at(self, segment: Segment, position: int) -> _CurrentMixture | None:
        """The current mixture, or a new one that begins at `position`; None if every source is capped."""
        if self._current is None:
            quanta = self._quanta(segment)
            if not quanta:
                return None
            names = (self._streams[source].name for source in quanta)
            mixture = Interleave(list(quanta.values()), stream_key(self._seed, "interleave", position, *names))
            self._current = _CurrentMixture(
                mixture, np.array(list(quanta), np.int64), self._keys, tuple(quanta.values())
            )
            self._slot = 0
        return self._current

    def _enter_segment(self, segment: Segment) -> None:
        """Begin a new mixture, unless the shares are unchanged."""
        if self._current is not None:
            quanta = self._quanta(segment)
            if list(quanta) != self._current.sources.tolist() or tuple(quanta.values()) != self._current.quanta:
                self._current = None

    def _quanta(self, segment: Segment) -> dict[int, int]:
        """Share, times 2^44, of each source that has a weight and is below its cap."""
        names = [stream.name for stream in self._streams if segment.weights.get(stream.name, 0) > 0]
        values = shares([segment.weights[name] for name in names], segment.temperature)
        quanta = {}
        for name, share in zip(names, values, strict=True):
            source = self._id[name]
            if self._keys[source] < self._cap(segment, source):
                quanta[source] = max(1, round(share * _QUANTUM))
        return quanta

    def _cap(self, segment: Segment, source: int) -> int:
        """The key at which the source is exhausted; END without a cap."""
        stream = self._streams[source]
        epochs = segment.max_epochs.get(stream.name)
        if epochs is None:
            return END
        return stream.keys_before(*divmod(int(epochs * stream.size), stream.size))

    def _slots_to_cap(self, segment: Segment, current: _CurrentMixture) -> int:
        """Slots until the first source reaches its cap; END if none has one."""
        caps = np.array([self._cap(segment, source) for source in current.sources.tolist()], np.int64)
        capped = np.flatnonzero(caps < END)
        if not capped.size:
            return END
        last = (caps - 1 - current.base[current.sources])[capped]
        return int(current.mixture.find(capped, last.astype(np.uint64)).min()) + 1 - self._slot

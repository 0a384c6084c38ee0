"""The elastic order: a pure function position -> (source, key) -> (source, sample), and its inverse.

Terms. *Position*: number of a consumed sample, counted over all ranks from 0. *Slot*: place in the
interleaving of a piece; positions follow slots except where an exclusion jumps. *Key*: how many
samples a source gave before. *Piece*: a run of positions with the same shares; pieces are worked out
from the segments, the exclusions and the caps on epochs.

The order depends on seed, source names and sizes, and the segments and exclusions; not on ranks,
batches, workers, or the order in which the sources are listed. `VERSION` names this very function: a
change to it is a new version, and states of an old version go on under the old one.

No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runner.data.hashing import U64, derive, stream_key
from runner.data.interleave import Interleave
from runner.data.ledger_entries import Exclusion, Segment, check_segment, check_sizes
from runner.data.permutation import Domain, permute
from runner.data.shares import SamplerError, shares
from runner.data.source_stream import SourceStream

VERSION = 1
END = 1 << 62  # positions lie below this
_QUANTUM = 1 << 44  # shares are multiples of 2^-44, so that no platform's exp() changes the order

I64 = NDArray[np.int64]


@dataclass(frozen=True)
class Piece:
    """Positions [start, stop) at constant shares.

    Attributes:
        slot: slot of `start` in `mixture`.
        sources: ids of the sources in `mixture`, in its order.
        base: (sources of the order,) keys at slot 0 of `mixture`; see `begin`.
        begin, end: (sources of the order,) keys at `start` and at `stop`.
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


class ElasticOrder:
    """The order of all samples of a run.

    Args:
        sizes: samples by source name. The order of this mapping gives the dataset indices (the first
            source has indices from 0 on), and nothing else.
        segments: at least one; the first starts at 0.
        exclusions: any number.
        absent: names in `sizes` that are no longer in the dataset (retired sources): they take no
            dataset indices.
        shuffle: False gives each source in its own order, epoch after epoch; the interleaving stays.

    Raises:
        SamplerError: bad sizes, weights, temperatures, caps; see `ledger_entries`.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        seed: int,
        segments: Sequence[Segment],
        exclusions: Sequence[Exclusion] = (),
        absent: Sequence[str] = (),
        shuffle: bool = True,
    ) -> None:
        check_sizes(sizes)
        self.shuffle = shuffle
        self.sizes, self.seed = dict(sizes), seed
        self.segments = tuple(sorted(segments, key=lambda segment: segment.start))
        self.exclusions = tuple(exclusions)
        if not self.segments or self.segments[0].start != 0:
            raise SamplerError("the first segment must start at position 0")
        for segment in self.segments:
            check_segment(segment, sizes)
        self.names = tuple(sorted(sizes))
        self._id = {name: i for i, name in enumerate(self.names)}
        self._offsets = _offsets(self.names, sizes, absent)
        self._n = np.array([sizes[name] for name in self.names], np.int64)
        self._streams = [SourceStream(seed, name, sizes[name], shuffle) for name in self.names]
        self._stream_keys = np.array([stream.stream for stream in self._streams], np.uint64)
        self._a = np.array([stream.domain.a for stream in self._streams], np.uint64)
        self._b = np.array([stream.domain.b for stream in self._streams], np.uint64)
        self._pairs = np.array([stream.pairs for stream in self._streams])
        self._epoch_keys: tuple[int, U64] = (0, derive(self._stream_keys, np.zeros(len(self.names), np.int64)))
        self.pieces = _Resolver(self).pieces()
        self._starts = np.array([piece.start for piece in self.pieces], np.int64)
        self._plain = all(stream.plain for stream in self._streams)

    @property
    def total(self) -> int | None:
        """Positions until every source has reached its cap; None: there is no end."""
        stop = self.pieces[-1].stop
        return None if stop == END else stop

    def share_bound(self, name: str) -> float:
        """Within any piece, |samples of this source - share * slots| stays below this."""
        return max(
            (
                piece.mixture.share_bound(int(np.flatnonzero(piece.sources == self._id[name])[0]))
                for piece in self.pieces
                if self._id[name] in piece.sources
            ),
            default=0.0,
        )

    def keys(self, positions: I64) -> tuple[I64, I64]:
        """Source id (an index into `names`) and key of each position.

        Raises:
            SamplerError: a position outside [0, total).
        """
        positions = np.asarray(positions, np.int64)
        if not positions.size:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        lowest, highest = int(positions.min()), int(positions.max())
        if lowest < 0 or highest >= self.pieces[-1].stop:
            stop = self.pieces[-1].stop
            raise SamplerError(f"positions {lowest} to {highest}: the order has positions 0 to {stop - 1}")
        number = np.searchsorted(self._starts, positions, side="right") - 1 if len(self.pieces) > 1 else None
        if number is None or number.min() == number.max():
            return self._keys_in(self.pieces[0 if number is None else int(number[0])], positions)
        ids, keys = np.empty_like(positions), np.empty_like(positions)
        for i in np.unique(number).tolist():
            chosen = number == i
            ids[chosen], keys[chosen] = self._keys_in(self.pieces[i], positions[chosen])
        return ids, keys

    def locate(self, positions: I64) -> tuple[I64, I64, I64]:
        """Source id, index within the source, and epoch of the source, of each position."""
        ids, keys = self.keys(positions)
        epochs, offsets = self._place(ids, keys)
        return ids, self._permute(ids, epochs, offsets, inverse=False), epochs

    def indices_at(self, positions: I64) -> I64:
        """Dataset index of each position."""
        ids, index, _ = self.locate(positions)
        offsets: I64 = self._offsets[0] if len(self.names) == 1 else self._offsets[ids]
        return index + offsets

    def find(self, ids: I64, index: I64, epochs: I64) -> I64:
        """Position at which each sample is consumed in that epoch of its source; -1: never."""
        offsets = self._permute(ids, epochs, index, inverse=True)
        keys = np.empty_like(offsets)
        for i in np.unique(ids).tolist():
            chosen = ids == i
            keys[chosen] = self._streams[i].key_of(epochs[chosen], offsets[chosen])
        positions = np.full(keys.shape, -1, np.int64)
        for piece in self.pieces:
            here = np.flatnonzero((keys >= piece.begin[ids]) & (keys < piece.end[ids]))
            if here.size:
                member = np.searchsorted(piece.sources, ids[here])
                slots = piece.mixture.find(member, (keys[here] - piece.base[ids[here]]).astype(np.uint64))
                positions[here] = slots.astype(np.int64) - piece.slot + piece.start
        positions[positions >= END] = -1
        return positions

    def keys_at(self, position: int) -> dict[str, int]:
        """Keys of the sources after `position` samples: how far each has come, jumped samples included."""
        piece = self.piece_at(position)
        return dict(zip(self.names, self._keys_after(piece, position).tolist(), strict=True))

    def consumed_at(self, position: int) -> dict[str, int]:
        """Samples that each source gave in the first `position` positions."""
        total = np.zeros(len(self.names), np.int64)
        for piece in self.pieces:
            if piece.start < position:
                total += self._keys_after(piece, min(position, piece.stop)) - piece.begin
        return dict(zip(self.names, total.tolist(), strict=True))

    def shares_at(self, position: int) -> dict[str, float]:
        """Share of each source that is drawn at `position`."""
        piece = self.piece_at(position)
        total = sum(piece.quanta)
        return {self.names[i]: q / total for i, q in zip(piece.sources.tolist(), piece.quanta, strict=True)}

    def epochs_at(self, position: int) -> dict[str, float]:
        """How many epochs of each source lie behind, as a fraction (passed-over samples included)."""
        epochs = {}
        for stream, key in zip(self._streams, self.keys_at(position).values(), strict=True):
            if stream.size == 0:
                epochs[stream.name] = 0.0
                continue
            epoch, offset = stream.place(np.array([key]))
            epochs[stream.name] = int(epoch[0]) + int(offset[0]) / stream.size
        return epochs

    def id_of(self, name: str) -> int:
        """Place of a source in `names`."""
        return self._id[name]

    def stream(self, source: int) -> SourceStream:
        return self._streams[source]

    def sample_keys(self, positions: I64) -> U64:
        """A 64-bit identity (seed, source, key) for the sample at each position."""
        ids, keys = self.keys(positions)
        return derive(self._stream_keys[ids] ^ np.uint64(stream_key(self.seed, "sample")), keys)

    def piece_at(self, position: int) -> Piece:
        """The piece that holds `position`, or the last one."""
        return self.pieces[int(np.searchsorted(self._starts, position, side="right")) - 1]

    def _keys_after(self, piece: Piece, position: int) -> I64:
        if position >= piece.stop:
            return piece.end
        keys = piece.base.copy()
        keys[piece.sources] += piece.mixture.counts(piece.slot + position - piece.start)
        return keys

    def _keys_in(self, piece: Piece, positions: I64) -> tuple[I64, I64]:
        slots = (positions - (piece.start - piece.slot)).view(np.uint64)
        member, numbers = piece.mixture.locate(slots)
        if len(piece.sources) == 1:
            source = int(piece.sources[0])
            return np.full(len(positions), source), numbers.view(np.int64) + piece.base[source]
        ids = member if len(piece.sources) == len(self.names) else piece.sources[member]
        keys = piece.base[ids]
        keys += numbers.view(np.int64)
        return ids, keys

    def _place(self, ids: I64, keys: I64) -> tuple[I64, I64]:
        if self._plain:
            if len(self.names) == 1:
                return np.divmod(keys, self._n[0])
            sizes = self._n[ids]
            if not (keys >= sizes).any():
                return np.zeros_like(keys), keys
            epochs = keys // sizes
            return epochs, keys - epochs * sizes
        epochs, offsets = np.empty_like(keys), np.empty_like(keys)
        for i in np.unique(ids).tolist():
            chosen = ids == i
            epochs[chosen], offsets[chosen] = self._streams[i].place(keys[chosen])
        return epochs, offsets

    def _permute(self, ids: I64, epochs: I64, offsets: I64, inverse: bool) -> I64:
        """Offsets in an epoch to indices of its source, or back."""
        if not ids.size or not self.shuffle:
            return offsets
        epoch = int(epochs[0])
        same = not (epochs != epoch).any()
        if same and (len(self.names) == 1 or not (ids != ids[0]).any()):
            i = int(ids[0])
            domain = Domain(self._n.view(np.uint64)[i], self._a[i], self._b[i])
            return permute(
                offsets.view(np.uint64), domain, self._keys_of(epoch)[i], int(self._pairs[i]), inverse=inverse
            ).view(np.int64)
        keys = self._keys_of(epoch)[ids] if same else derive(self._stream_keys[ids], epochs)
        pairs = self._pairs[ids]
        result = np.empty_like(offsets)
        for number in np.unique(self._pairs).tolist():
            chosen = np.flatnonzero(pairs == number)
            if chosen.size == len(ids):
                return self._permute_many(ids, keys, offsets, number, inverse)
            if chosen.size:
                result[chosen] = self._permute_many(ids[chosen], keys[chosen], offsets[chosen], number, inverse)
        return result

    def _permute_many(self, ids: I64, keys: U64, offsets: I64, pairs: int, inverse: bool) -> I64:
        domain = Domain(self._n.view(np.uint64)[ids], self._a[ids], self._b[ids])
        return permute(offsets.view(np.uint64), domain, keys, pairs, inverse=inverse).view(np.int64)

    def _keys_of(self, epoch: int) -> U64:
        """The key of every source's permutation in this epoch; that of the last one asked for is kept."""
        if self._epoch_keys[0] != epoch:
            self._epoch_keys = (epoch, derive(self._stream_keys, np.full(len(self.names), epoch)))
        return self._epoch_keys[1]


def _offsets(names: Sequence[str], sizes: Mapping[str, int], absent: Sequence[str]) -> I64:
    """Dataset index of sample 0 of each of `names`; far below 0 for those absent from the dataset."""
    offsets, total = dict.fromkeys(absent, -END), 0
    for name, size in sizes.items():
        if name not in offsets:
            offsets[name] = total
            total += size
    return np.array([offsets[name] for name in names], np.int64)


@dataclass(frozen=True)
class _Mix:
    """A mixture that is being drawn from; `base`: keys of all sources at its slot 0."""

    mixture: Interleave
    sources: I64
    base: I64
    quanta: tuple[int, ...]

    def keys(self, slot: int) -> I64:
        """Keys of all sources when it has given `slot` slots."""
        keys = self.base.copy()
        if slot < END:
            keys[self.sources] += self.mixture.counts(slot)
        else:
            keys[self.sources] = END
        return keys


class _Resolver:
    """Works the pieces out of segments, exclusions and caps, once, when an order is made."""

    def __init__(self, order: ElasticOrder) -> None:
        self._order = order
        self._keys = np.zeros(len(order.names), np.int64)
        self._pieces: list[Piece] = []
        self._mix: _Mix | None = None
        self._slot = 0

    def pieces(self) -> list[Piece]:
        order = self._order
        events: list[tuple[int, int, int, Segment | Exclusion]] = [
            (segment.start, 0, i, segment) for i, segment in enumerate(order.segments)
        ]
        events += [(exclusion.at, 1, i, exclusion) for i, exclusion in enumerate(order.exclusions)]
        events.sort(key=lambda event: event[:3])
        position, segment = 0, order.segments[0]
        for at, _, _, event in events:
            position = self._run(segment, position, at)
            if position < at:
                break  # every source has reached its cap
            if isinstance(event, Segment):
                segment = event
                self._begin(segment)
            else:
                self._exclude(segment, event)
        self._run(segment, position, END)
        if not self._pieces:
            raise SamplerError("the order is empty: every source with a weight is at its cap of epochs from the start")
        return self._pieces

    def _exclude(self, segment: Segment, exclusion: Exclusion) -> None:
        if exclusion.source is None:
            jump = exclusion.last + 1 - max(exclusion.first, exclusion.at)
            self._run(segment, exclusion.at, exclusion.at + jump, consume=False)
        else:
            source = self._order.id_of(exclusion.source)
            self._order.stream(source).exclude(int(self._keys[source]), exclusion.first, exclusion.last)

    def _run(self, segment: Segment, position: int, until: int, consume: bool = True) -> int:
        """Go on to position `until`, dropping sources as they reach their caps; where it came to."""
        while position < until:
            mix = self._current(segment, position)
            if mix is None:
                return position
            to_cap = self._slots_to_cap(segment, mix)
            slots = min(until - position, to_cap)
            endless = position + slots == END
            end = mix.keys(END if endless else self._slot + slots)
            if consume:
                stop = position + slots
                self._pieces.append(
                    Piece(position, stop, self._slot, mix.mixture, mix.sources, mix.base, self._keys, end, mix.quanta)
                )
            self._keys = end
            self._slot += slots
            position += slots
            if slots == to_cap:
                self._mix = None
        return position

    def _current(self, segment: Segment, position: int) -> _Mix | None:
        """The mixture of the sources that are drawn now; None when there is none left."""
        if self._mix is None:
            quanta = self._quanta(segment)
            if not quanta:
                return None
            names = (self._order.names[source] for source in quanta)
            key = stream_key(self._order.seed, "interleave", position, *names)
            mixture = Interleave(list(quanta.values()), key)
            self._mix = _Mix(mixture, np.array(list(quanta), np.int64), self._keys, tuple(quanta.values()))
            self._slot = 0
        return self._mix

    def _begin(self, segment: Segment) -> None:
        """Begin a new interleaving, unless the shares go on unchanged."""
        if self._mix is not None:
            quanta = self._quanta(segment)
            if list(quanta) != self._mix.sources.tolist() or tuple(quanta.values()) != self._mix.quanta:
                self._mix = None

    def _quanta(self, segment: Segment) -> dict[int, int]:
        """Share, times 2^44, of each source that has a weight and is below its cap."""
        names = [name for name in self._order.names if segment.weights.get(name, 0) > 0]
        values = shares([segment.weights[name] for name in names], segment.temperature)
        quanta = {}
        for name, share in zip(names, values, strict=True):
            source = self._order.id_of(name)
            if self._keys[source] < self._cap(segment, source):
                quanta[source] = max(1, round(share * _QUANTUM))
        return quanta

    def _cap(self, segment: Segment, source: int) -> int:
        """The key at which the source has given the epochs that it may."""
        epochs = segment.max_epochs.get(self._order.names[source])
        if epochs is None:
            return END
        stream = self._order.stream(source)
        return stream.keys_before(*divmod(int(epochs * stream.size), stream.size))

    def _slots_to_cap(self, segment: Segment, mix: _Mix) -> int:
        """Slots until the first source reaches its cap (END: never)."""
        caps = np.array([self._cap(segment, source) for source in mix.sources.tolist()], np.int64)
        capped = np.flatnonzero(caps < END)
        if not capped.size:
            return END
        last = (caps - 1 - mix.base[mix.sources])[capped]
        return int(mix.mixture.find(capped, last.astype(np.uint64)).min()) + 1 - self._slot

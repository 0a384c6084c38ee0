"""Compute the elastic order, a pure function position -> (source, number, key) -> (source, sample), and its inverse.

A *position* is the global index of a consumed sample, counted over all ranks from 0. The *number* of a sample is how
many samples of its source were consumed before it. Its *key* is its index in the endless stream of the source. Number
and key are equal unless samples are excluded. A *span* is a range of positions with constant shares, computed from
segments, exclusions and epoch caps. See docs/data-order.md.

The order depends on the seed, source names and sizes, segments and exclusions. It does not depend on ranks, batches,
workers, or the order in which the sources are listed. `VERSION` identifies this function. Any change to the function
requires a new version, and states saved under an old version continue under the old version.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from exactdata.order.arrays import I64, U64
from exactdata.order.exclusions import Exclusions
from exactdata.order.hashing import derive, stream_key
from exactdata.order.permutation import Domain, permute
from exactdata.order.segments import Segment, check_sources
from exactdata.order.source_stream import SourceStream
from exactdata.order.spans import END, resolved
from exactdata.order.weights import SamplerError

VERSION = 1


_LAST_EXCLUDED = 1 << 61  # excluded keys are below this, so that later keys stay far from overflow


class ElasticSequence:
    """The order of all samples of a run. Memory and start-up cost do not depend on the number of samples.

    Arrays of positions, ids, numbers, indices and epochs are int64 of shape (count,).

    Args:
        sizes: number of samples by source name, as `check_sizes` returns them. The order of the mapping determines only
            the dataset indices (the indices of the first source start at 0).
        seed: seed of the permutations and the interleaving.
        segments: at least one segment, sorted by start. The first must start at 0.
        exclusions: samples to exclude.
        absent: names in `sizes` of sources that were removed during the run. They have no dataset indices.
        shuffle: if False, yield each source in its stored order, epoch after epoch. Sources are interleaved as before.

    Attributes:
        names: source names, sorted. A source id is an index into this list.
        spans: the `Spans`, i.e. the ranges of positions with constant shares.

    Raises:
        SamplerError: a segment has an unknown source, or the order has no samples.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        seed: int,
        segments: Sequence[Segment],
        exclusions: Exclusions = (),
        absent: Sequence[str] = (),
        shuffle: bool = True,
    ) -> None:
        self.shuffle = shuffle
        self.sizes, self.seed = dict(sizes), seed
        self.segments, self.exclusions = tuple(segments), exclusions
        if not self.segments or self.segments[0].start != 0:
            raise SamplerError("the first segment must start at position 0")
        check_sources(self.segments, sizes)
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
        self.spans = resolved(seed, self._streams, self.segments, self.exclusions)
        self._has_exclusions = any(stream.has_exclusions for stream in self._streams)

    @property
    def total(self) -> int | None:
        """Return the number of positions until every source has reached its cap, or None if the order is endless."""
        return None if self.spans.stop == END else self.spans.stop

    def share_bound(self, name: str) -> float:
        """Return an upper bound on |samples of this source - share * slots| within any span."""
        return self.spans.share_bound(self._id[name])

    def numbers(self, positions: I64) -> tuple[I64, I64]:
        """Return the source id at each position, and the number of earlier samples of that source.

        Raises:
            SamplerError: a position is outside [0, total).
        """
        positions = np.asarray(positions, np.int64)
        if not positions.size:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        lowest, highest = int(positions.min()), int(positions.max())
        if lowest < 0 or highest >= self.spans.stop:
            raise SamplerError(f"positions {lowest} to {highest}: the order has positions 0 to {self.spans.stop - 1}")
        return self.spans.numbers(positions)

    def locate(self, positions: I64) -> tuple[I64, I64, I64]:
        """Return the source id, the index within the source, and the epoch of the source at each position."""
        ids, numbers = self.numbers(positions)
        epochs, offsets = self._epochs_and_offsets(ids, numbers)
        return ids, self._permute(ids, epochs, offsets, inverse=False), epochs

    def indices_at(self, positions: I64) -> I64:
        """Return the dataset index of each position."""
        ids, index, _ = self.locate(positions)
        offsets: I64 = self._offsets[0] if len(self.names) == 1 else self._offsets[ids]
        return index + offsets

    def find(self, ids: I64, index: I64, epochs: I64) -> I64:
        """Return the position at which each sample is consumed in that epoch of its source, or -1 if it never is."""
        offsets = self._permute(ids, epochs, index, inverse=True)
        positions = np.empty_like(offsets)
        for source in np.unique(ids).tolist():
            mine = ids == source
            numbers = self._streams[source].numbers_of(epochs[mine], offsets[mine])
            positions[mine] = self.spans.find(source, numbers)
        return positions

    def numbers_at(self, position: int) -> I64:
        """Return the number of samples consumed from each source (by id) in the first `position` positions."""
        found: I64 = self.spans.numbers_at(np.array([position]))[0]
        return found

    def consumed_at(self, position: int) -> dict[str, int]:
        """Return the number of samples consumed from each source (by name) in the first `position` positions."""
        return dict(zip(self.names, self.numbers_at(position).tolist(), strict=True))

    def key_ranges(self, first: I64, last: I64) -> list[dict[str, tuple[int, int]]]:
        """Return the keys at each range of positions, `first` to `last`, both included.

        Returns:
            For each range, a dict from the names of the sources in it to the first key and one past the last key.

        Raises:
            SamplerError: the positions are too large.
        """
        if last.max() >= _LAST_EXCLUDED:
            too_large = int(np.argmax(last >= _LAST_EXCLUDED))
            raise SamplerError(
                f"positions {first[too_large]} to {last[too_large]}: positions to exclude must be below 2^61"
            )
        begin, end = self.spans.numbers_at(first), self.spans.numbers_at(last + 1)
        found: list[dict[str, tuple[int, int]]] = [{} for _ in range(len(first))]
        for i in np.flatnonzero((begin < end).any(axis=0)).tolist():
            stream, ranges = self._streams[i], np.flatnonzero(begin[:, i] < end[:, i])
            keys = zip(stream.keys_of(begin[ranges, i]).tolist(), stream.end_keys(end[ranges, i]).tolist(), strict=True)
            for number, bounds in zip(ranges.tolist(), keys, strict=True):
                found[number][stream.name] = bounds
        return found

    def shares_at(self, position: int) -> dict[str, float]:
        """Return the share of each source that applies at `position`."""
        quanta = self.spans.quanta_at(position)
        total = sum(quanta)
        return {name: share / total for name, share in zip(self.names, quanta, strict=True) if share}

    def epochs_at(self, position: int) -> dict[str, float]:
        """Return the epochs of each source completed by `position`, as a fraction that includes excluded samples."""
        numbers = self.numbers_at(position).tolist()
        return {stream.name: stream.progress(number) for stream, number in zip(self._streams, numbers, strict=True)}

    def id_of(self, name: str) -> int:
        """Return the id of a source: its index in `names`."""
        return self._id[name]

    def sample_keys(self, positions: I64) -> U64:
        """Return a 64-bit hash of (seed, source, key) for the sample at each position."""
        ids, numbers = self.numbers(positions)
        if self._has_exclusions:
            epochs, offsets = self._epochs_and_offsets(ids, numbers)
            numbers = epochs * self._n[ids] + offsets
        return derive(self._stream_keys[ids] ^ np.uint64(stream_key(self.seed, "sample")), numbers)

    def _epochs_and_offsets(self, ids: I64, numbers: I64) -> tuple[I64, I64]:
        if not self._has_exclusions:
            if len(self.names) == 1:
                return np.divmod(numbers, self._n[0])
            sizes = self._n[ids]
            if not (numbers >= sizes).any():
                return np.zeros_like(numbers), numbers
            epochs = numbers // sizes
            return epochs, numbers - epochs * sizes
        epochs, offsets = np.empty_like(numbers), np.empty_like(numbers)
        for i in np.unique(ids).tolist():
            chosen = ids == i
            epochs[chosen], offsets[chosen] = self._streams[i].epochs_and_offsets(numbers[chosen])
        return epochs, offsets

    def _permute(self, ids: I64, epochs: I64, offsets: I64, inverse: bool) -> I64:
        """Map offsets within an epoch to indices within the source, or back (`inverse`)."""
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
        """Return the permutation keys of all sources for this epoch. The latest epoch is cached."""
        latest = self._epoch_keys
        if latest[0] != epoch:
            latest = self._epoch_keys = (epoch, derive(self._stream_keys, np.full(len(self.names), epoch)))
        return latest[1]


def _offsets(names: Sequence[str], sizes: Mapping[str, int], absent: Sequence[str]) -> I64:
    """Return the dataset index of each source's sample 0, far below 0 for sources without a dataset."""
    offsets, total = dict.fromkeys(absent, -END), 0
    for name, size in sizes.items():
        if name not in offsets:
            offsets[name] = total
            total += size
    return np.array([offsets[name] for name in names], np.int64)

"""The endless stream of one source: its epochs one after another, each in a random order of its own.

The *key* of a sample is how many samples the source gave before it. Without exclusions, key k is offset k % n of epoch
k // n, and the permutation of that epoch maps the offset to a sample. Excluded samples are skipped; the others keep
their order.

Does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runner.data.order.hashing import derive, stream_key
from runner.data.order.permutation import Domain, grid, permute, round_pairs
from runner.data.order.weights import SamplerError

I64 = NDArray[np.int64]


@dataclass(frozen=True)
class _KeyRange:
    """Keys from `key` on, up to the next range: `excluded` samples (sorted) are left out.

    Key `key` is at `offset` of `epoch`.
    """

    key: int
    epoch: int
    offset: int
    excluded: I64


class SourceStream:
    """Maps the keys of one source to (epoch, offset in the permutation of that epoch), and back.

    Args:
        seed: of the order; with the name it determines the permutations.
        name: of the source.
        size: number of samples of the source.
        shuffle: False keeps the source's own order in every epoch.
    """

    def __init__(self, seed: int, name: str, size: int, shuffle: bool = True) -> None:
        self.name, self.size, self._shuffle = name, size, shuffle
        self.stream = stream_key(seed, "source", name)
        a, b = grid(max(1, size))
        self.domain = Domain(np.uint64(max(1, size)), np.uint64(a), np.uint64(b))
        self.pairs = round_pairs(b)
        self._ranges = [_KeyRange(0, 0, 0, np.zeros(0, np.int64))]

    @property
    def has_exclusions(self) -> bool:
        """False: key = epoch * size + offset."""
        return len(self._ranges) > 1

    @property
    def signature(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """What is excluded from which key on; equal for streams that give the same samples."""
        return tuple((one.key, tuple(one.excluded.tolist())) for one in self._ranges[1:])

    def exclude(self, key: int, first: int, last: int) -> None:
        """From `key` on, leave out the samples `first` to `last`, inclusive.

        Raises:
            SamplerError: no sample would be left.
        """
        epoch, offset = self.epochs_and_offsets(np.array([key]))
        excluded = np.union1d(self._ranges[-1].excluded, np.arange(first, last + 1, dtype=np.int64))
        if len(excluded) >= self.size:
            raise SamplerError(
                f"all {self.size} samples of source {self.name!r} would be excluded: set its weight to 0 instead"
            )
        self._ranges.append(_KeyRange(key, int(epoch[0]), int(offset[0]), excluded))

    def epochs_and_offsets(self, keys: I64) -> tuple[I64, I64]:
        """Epoch and offset of each key, both of the shape of `keys`, (count,)."""
        if not self.has_exclusions:
            return np.divmod(keys, np.int64(self.size))
        epochs, offsets = np.empty_like(keys), np.empty_like(keys)
        range_of = np.searchsorted([one.key for one in self._ranges], keys, side="right") - 1
        for number in np.unique(range_of).tolist():
            chosen = range_of == number
            epochs[chosen], offsets[chosen] = self._epochs_and_offsets_in(self._ranges[number], keys[chosen])
        return epochs, offsets

    def keys_of(self, epochs: I64, offsets: I64) -> I64:
        """The key at each (epoch, offset), shape (count,); -1 for an excluded sample."""
        if not self.has_exclusions:
            return epochs * self.size + offsets
        keys = np.empty_like(epochs)
        starts = [one.epoch * self.size + one.offset for one in self._ranges]
        range_of = np.searchsorted(starts, epochs * self.size + offsets, side="right") - 1
        for number in np.unique(range_of).tolist():
            chosen = range_of == number
            before, is_excluded = self._keys_before_in(self._ranges[number], epochs[chosen], offsets[chosen])
            keys[chosen] = np.where(is_excluded, np.int64(-1), before)
        return keys

    def keys_before(self, epoch: int, offset: int) -> int:
        """How many keys come before this epoch and offset under the latest exclusions."""
        latest = self._ranges[-1]
        if (epoch, offset) <= (latest.epoch, latest.offset):
            return latest.key
        before, _ = self._keys_before_in(latest, np.array([epoch]), np.array([offset]))
        return int(before[0])

    def _keys_before_in(self, key_range: _KeyRange, epochs: I64, offsets: I64) -> tuple[I64, NDArray[np.bool_]]:
        """Number of keys before each (epoch, offset) of a range, and whether the sample there is excluded."""
        keys, is_excluded = np.empty_like(offsets), np.zeros(len(offsets), bool)
        first = epochs == key_range.epoch
        gaps = self._excluded_in_first_epoch(key_range)
        keys[first] = key_range.key + offsets[first] - key_range.offset - np.searchsorted(gaps, offsets[first])
        is_excluded[first] = np.isin(offsets[first], gaps)
        later = ~first
        if later.any():
            rows, row_of = self._excluded_offsets(key_range, epochs[later])
            count = rows.shape[1]
            flat = (rows + np.arange(len(rows))[:, None] * self.size).reshape(-1)
            at = offsets[later] + row_of * self.size
            skipped = np.searchsorted(flat, at) - row_of * count
            whole_epochs = (epochs[later] - key_range.epoch - 1) * (self.size - count)
            before = key_range.key + self._kept_in_first_epoch(key_range) + whole_epochs
            keys[later] = before + offsets[later] - skipped
            is_excluded[later] = np.isin(at, flat)
        return keys, is_excluded

    def _kept_in_first_epoch(self, key_range: _KeyRange) -> int:
        return self.size - key_range.offset - len(self._excluded_in_first_epoch(key_range))

    def _excluded_in_first_epoch(self, key_range: _KeyRange) -> I64:
        """Sorted excluded offsets in the epoch in which the range begins, from its beginning on."""
        offsets = self._excluded_offsets(key_range, np.array([key_range.epoch]))[0][0]
        from_start: I64 = offsets[offsets >= key_range.offset]
        return from_start

    def _excluded_offsets(self, key_range: _KeyRange, epochs: I64) -> tuple[I64, I64]:
        """Sorted offsets of the excluded samples, one row per distinct epoch, and the row of each of `epochs`."""
        distinct, row_of = np.unique(epochs, return_inverse=True)
        count = len(key_range.excluded)
        keys = np.repeat(derive(self.stream, distinct), count)
        samples = np.tile(key_range.excluded.astype(np.uint64), len(distinct))
        if self._shuffle:
            samples = permute(samples, self.domain, keys, self.pairs, inverse=True)
        offsets = samples.astype(np.int64)
        return np.sort(offsets.reshape(len(distinct), count), axis=1), row_of.astype(np.int64)

    def _epochs_and_offsets_in(self, key_range: _KeyRange, keys: I64) -> tuple[I64, I64]:
        number = keys - key_range.key
        in_first = self._kept_in_first_epoch(key_range)
        epochs, offsets = np.empty_like(keys), np.empty_like(keys)
        first = number < in_first
        epochs[first] = key_range.epoch
        gaps = self._excluded_in_first_epoch(key_range) - key_range.offset
        offsets[first] = key_range.offset + _nth_kept(gaps, number[first])
        later = ~first
        if later.any():
            whole, nth = np.divmod(number[later] - in_first, np.int64(self.size - len(key_range.excluded)))
            epochs[later] = key_range.epoch + 1 + whole
            rows, row_of = self._excluded_offsets(key_range, epochs[later])
            count = rows.shape[1]
            base = np.arange(len(rows))[:, None] * (self.size + 1)
            flat = (rows - np.arange(count) + base).reshape(-1)
            skipped = np.searchsorted(flat, nth + row_of * (self.size + 1), side="right") - row_of * count
            offsets[later] = nth + skipped
        return epochs, offsets


def _nth_kept(excluded: I64, number: I64) -> I64:
    """The `number`-th non-negative integer, from 0, that is not in the sorted array `excluded`."""
    skipped: I64 = np.searchsorted(excluded - np.arange(len(excluded)), number, side="right")
    return number + skipped

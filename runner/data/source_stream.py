"""The endless stream of one source: its epochs one after another, each in its own random order.

The *key* of a sample is how many samples the source gave before it. Without exclusions key k is the
sample at offset k % n of epoch k // n, and the permutation of that epoch says which sample that is.
Excluded samples are passed over: the rest keep their order.

No torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runner.data.hashing import derive, stream_key
from runner.data.permutation import Domain, grid, permute, round_pairs
from runner.data.shares import SamplerError

I64 = NDArray[np.int64]


@dataclass(frozen=True)
class _Era:
    """From key `key` on, which is at `offset` of `epoch`, the samples `excluded` (sorted) are left out."""

    key: int
    epoch: int
    offset: int
    excluded: I64


class SourceStream:
    """Keys of one source, as (epoch, offset in the permutation of that epoch).

    Args:
        seed, name: choose the permutations.
        size: samples of the source.
        shuffle: False: every epoch is in the source's own order.
    """

    def __init__(self, seed: int, name: str, size: int, shuffle: bool = True) -> None:
        self.name, self.size, self._shuffle = name, size, shuffle
        self.stream = stream_key(seed, "source", name)
        a, b = grid(max(1, size))
        self.domain = Domain(np.uint64(max(1, size)), np.uint64(a), np.uint64(b))
        self.pairs = round_pairs(b)
        self._eras = [_Era(0, 0, 0, np.zeros(0, np.int64))]

    @property
    def plain(self) -> bool:
        """Nothing was ever excluded: key = epoch * size + offset."""
        return len(self._eras) == 1

    @property
    def signature(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """What was excluded from which key on; equal for streams that give the same samples."""
        return tuple((era.key, tuple(era.excluded.tolist())) for era in self._eras[1:])

    def exclude(self, key: int, first: int, last: int) -> None:
        """From `key` on, leave out the samples `first` to `last` (both included).

        Raises:
            SamplerError: no sample would be left.
        """
        keys = np.array([key])
        epoch, offset = self.place(keys)
        before = self._eras[-1].excluded
        excluded = np.union1d(before, np.arange(first, last + 1, dtype=np.int64))
        if len(excluded) >= self.size:
            raise SamplerError(
                f"all {self.size} samples of source {self.name!r} would be excluded: set its weight to 0 instead"
            )
        self._eras.append(_Era(key, int(epoch[0]), int(offset[0]), excluded))

    def place(self, keys: I64) -> tuple[I64, I64]:
        """Epoch and offset of each key."""
        if self.plain:
            return np.divmod(keys, np.int64(self.size))
        epochs, offsets = np.empty_like(keys), np.empty_like(keys)
        era_of = np.searchsorted([era.key for era in self._eras], keys, side="right") - 1
        for number in np.unique(era_of).tolist():
            chosen = era_of == number
            epochs[chosen], offsets[chosen] = self._place_in(self._eras[number], keys[chosen])
        return epochs, offsets

    def key_of(self, epochs: I64, offsets: I64) -> I64:
        """The key at each (epoch, offset); -1 where that sample is left out."""
        if self.plain:
            return epochs * self.size + offsets
        keys = np.empty_like(epochs)
        starts = [era.epoch * self.size + era.offset for era in self._eras]
        era_of = np.searchsorted(starts, epochs * self.size + offsets, side="right") - 1
        for number in np.unique(era_of).tolist():
            chosen = era_of == number
            keys[chosen] = self._key_in(self._eras[number], epochs[chosen], offsets[chosen])
        return keys

    def keys_before(self, epoch: int, offset: int) -> int:
        """How many keys come before this place under the newest exclusions."""
        era = self._eras[-1]
        if (epoch, offset) <= (era.epoch, era.offset):
            return era.key
        kept, _ = self._kept_before(era, np.array([epoch]), np.array([offset]))
        return int(kept[0])

    def _key_in(self, era: _Era, epochs: I64, offsets: I64) -> I64:
        keys, gone = self._kept_before(era, epochs, offsets)
        return np.where(gone, np.int64(-1), keys)

    def _kept_before(self, era: _Era, epochs: I64, offsets: I64) -> tuple[I64, NDArray[np.bool_]]:
        """Keys before each place, which lies in the era; and whether the place itself is left out."""
        keys, gone = np.empty_like(offsets), np.zeros(len(offsets), bool)
        first = epochs == era.epoch
        absent = self._gone_in_first(era)
        keys[first] = era.key + offsets[first] - era.offset - np.searchsorted(absent, offsets[first])
        gone[first] = np.isin(offsets[first], absent)
        later = ~first
        if later.any():
            rows, row_of = self._gone(era, epochs[later])
            count = rows.shape[1]
            flat = (rows + np.arange(len(rows))[:, None] * self.size).reshape(-1)
            at = offsets[later] + row_of * self.size
            passed = np.searchsorted(flat, at) - row_of * count
            before = era.key + self._rest_of_first(era) + (epochs[later] - era.epoch - 1) * (self.size - count)
            keys[later] = before + offsets[later] - passed
            gone[later] = np.isin(at, flat)
        return keys, gone

    def _rest_of_first(self, era: _Era) -> int:
        return self.size - era.offset - len(self._gone_in_first(era))

    def _gone_in_first(self, era: _Era) -> I64:
        """Sorted offsets that the era leaves out of the epoch it begins in."""
        offsets = self._gone(era, np.array([era.epoch]))[0][0]
        left_out: I64 = offsets[offsets >= era.offset]
        return left_out

    def _gone(self, era: _Era, epochs: I64) -> tuple[I64, I64]:
        """Sorted offsets of what the era leaves out, one row per distinct epoch; the row of each epoch."""
        distinct, row_of = np.unique(epochs, return_inverse=True)
        count = len(era.excluded)
        keys = np.repeat(derive(self.stream, distinct), count)
        samples = np.tile(era.excluded.astype(np.uint64), len(distinct))
        if self._shuffle:
            samples = permute(samples, self.domain, keys, self.pairs, inverse=True)
        offsets = samples.astype(np.int64)
        return np.sort(offsets.reshape(len(distinct), count), axis=1), row_of.astype(np.int64)

    def _place_in(self, era: _Era, keys: I64) -> tuple[I64, I64]:
        number = keys - era.key
        rest = self._rest_of_first(era)
        epochs, offsets = np.empty_like(keys), np.empty_like(keys)
        first = number < rest
        epochs[first] = era.epoch
        offsets[first] = era.offset + _nth_kept(self._gone_in_first(era) - era.offset, number[first])
        later = ~first
        if later.any():
            whole, place = np.divmod(number[later] - rest, np.int64(self.size - len(era.excluded)))
            epochs[later] = era.epoch + 1 + whole
            rows, row_of = self._gone(era, epochs[later])
            count = rows.shape[1]
            base = np.arange(len(rows))[:, None] * (self.size + 1)
            flat = (rows - np.arange(count) + base).reshape(-1)
            passed = np.searchsorted(flat, place + row_of * (self.size + 1), side="right") - row_of * count
            offsets[later] = place + passed
        return epochs, offsets


def _nth_kept(gone: I64, number: I64) -> I64:
    """The number-th of the integers from 0 that are not in the sorted array `gone`."""
    passed: I64 = np.searchsorted(gone - np.arange(len(gone)), number, side="right")
    return number + passed

"""The endless stream of one source: its epochs one after another, each in a random order of its own.

The *key* of a sample is its place in the stream: key k is offset k % n of epoch k // n, and the permutation of that
epoch maps the offset to a sample. The *number* of a sample is how many samples the source has given before it. Without
exclusions they are equal; excluded keys are skipped, and the others keep their order.

Does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runner.data.order.hashing import derive, stream_key
from runner.data.order.permutation import MAX_SIZE, Domain, grid, permute, round_pairs
from runner.data.order.weights import SamplerError

I64 = NDArray[np.int64]

_NONE = np.zeros(0, np.int64)


@dataclass(frozen=True)
class _Gaps:
    """Sorted disjoint ranges [start, start + length) of the non-negative integers, which are left out."""

    starts: I64
    lengths: I64
    kept: I64 = field(init=False)  # integers that are not left out, before each range
    skipped: I64 = field(init=False)  # lengths of all ranges before each range, and of all

    def __post_init__(self) -> None:
        skipped = np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)
        object.__setattr__(self, "skipped", skipped)
        object.__setattr__(self, "kept", self.starts - skipped[:-1])

    def nth(self, numbers: I64) -> I64:
        """The `number`-th integer, from 0, that is not left out."""
        result: I64 = numbers + self.skipped[np.searchsorted(self.kept, numbers, side="right")]
        return result

    def before(self, values: I64) -> tuple[I64, NDArray[np.bool_]]:
        """How many integers before each value are not left out, and whether the value itself is left out."""
        if not len(self.starts):
            return values, np.zeros(len(values), bool)
        gap = np.searchsorted(self.starts, values, side="right") - 1
        reached = np.maximum(gap, 0)
        inside = np.minimum(values - self.starts[reached], self.lengths[reached])
        counts = np.where(gap < 0, values, values - self.skipped[reached] - inside)
        return counts, (gap >= 0) & (values - self.starts[reached] < self.lengths[reached])


@dataclass(frozen=True)
class _Era:
    """From the sample `number` on, until the next era, the same exclusions are in force.

    Attributes:
        number: of the first sample.
        epoch: with `offset`, the first key.
        offset: of the first key.
        excluded: samples that are left out, sorted.
        in_first: their offsets in the first epoch, from the first key on, sorted.
        key_ranges: keys [first, stop) that are left out, sorted and disjoint.
        gaps: the same, counted from the first key of the era among those whose samples are not excluded.
    """

    number: int
    epoch: int
    offset: int
    excluded: I64 = field(default_factory=lambda: _NONE)
    in_first: I64 = field(default_factory=lambda: _NONE)
    key_ranges: tuple[tuple[int, int], ...] = ()
    gaps: _Gaps = field(default_factory=lambda: _Gaps(_NONE, _NONE))


class SourceStream:
    """Maps the numbers of one source's samples to (epoch, offset in the permutation of that epoch), and back.

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
        self._eras = [_Era(0, 0, 0)]

    @property
    def has_exclusions(self) -> bool:
        """False: numbers and keys are equal."""
        return len(self._eras) > 1 or bool(len(self._eras[0].excluded) or self._eras[0].key_ranges)

    def leave_out(self, number: int, samples: I64, key_ranges: Iterable[tuple[int, int]]) -> None:
        """From the sample `number` on, leave out exactly these; what was left out so far returns.

        Args:
            number: samples that the source has given.
            samples: indices within the source, sorted.
            key_ranges: ranges [first, stop) of keys; what of them comes before the sample `number` has no effect.

        Raises:
            SamplerError: no sample would be left, or the keys reach beyond 2^62.
        """
        begin = self.end_key(number)
        epoch, offset = divmod(begin, self.size)
        if self._eras[-1].number == number:
            self._eras.pop()
        if len(samples) and len(samples) >= self.size:
            raise SamplerError(
                f"all {self.size} samples of source {self.name!r} would be excluded: set its weight to 0 instead"
            )
        ranges = _merged(key_ranges, begin)
        if ranges and ranges[-1][1] > MAX_SIZE:
            raise SamplerError(
                f"the excluded positions reach beyond sample 2^62 of source {self.name!r}: exclude fewer positions"
            )
        offsets = self._excluded_offsets(samples, np.array([epoch]))[0][0]
        era = _Era(number, epoch, offset, samples, offsets[offsets >= offset])
        bounds = np.array(ranges, np.int64).reshape(-1)
        ordinals = self._ordinals(era, bounds // max(1, self.size), bounds % max(1, self.size))[0].reshape(-1, 2)
        gaps = _Gaps(ordinals[:, 0], ordinals[:, 1] - ordinals[:, 0])
        self._eras.append(replace(era, key_ranges=tuple(ranges), gaps=gaps))

    def end_key(self, number: int) -> int:
        """One past the key of the last of the first `number` samples."""
        last = self._eras[-1]
        if number == last.number:
            return last.epoch * self.size + last.offset
        return self.key_of(number - 1) + 1

    def key_of(self, number: int) -> int:
        """The key of a sample."""
        epochs, offsets = self.epochs_and_offsets(np.array([number]))
        return int(epochs[0]) * self.size + int(offsets[0])

    def progress(self, number: int) -> float:
        """Epochs completed by the first `number` samples, as a fraction; excluded samples before them count."""
        if not number:
            return 0.0
        epoch, offset = divmod(self.end_key(number), self.size)
        if offset and self.key_of(number) // self.size > epoch:
            return float(epoch + 1)  # all that is left of the epoch is excluded
        return epoch + offset / self.size

    def epochs_and_offsets(self, numbers: I64) -> tuple[I64, I64]:
        """Epoch and offset of each sample, both of the shape of `numbers`, (count,)."""
        if not self.has_exclusions:
            return np.divmod(numbers, np.int64(self.size))
        epochs, offsets = np.empty_like(numbers), np.empty_like(numbers)
        era_of = np.searchsorted([era.number for era in self._eras], numbers, side="right") - 1
        for i in np.unique(era_of).tolist():
            chosen, era = era_of == i, self._eras[i]
            epochs[chosen], offsets[chosen] = self._nth(era, era.gaps.nth(numbers[chosen] - era.number))
        return epochs, offsets

    def numbers_of(self, epochs: I64, offsets: I64) -> I64:
        """The number of the sample at each (epoch, offset), shape (count,); -1 if it is left out.

        Above 2^62, a number is not exact.
        """
        numbers, is_left_out = self._before(epochs, offsets)
        return np.where(is_left_out, np.int64(-1), numbers)

    def number_before(self, key: int) -> int:
        """How many samples come before this key."""
        if key >= MAX_SIZE and not self.has_exclusions:
            return MAX_SIZE
        epoch, offset = divmod(key, self.size)
        numbers, _ = self._before(np.array([min(epoch, MAX_SIZE)]), np.array([offset]))
        return int(numbers[0])

    def inputs(self, begin: int, end: int) -> tuple[Any, ...]:
        """What the samples numbered `begin` to `end` - 1 depend on; equal for streams that give the same ones."""
        parts = []
        for era, following in zip(self._eras, [*self._eras[1:], None], strict=True):
            first, stop = max(begin, era.number), end if following is None else min(end, following.number)
            if first < stop:
                low, high = self.key_of(first), self.key_of(stop - 1)
                ranges = tuple(one for one in era.key_ranges if low < one[0] < high)
                parts.append((first, low, tuple(era.excluded.tolist()), ranges))
        return self.name, self.size, tuple(parts)

    def _before(self, epochs: I64, offsets: I64) -> tuple[I64, NDArray[np.bool_]]:
        """How many samples come before each (epoch, offset), and whether the one there is left out."""
        if not self.has_exclusions:
            return _times(epochs, self.size) + offsets, np.zeros(len(epochs), bool)
        numbers, is_left_out = np.empty_like(epochs), np.zeros(len(epochs), bool)
        era_of = -np.ones(len(epochs), np.int64)
        for era in self._eras:
            era_of += (epochs > era.epoch) | ((epochs == era.epoch) & (offsets >= era.offset))
        for i in np.unique(era_of).tolist():
            chosen, era = era_of == i, self._eras[i]
            ordinals, is_excluded = self._ordinals(era, epochs[chosen], offsets[chosen])
            kept, in_gap = era.gaps.before(ordinals)
            numbers[chosen], is_left_out[chosen] = era.number + kept, is_excluded | in_gap
        return numbers, is_left_out

    def _ordinals(self, era: _Era, epochs: I64, offsets: I64) -> tuple[I64, NDArray[np.bool_]]:
        """Keys of the era before each (epoch, offset), but for excluded samples; whether the sample is excluded."""
        ordinals, is_excluded = np.empty_like(offsets), np.zeros(len(offsets), bool)
        first = epochs == era.epoch
        ordinals[first] = offsets[first] - era.offset - np.searchsorted(era.in_first, offsets[first])
        is_excluded[first] = np.isin(offsets[first], era.in_first)
        later = ~first
        if later.any():
            rows, row_of = self._excluded_offsets(era.excluded, epochs[later])
            count = rows.shape[1]
            flat = (rows + np.arange(len(rows))[:, None] * self.size).reshape(-1)
            at = offsets[later] + row_of * self.size
            skipped = np.searchsorted(flat, at) - row_of * count
            whole_epochs = _times(epochs[later] - era.epoch - 1, self.size - count)
            ordinals[later] = self._kept_in_first_epoch(era) + whole_epochs + offsets[later] - skipped
            is_excluded[later] = np.isin(at, flat)
        return ordinals, is_excluded

    def _nth(self, era: _Era, ordinals: I64) -> tuple[I64, I64]:
        """The inverse of `_ordinals` for samples that are not excluded."""
        in_first = self._kept_in_first_epoch(era)
        epochs, offsets = np.empty_like(ordinals), np.empty_like(ordinals)
        first = ordinals < in_first
        epochs[first] = era.epoch
        offsets[first] = era.offset + _nth_kept(era.in_first - era.offset, ordinals[first])
        later = ~first
        if later.any():
            whole, nth = np.divmod(ordinals[later] - in_first, np.int64(self.size - len(era.excluded)))
            epochs[later] = era.epoch + 1 + whole
            rows, row_of = self._excluded_offsets(era.excluded, epochs[later])
            count = rows.shape[1]
            base = np.arange(len(rows))[:, None] * (self.size + 1)
            flat = (rows - np.arange(count) + base).reshape(-1)
            skipped = np.searchsorted(flat, nth + row_of * (self.size + 1), side="right") - row_of * count
            offsets[later] = nth + skipped
        return epochs, offsets

    def _kept_in_first_epoch(self, era: _Era) -> int:
        return self.size - era.offset - len(era.in_first)

    def _excluded_offsets(self, excluded: I64, epochs: I64) -> tuple[I64, I64]:
        """Sorted offsets of the excluded samples, one row per distinct epoch, and the row of each of `epochs`."""
        distinct, row_of = np.unique(epochs, return_inverse=True)
        count = len(excluded)
        keys = np.repeat(derive(self.stream, distinct), count)
        samples = np.tile(excluded.astype(np.uint64), len(distinct))
        if self._shuffle and count:
            samples = permute(samples, self.domain, keys, self.pairs, inverse=True)
        offsets = samples.astype(np.int64)
        return np.sort(offsets.reshape(len(distinct), count), axis=1), row_of.astype(np.int64)


def _nth_kept(excluded: I64, number: I64) -> I64:
    """The `number`-th non-negative integer, from 0, that is not in the sorted array `excluded`."""
    skipped: I64 = np.searchsorted(excluded - np.arange(len(excluded)), number, side="right")
    return number + skipped


def _times(epochs: I64, kept: int) -> I64:
    """The product, but 2^62 where it would be more."""
    most = MAX_SIZE // max(1, kept)
    return np.where(epochs > most, np.int64(MAX_SIZE), np.minimum(epochs, most) * kept)


def _merged(ranges: Iterable[tuple[int, int]], first: int) -> Sequence[tuple[int, int]]:
    """The same ranges [start, stop), from `first` on, sorted and disjoint."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted((max(start, first), stop) for start, stop in ranges if stop > first):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged

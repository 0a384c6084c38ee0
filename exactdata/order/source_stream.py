"""Order the samples of one source as an endless stream of epochs, each in a different random order.

The *key* of a sample is its index in the stream. Key k is offset k % n of epoch k // n, and the permutation of that
epoch maps the offset to a sample. The *number* of a sample is how many samples of the source were drawn before it. Key
and number are equal without exclusions. Excluded keys are skipped, and the remaining keys keep their order.

This module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from exactdata.order.arrays import I64, Flags
from exactdata.order.caching import cached
from exactdata.order.hashing import derive, stream_key
from exactdata.order.kept_samples import MOST, KeptSamples
from exactdata.order.permutation import MAX_SIZE, Domain, grid, permute, round_pairs
from exactdata.order.ranges import Ranges
from exactdata.order.weights import SamplerError

_CACHED_ERAS = 4


class _Gaps:
    """Sorted disjoint ranges [start, stop) of non-negative integers to skip."""

    def __init__(self, starts: I64, stops: I64) -> None:
        some = stops > starts
        starts, stops = starts[some], stops[some]
        self._skipped = np.append(0, np.cumsum(stops - starts))  # integers skipped before each range, and in total
        self._starts, self._stops = starts, stops
        self._kept = starts - self._skipped[:-1]  # number of integers kept before each range

    def nth(self, numbers: I64) -> I64:
        """Return the n-th integer that is not skipped, for each n >= 0 in `numbers`."""
        if not len(self._kept):
            return numbers
        result: I64 = numbers + self._skipped[np.searchsorted(self._kept, numbers, side="right")]
        return result

    def before(self, values: I64) -> tuple[I64, Flags]:
        """Count the integers before each value that are not skipped, and check whether the value is skipped."""
        if not len(self._kept):
            return values, np.zeros(len(values), bool)
        gap = np.searchsorted(self._starts, values, side="right") - 1
        inside = (gap >= 0) & (values < self._stops[gap])
        return np.where(inside, self._kept[gap], values - self._skipped[gap + 1]), inside


@dataclass(frozen=True)
class _Era:
    """A range of samples to which the same exclusions apply, from sample `number` to the start of the next era.

    Attributes:
        number: number of the first sample in the era.
        key: the first key in the era.
        samples: the excluded samples.
        keys: additional excluded keys, from `key` on.
    """

    number: int
    key: int
    samples: Ranges
    keys: Ranges


class _Kept:
    """The samples of an era that are not excluded.

    Attributes:
        samples: the samples of the source that are not excluded.
        first: the first key of the era, counted among the keys of `samples`.
        gaps: additional excluded keys, counted from `first` among the keys of `samples`.
    """

    def __init__(self, samples: KeptSamples, key: int, keys: Ranges) -> None:
        self.samples = samples
        self.first = int(self._among(np.array([key]))[0])
        self.gaps = _Gaps(self._among(keys.first) - self.first, self._among(keys.last + 1) - self.first)

    def _among(self, keys: I64) -> I64:
        if self.samples.left == self.samples.size:
            return keys
        epochs, offsets = np.divmod(keys, self.samples.size)
        return _times(epochs, self.samples.left) + self.samples.before(epochs, offsets)[0]

    def nth(self, numbers: I64) -> tuple[I64, I64]:
        """Return the epoch and offset of each sample, given its number in the era."""
        return self.samples.locate(self.gaps.nth(numbers) + self.first)

    def before(self, epochs: I64, offsets: I64) -> tuple[I64, Flags]:
        """Count the era's samples before each (epoch, offset), and check whether the sample there is excluded."""
        ranks, is_excluded = self.samples.before(epochs, offsets)
        kept, in_gap = self.gaps.before(_times(epochs, self.samples.left) + ranks - self.first)
        return kept, is_excluded | in_gap


class SourceStream:
    """Map the numbers of one source's samples to (epoch, offset in the permutation of that epoch), and back.

    Args:
        seed: seed of the order. Together with the name, it determines the permutations.
        name: name of the source.
        size: number of samples of the source.
        shuffle: if False, keep the stored order of the source in every epoch.
    """

    def __init__(self, seed: int, name: str, size: int, shuffle: bool = True) -> None:
        self.name, self.size, self._shuffle = name, size, shuffle
        self.stream = stream_key(seed, "source", name)
        a, b = grid(max(1, size))
        self.domain = Domain(np.uint64(max(1, size)), np.uint64(a), np.uint64(b))
        self.pairs = round_pairs(b)
        self._eras = [_Era(0, 0, Ranges(), Ranges())]
        self._numbers = np.zeros(1, np.int64)  # first sample number of each era
        self._cache: dict[int, _Kept] = {}  # by index of the era
        self.has_exclusions = False  # while False, numbers equal keys

    def leave_out(self, number: int, samples: Ranges, keys: Ranges) -> None:
        """Exclude exactly these samples and keys, from sample `number` on. Earlier exclusions end there.

        Args:
            number: number of samples drawn from the source so far.
            samples: indices within the source to exclude.
            keys: keys to exclude. Keys before sample `number` have no effect.

        Raises:
            SamplerError: no sample would be left, or a key exceeds 2^62.
        """
        if not len(samples) and not len(keys) and not self.has_exclusions:
            return
        if len(samples) and samples.total >= self.size:
            raise SamplerError(
                f"all {self.size} samples of source {self.name!r} would be excluded: set its weight to 0 instead"
            )
        if len(samples) and samples.last[-1] >= self.size:
            raise SamplerError(f"exclude '{self.name}:{samples.last[-1]}': it has indices 0 to {self.size - 1}")
        if min(samples.total, self.size - samples.total) > MOST:
            raise SamplerError(
                f"{samples.total} of {self.size} samples of source {self.name!r} would be excluded: at most {MOST} can "
                "be, or all but as many; split the source in two, and set the weight of one to 0"
            )
        if len(keys) and keys.last[-1] >= MAX_SIZE:
            raise SamplerError(
                f"the excluded positions reach beyond sample 2^62 of source {self.name!r}: exclude fewer positions"
            )
        key = self.end_key(number)
        if self._eras[-1].number == number:
            self._eras.pop()
        self._eras.append(_Era(number, key, samples, keys.from_on(key)))
        self._numbers = np.array([era.number for era in self._eras])
        self._cache.pop(len(self._eras) - 1, None)
        self.has_exclusions = True

    def _kept(self, era: int) -> _Kept:
        return cached(self._cache, era, _CACHED_ERAS, partial(self._kept_in, self._eras[era]))

    def _kept_in(self, era: _Era) -> _Kept:
        same = (one.samples for one in list(self._cache.values()) if one.samples.excluded == era.samples)
        left = next(same, None) or KeptSamples(self.size, era.samples, self._permute)
        return _Kept(left, era.key, era.keys)

    def _permute(self, epoch: int, values: I64, inverse: bool) -> I64:
        if not self._shuffle:
            return values
        key = derive(self.stream, np.array([epoch]))[0]
        return permute(values.astype(np.uint64), self.domain, key, self.pairs, inverse=inverse).view(np.int64)

    def end_key(self, number: int) -> int:
        """Return one past the last key among the first `number` samples."""
        last = self._eras[-1]
        return last.key if number == last.number else int(self.end_keys(np.array([number]))[0])

    def end_keys(self, numbers: I64) -> I64:
        """Return `end_key` for each number, int64 of shape (count,)."""
        if not self.has_exclusions:
            return numbers
        last = self._eras[-1]
        return np.where(numbers == last.number, last.key, self.keys_of(np.maximum(numbers - 1, 0)) + 1)

    def keys_of(self, numbers: I64) -> I64:
        """Return the key of each sample, given its number, int64 of shape (count,)."""
        if not self.has_exclusions:
            return numbers
        epochs, offsets = self.epochs_and_offsets(numbers)
        return epochs * self.size + offsets

    def progress(self, number: int) -> float:
        """Return the epochs completed by the first `number` samples, as a fraction that includes excluded samples."""
        if not number:
            return 0.0
        epoch, offset = divmod(self.end_key(number), self.size)
        if offset and self.keys_of(np.array([number]))[0] // self.size > epoch:
            return float(epoch + 1)  # the rest of the epoch is excluded
        return epoch + offset / self.size

    def epochs_and_offsets(self, numbers: I64) -> tuple[I64, I64]:
        """Return the epoch and offset of each sample, both of the shape of `numbers`, (count,)."""
        if not self.has_exclusions:
            return np.divmod(numbers, np.int64(max(1, self.size)))
        era_of = np.searchsorted(self._numbers, numbers, side="right") - 1
        distinct = np.unique(era_of).tolist()
        if len(distinct) == 1:
            return self._kept(distinct[0]).nth(numbers - self._eras[distinct[0]].number)
        epochs, offsets = np.empty_like(numbers), np.empty_like(numbers)
        for i in distinct:
            chosen = era_of == i
            epochs[chosen], offsets[chosen] = self._kept(i).nth(numbers[chosen] - self._eras[i].number)
        return epochs, offsets

    def numbers_of(self, epochs: I64, offsets: I64) -> I64:
        """Return the number of the sample at each (epoch, offset), or -1 if it is excluded, shape (count,).

        Numbers above 2^62 are not exact.
        """
        numbers, is_left_out = self._before(epochs, offsets)
        return np.where(is_left_out, np.int64(-1), numbers)

    def number_before(self, key: int) -> int:
        """Count the samples before this key."""
        if key >= MAX_SIZE and not self.has_exclusions:
            return MAX_SIZE
        epoch, offset = divmod(key, self.size)
        numbers, _ = self._before(np.array([min(epoch, MAX_SIZE)]), np.array([offset]))
        return int(numbers[0])

    def _before(self, epochs: I64, offsets: I64) -> tuple[I64, Flags]:
        """Count the samples before each (epoch, offset), and check whether the sample there is excluded."""
        if not self.has_exclusions:
            return _times(epochs, self.size) + offsets, np.zeros(len(epochs), bool)
        numbers, is_left_out = np.empty_like(epochs), np.zeros(len(epochs), bool)
        begins = np.array([era.key for era in self._eras])
        keys = _times(epochs, self.size) + np.where(epochs < MAX_SIZE // max(1, self.size), offsets, 0)
        era_of = np.searchsorted(begins, keys, side="right") - 1
        for i in np.unique(era_of).tolist():
            chosen = era_of == i
            kept, is_left_out[chosen] = self._kept(i).before(epochs[chosen], offsets[chosen])
            numbers[chosen] = self._eras[i].number + kept
        return numbers, is_left_out


def _times(epochs: I64, kept: int) -> I64:
    """Multiply by `kept`, and limit the products to 2^62."""
    most = MAX_SIZE // max(1, kept)
    return np.where(epochs > most, np.int64(MAX_SIZE), np.minimum(epochs, most) * kept)

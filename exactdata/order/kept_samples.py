"""Find the samples of a source that are not excluded in each epoch, and count without the excluded ones.

An epoch is a permutation, so a range of samples is scattered over it. The offsets of the excluded samples, or of the
kept samples if these are fewer, are sorted once an epoch.

A thread that prefetches may look up samples at the same time as the training. A cached epoch is therefore replaced
atomically, by values computed from the same inputs. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from exactdata.order.arrays import I64, Flags
from exactdata.order.caching import cached
from exactdata.order.ranges import Ranges

Permute = Callable[[int, I64, bool], I64]

MOST = 1 << 24  # samples whose places are sorted
_CACHED_EPOCHS = 2


class KeptSamples:
    """Map keys that count kept samples only to epochs and offsets, and back.

    Args:
        size: samples of the source.
        excluded: samples that are left out, fewer than all; at most `MOST`, or all but at most `MOST`.
        permute: (epoch, values, inverse) -> samples of offsets, or offsets of samples.
    """

    def __init__(self, size: int, excluded: Ranges, permute: Permute) -> None:
        self.size, self.excluded, self.left = size, excluded, size - excluded.total
        self._few_left = self.left < self.size - self.left
        everything = Ranges(np.zeros(1, np.int64), np.array([size - 1]))
        self._sorted = everything.without(excluded) if self._few_left else excluded
        self._permute = permute
        self._epochs: dict[int, tuple[I64, I64]] = {}

    def locate(self, keys: I64) -> tuple[I64, I64]:
        """Return epoch and offset of each sample, by its key among the kept samples."""
        epochs, ranks = np.divmod(keys, np.int64(self.left))
        if self.left == self.size:
            return epochs, ranks
        offsets = np.empty_like(ranks)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            places, before = self._places(epoch)
            if self._few_left:
                offsets[chosen] = places[ranks[chosen]]
            else:
                offsets[chosen] = ranks[chosen] + np.searchsorted(before, ranks[chosen], side="right")
        return epochs, offsets

    def before(self, epochs: I64, offsets: I64) -> tuple[I64, Flags]:
        """Count the kept samples of each epoch before an offset, and check whether the sample there is excluded."""
        if self.left == self.size:
            return offsets, np.zeros(len(offsets), bool)
        ranks, gone = np.empty_like(offsets), np.empty(len(offsets), bool)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            places, _ = self._places(epoch)
            at = np.searchsorted(places, offsets[chosen])
            found = places[np.minimum(at, len(places) - 1)] == offsets[chosen]
            ranks[chosen] = at if self._few_left else offsets[chosen] - at
            gone[chosen] = ~found if self._few_left else found
        return ranks, gone

    def _places(self, epoch: int) -> tuple[I64, I64]:
        """Return the sorted offsets, and how many other samples are before each."""
        return cached(self._epochs, epoch, _CACHED_EPOCHS, partial(self._sort, epoch))

    def _sort(self, epoch: int) -> tuple[I64, I64]:
        places = np.sort(self._permute(epoch, self._sorted.values(), True))
        return places, places - np.arange(len(places))

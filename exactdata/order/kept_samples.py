"""Find and count the samples of a source that are not excluded, in each epoch.

An epoch is a permutation, so a range of samples is scattered over it. The offsets of the excluded samples, or of the
kept samples if they are fewer, are sorted once per epoch.

A prefetching thread may look up samples at the same time as the training thread. A cached epoch is therefore replaced
atomically, with values computed from the same inputs. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from exactdata.order.arrays import I64, Flags
from exactdata.order.caching import cached
from exactdata.order.ranges import Ranges

Permute = Callable[[int, I64, bool], I64]

MOST = 1 << 24  # maximum number of samples whose offsets are sorted
_CACHED_EPOCHS = 2


class KeptSamples:
    """Map keys to epochs and offsets, and back. These keys count only the kept samples.

    Args:
        size: number of samples of the source.
        excluded: the excluded samples. There must be at least one kept sample, and at most `MOST` excluded or at most
            `MOST` kept samples.
        permute: called with (epoch, values, inverse), returns the samples at offsets or, if `inverse`, the offsets of
            samples.
    """

    def __init__(self, size: int, excluded: Ranges, permute: Permute) -> None:
        self.size, self.excluded, self.left = size, excluded, size - excluded.total
        self._few_left = self.left < self.size - self.left
        everything = Ranges(np.zeros(1, np.int64), np.array([size - 1]))
        self._sorted = everything.without(excluded) if self._few_left else excluded
        self._permute = permute
        self._epochs: dict[int, tuple[I64, I64]] = {}

    def locate(self, keys: I64) -> tuple[I64, I64]:
        """Return the epoch and offset of each sample, given its key among the kept samples."""
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
        """Count each epoch's kept samples before an offset, and check whether the sample at the offset is excluded."""
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
        """Return the sorted offsets, and how many samples of the complementary set precede each."""
        return cached(self._epochs, epoch, _CACHED_EPOCHS, partial(self._sort, epoch))

    def _sort(self, epoch: int) -> tuple[I64, I64]:
        places = np.sort(self._permute(epoch, self._sorted.values(), True))
        return places, places - np.arange(len(places))

"""The samples of a source that are not excluded: their places in each epoch, counted without those that are.

An epoch is a permutation, so a range of samples is scattered over it. If a few samples are excluded, or a few are left,
their places are sorted, once an epoch. Otherwise the epoch is looked at in blocks, from its beginning on or where it is
asked for, so that neither time nor memory grows with the number of excluded samples.

A thread that prefetches may look up samples at the same time as the training: what is kept of an epoch is replaced as a
whole, by what follows from the same inputs. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from runner.data.order.caching import cached
from runner.data.order.ranges import NarrowRanges, Ranges, narrow, search

I64 = NDArray[np.int64]
Flags = NDArray[np.bool_]
Permute = Callable[[int, I64, bool], I64]

_FEW = 1 << 17  # samples whose places are sorted, at least; as many as there are blocks in any case
_BLOCK = 1 << 12  # offsets of an epoch that are looked at together
_NEAR = 64  # blocks that are counted one by one to reach a place; beyond, all places of the epoch are counted
_CACHED_BLOCKS = 16
_CACHED_EPOCHS = 2


class KeptSamples:
    """Maps the keys of the samples that are left, which count nothing else, to epochs and offsets, and back.

    Args:
        size: samples of the source.
        excluded: those that are left out, fewer than all.
        permute: (epoch, values, inverse) -> samples of offsets, or offsets of samples.
    """

    def __init__(self, size: int, excluded: Ranges, permute: Permute) -> None:
        self.size, self.left = size, size - excluded.total
        self._excluded = NarrowRanges(excluded)
        self._permute = permute
        self._epochs: dict[int, _Epoch] = {}

    def leaves_out(self, samples: Ranges) -> bool:
        """Whether these are the samples that are left out."""
        return self._excluded.widened() == samples

    def locate(self, keys: I64) -> tuple[I64, I64]:
        """Epoch and offset of each, by its key among those that are left."""
        epochs, ranks = np.divmod(keys, np.int64(self.left))
        if self.left == self.size:
            return epochs, ranks
        offsets = np.empty_like(ranks)
        for epoch, chosen in _by_epoch(epochs):
            offsets[chosen] = self._epoch(epoch).nth(ranks[chosen])
        return epochs, offsets

    def before(self, epochs: I64, offsets: I64) -> tuple[I64, Flags]:
        """How many of each epoch are left before an offset, and whether the sample there is excluded."""
        if self.left == self.size:
            return offsets, np.zeros(len(offsets), bool)
        ranks, gone = np.empty_like(offsets), np.empty(len(offsets), bool)
        for epoch, chosen in _by_epoch(epochs):
            ranks[chosen], gone[chosen] = self._epoch(epoch).before(offsets[chosen])
        return ranks, gone

    def _epoch(self, epoch: int) -> _Epoch:
        return cached(self._epochs, epoch, _CACHED_EPOCHS, partial(self._look_at, epoch))

    def _look_at(self, epoch: int) -> _Epoch:
        few = max(_FEW, self.size // _BLOCK)
        kind = _Sorted if self.size - self.left <= few else _SortedRest if self.left <= few else _Blocks
        return kind(self.size, self._excluded.widened(), partial(self._permute, epoch))


def _by_epoch(epochs: I64) -> Iterator[tuple[int, Flags | slice]]:
    if not len(epochs):
        return
    first = int(epochs[0])
    if (epochs == first).all():
        yield first, slice(None)
        return
    for epoch in np.unique(epochs).tolist():
        yield epoch, epochs == epoch


class _Epoch(Protocol):
    """The samples of one epoch that are left."""

    def nth(self, ranks: I64) -> I64:
        """The offset of each, by how many are left before it."""
        ...

    def before(self, offsets: I64) -> tuple[I64, Flags]:
        """How many are left before each offset, and whether the sample there is excluded."""
        ...


class _Sorted:
    """One epoch, with the offsets of all excluded samples."""

    def __init__(self, size: int, excluded: Ranges, permute: Callable[[I64, bool], I64]) -> None:
        parts = [permute(samples, True) for samples in excluded.pieces(_FEW)]
        offsets: I64 = np.sort(np.concatenate(parts))
        self._ranks = narrow(offsets - np.arange(len(offsets), dtype=np.int64))

    def nth(self, ranks: I64) -> I64:
        return ranks + search(self._ranks, ranks, "right")

    def before(self, offsets: I64) -> tuple[I64, Flags]:
        excluded = self._ranks + np.arange(len(self._ranks))
        skipped = np.searchsorted(excluded, offsets)
        nearest = excluded[np.minimum(skipped, len(excluded) - 1)]
        return offsets - skipped, nearest == offsets


class _SortedRest:
    """One epoch, with the offsets of all samples that are left."""

    def __init__(self, size: int, excluded: Ranges, permute: Callable[[I64, bool], I64]) -> None:
        rest = Ranges(np.zeros(1, np.int64), np.array([size - 1])).without(excluded)
        self._offsets: I64 = np.sort(np.concatenate([permute(samples, True) for samples in rest.pieces(_FEW)]))

    def nth(self, ranks: I64) -> I64:
        return self._offsets[ranks]

    def before(self, offsets: I64) -> tuple[I64, Flags]:
        ranks = np.searchsorted(self._offsets, offsets)
        return ranks, self._offsets[np.minimum(ranks, len(self._offsets) - 1)] != offsets


class _Blocks:
    """One epoch, with what is left in the blocks that are looked at, and how many before each, as far as needed."""

    def __init__(self, size: int, excluded: Ranges, permute: Callable[[I64, bool], I64]) -> None:
        self._size, self._excluded, self._permute = size, excluded, permute
        self._count = -(-size // _BLOCK)
        self._counted = np.zeros(_NEAR, np.int64), 1  # what is left before each block, and of how many this is known
        self._cache: dict[int, I64] = {}

    def nth(self, ranks: I64) -> I64:
        highest = int(ranks.max())
        starts, known = self._counted
        while starts[known - 1] <= highest:
            starts, known = self._count_on(highest - int(starts[known - 1]))
        blocks = np.searchsorted(starts[:known], ranks, side="right") - 1
        offsets = np.empty_like(ranks)
        for block in np.unique(blocks).tolist():
            chosen = blocks == block
            offsets[chosen] = self._left_in(block)[ranks[chosen] - starts[block]]
        return offsets

    def before(self, offsets: I64) -> tuple[I64, Flags]:
        blocks = offsets // _BLOCK
        distinct = np.unique(blocks)
        if len(distinct) > _NEAR:
            return self._before_many(offsets)
        starts, known = self._counted
        while known <= distinct[-1]:
            starts, known = self._count_on((int(distinct[-1]) - known) * _BLOCK)
        ranks, gone = np.empty_like(offsets), np.empty(len(offsets), bool)
        for block in distinct.tolist():
            chosen, left = blocks == block, self._left_in(block)
            at = np.searchsorted(left, offsets[chosen])
            ranks[chosen] = starts[block] + at
            gone[chosen] = np.append(left, -1)[at] != offsets[chosen]
        return ranks, gone

    def _before_many(self, offsets: I64) -> tuple[I64, Flags]:
        """In one pass over all excluded samples."""
        order = np.argsort(offsets, kind="stable")
        counts = np.zeros(len(offsets) + 1, np.int64)
        for samples in self._excluded.pieces(_FEW):
            after = np.searchsorted(offsets[order], self._permute(samples, True), side="right")
            counts += np.bincount(after, minlength=len(counts))
        skipped = np.empty_like(offsets)
        skipped[order] = np.cumsum(counts)[:-1]
        return offsets - skipped, self._excluded.contains(self._permute(offsets, False))

    def _count_on(self, distance: int) -> tuple[I64, int]:
        """Count what is left in one more block, or in all of them if what is wanted is far."""
        starts, known = self._counted
        if distance > _NEAR * _BLOCK:
            counts = np.zeros(self._count, np.int64)
            for samples in self._excluded.pieces(_FEW):
                counts += np.bincount(self._permute(samples, True) // _BLOCK, minlength=self._count)
            ends = np.minimum(np.arange(1, self._count + 1) * _BLOCK, self._size)
            starts = np.concatenate([[0], ends - np.cumsum(counts)])
            self._counted = starts, len(starts)
            return self._counted
        if known == len(starts):
            starts = np.concatenate([starts, np.zeros_like(starts)])
        starts[known] = starts[known - 1] + len(self._left_in(known - 1))
        self._counted = starts, known + 1
        return self._counted

    def _left_in(self, block: int) -> I64:
        """The offsets of a block whose samples are not excluded."""
        return cached(self._cache, block, _CACHED_BLOCKS, partial(self._look_at, block))

    def _look_at(self, block: int) -> I64:
        offsets = np.arange(block * _BLOCK, min((block + 1) * _BLOCK, self._size))
        return offsets[~self._excluded.contains(self._permute(offsets, False))]

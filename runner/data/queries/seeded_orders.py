"""The epochs of the two seeded samplers, looked up in a few places without drawing them. Does not import torch.

What `runner.data.sampler` draws as arrays stands here as arithmetic; tests hold both equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from runner.data.order.torch_shuffle import BELOW, TorchGenerator, TorchPermutation
from runner.data.order.weights import SamplerError, apportion, check_weights, integer, per_rank, shares
from runner.data.queries.order_record import OrderRecord
from runner.data.queries.seeded_epochs import SeededPosition

I64 = NDArray[np.int64]


class SeededOrder(Protocol):
    """One epoch of all ranks."""

    def indices(self, ranks: Sequence[int], first: int, count: int) -> list[I64]:
        """Dataset indices of `count` samples of each rank from `first` on, fewer at the end of the epoch."""
        ...

    def times(self, index: int) -> list[tuple[int, int]]:
        """The rank of each time that this sample is drawn, and the number of the sample in its epoch."""
        ...


def can_be_looked_up(record: OrderRecord) -> bool:
    """Whether `seeded_order` knows the epochs of this run: not of a user's sampler, nor of permutations that large."""
    return record.kind in ("distributed", "mixture") and sum(record.sizes.values()) < BELOW


def seeded_order(record: OrderRecord, at: SeededPosition) -> SeededOrder:
    """The epoch at a position of a run with a seeded sampler.

    Raises:
        SamplerError: the sampler would refuse the seed, the weights, or so many ranks.
    """
    ranks, seed = at.shape.world_size, integer("seed", record.seed) + at.epoch
    sizes = tuple(record.sizes.values())
    if record.kind == "distributed":
        return _distributed(sum(sizes), ranks, seed if record.shuffle else None, record.drop_last)
    weights = tuple(at.segment.weights.get(name, 0) for name in record.sizes)
    check_weights(weights, at.segment.temperature, record.sizes)
    return _mixture(sizes, weights, at.segment.temperature, ranks, seed if record.shuffle else None, record.drop_last)


@lru_cache(maxsize=2)
def _distributed(size: int, ranks: int, seed: int | None, drop_last: bool) -> SeededOrder:
    permutation = None if seed is None else TorchGenerator(seed).randperm(size)
    return _Stride(permutation, size, ranks, per_rank(size, ranks, drop_last))


@lru_cache(maxsize=2)
def _mixture(
    sizes: tuple[int, ...],
    weights: tuple[float, ...],
    temperature: float,
    ranks: int,
    seed: int | None,
    drop_last: bool,
) -> SeededOrder:
    parts = [per_rank(size, ranks, drop_last) for size in sizes]
    counts = apportion(shares(weights, temperature), sum(parts))
    if any(count and not part for count, part in zip(counts, parts, strict=True)):
        raise SamplerError(f"a source has too few samples for {ranks} ranks: the run cannot have drawn from it")
    generator = None if seed is None else TorchGenerator(seed)
    strides = [  # sources that are not drawn from take nothing from the generator
        _Stride(generator.randperm(size) if generator and count else None, size, ranks, part)
        for size, part, count in zip(sizes, parts, counts, strict=True)
    ]
    return _Mixture(strides, counts, generator.randperm(sum(counts)) if generator else None)


class _Stride:
    """A permutation of `size` samples, None for the identity, of which a rank gets every `ranks`-th."""

    def __init__(self, permutation: TorchPermutation | None, size: int, ranks: int, samples: int) -> None:
        self.permutation, self.size, self.ranks, self.samples = permutation, size, ranks, samples

    def indices(self, ranks: Sequence[int], first: int, count: int) -> list[I64]:
        return list(self.of(ranks, np.arange(first, min(first + count, self.samples))))

    def of(self, ranks: Sequence[int], numbers: I64) -> I64:
        """The sample of each number of each rank, of shape (ranks, count); beyond the end they begin again."""
        places = (np.array(ranks)[:, None] + numbers * self.ranks) % max(1, self.size)
        return places if self.permutation is None else self.permutation.at(places.reshape(-1)).reshape(places.shape)

    def times(self, index: int) -> list[tuple[int, int]]:
        place = index if self.permutation is None else self.permutation.place_of(index)
        return [(at % self.ranks, at // self.ranks) for at in range(place, self.samples * self.ranks, self.size)]


class _Mixture:
    """The first `counts` samples of each source, repeated if it has fewer, in the order of `permutation`."""

    def __init__(self, parts: list[_Stride], counts: list[int], permutation: TorchPermutation | None) -> None:
        self.parts, self.counts, self.permutation = parts, counts, permutation
        self.ends = list(accumulate(counts))
        self.offsets = list(accumulate((part.size for part in parts), initial=0))

    def indices(self, ranks: Sequence[int], first: int, count: int) -> list[I64]:
        places = np.arange(first, min(first + count, self.ends[-1]))
        if self.permutation is not None:
            places = self.permutation.at(places)
        found = np.empty((len(ranks), len(places)), np.int64)
        source_of = np.searchsorted(self.ends, places, side="right")
        for source in np.unique(source_of).tolist():
            chosen, part = source_of == source, self.parts[source]
            begin = self.ends[source] - self.counts[source]
            found[:, chosen] = part.of(ranks, (places[chosen] - begin) % part.samples) + self.offsets[source]
        return list(found)

    def times(self, index: int) -> list[tuple[int, int]]:
        source = int(np.searchsorted(self.offsets, index, side="right")) - 1
        part, begin, end = self.parts[source], self.ends[source] - self.counts[source], self.ends[source]
        places = [
            (rank, place)
            for rank, number in (part.times(index - self.offsets[source]) if end > begin else [])
            for place in range(begin + number, end, part.samples)
        ]
        if self.permutation is None:
            return places
        return [(rank, self.permutation.place_of(place)) for rank, place in places]

"""Provide two samplers that shuffle each epoch using torch's generator, seeded with seed + epoch.

Their sequences are fixed index for index, so you can resume a run that started with a different implementation. An
epoch is stored as one array (32-bit if the sizes allow), not as a Python list. torch.randperm draws the same numbers as
32-bit and as 64-bit integers, and 32-bit integers need half the memory.

For a data order that does not depend on the number of ranks, see `exactdata.elastic`.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Sampler

from exactdata.order.arrays import I64, U64
from exactdata.order.hashing import derive, stream_key
from exactdata.order.state_checks import ListOf, Record, any_integer, check, flag, shown, whole
from exactdata.order.weights import (
    SamplerError,
    SamplerStateError,
    apportion,
    check_weights,
    integer,
    per_rank,
    replicas_and_rank,
    shares,
)

IndexArray: TypeAlias = NDArray[np.signedinteger[Any]]  # int32 if the sizes allow, otherwise int64

_STATE = Record(
    {"epoch": whole()},
    {
        "seed": any_integer,
        "num_replicas": whole(1),
        "rank": whole(),
        "shuffle": flag,
        "drop_last": flag,
        "size": whole(),
        "sizes": ListOf(whole()),
        "counts": ListOf(whole()),
    },
)

_CHUNK = 4096  # number of indices converted at a time, to int64 or to Python integers


def permutation(n: int, generator: torch.Generator) -> IndexArray:
    """Return `torch.randperm(n)` as an array of shape (n,) that owns its memory."""
    order: IndexArray = np.empty(n, np.int32 if n < 2**31 else np.int64)
    torch.randperm(n, generator=generator, out=torch.from_numpy(order))
    return order


def _identity(n: int) -> IndexArray:
    return np.arange(n, dtype=np.int32 if n < 2**31 else np.int64)


def _stride(order: IndexArray, rank: int, num_replicas: int, drop_last: bool) -> IndexArray:
    """Return this rank's `[rank::num_replicas]` of `order`. Ranks get equal parts, by truncating or wrapping around."""
    n = len(order)
    if drop_last or n % num_replicas == 0 or n == 0:
        part = order[rank : n // num_replicas * num_replicas : num_replicas]
    else:
        part = order[rank::num_replicas]
        if len(part) < math.ceil(n / num_replicas):  # one more index, wrapped around from the start
            last = (n // num_replicas * num_replicas + rank) % n
            part = np.append(part, order[last])
    # A slice would keep the memory of the complete epoch. A copy of a small part costs at most 1/8 more.
    return part.copy() if num_replicas >= 8 else part


class EpochSampler(Sampler[int]):
    """Sample complete epochs, where each rank gets every num_replicas-th sample.

    Attributes:
        num_samples: number of samples of this rank in a complete epoch. Subclasses set it.
    """

    num_samples: int

    def __init__(self, num_replicas: int, rank: int, seed: int) -> None:
        self.num_replicas, self.rank, self.seed = num_replicas, rank, seed
        self._epoch = 0

    @property
    def epoch(self) -> int:
        """Return the epoch of the next iteration."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self._epoch = integer("epoch", epoch)

    def __len__(self) -> int:
        """Return the number of samples of this rank in a complete epoch. A skip does not change it."""
        return self.num_samples

    def positions(self, first: int, count: int) -> I64:
        """Return the positions of this rank's samples [first, first + count) in the epoch, counted over all ranks.

        Returns:
            int64 of shape (count,).
        """
        step = self.num_replicas
        return np.arange(self.rank + first * step, self.rank + (first + count) * step, step, dtype=np.int64)

    def sample_keys(self, first: int, count: int) -> U64:
        """Return a 64-bit hash of (seed, epoch, position) for each of the samples at `positions(first, count)`.

        Returns:
            uint64 of shape (count,).
        """
        return derive(stream_key(self.seed, "sample", self._epoch), self.positions(first, count))


class _SeededSampler(EpochSampler, ABC):
    """Handle skipping, batches of indices and state. Base class of both seeded samplers."""

    def __init__(self, num_replicas: int | None, rank: int | None, shuffle: bool, seed: int, drop_last: bool) -> None:
        super().__init__(*replicas_and_rank(num_replicas, rank), integer("seed", seed))
        self.shuffle, self.drop_last = bool(shuffle), bool(drop_last)
        self._skip = 0
        self._drawn_with: dict[str, Any] | None = None  # parameters from which the current epoch was drawn
        self._state_loaded = False  # whether a state was loaded and no iteration has started since

    def set_skip(self, skip: int) -> None:
        """Skip the first `skip` samples of this rank, in the next iteration only."""
        self._skip = integer("skip", skip, 0)

    def __iter__(self) -> Iterator[int]:
        return integers(self._take_order())

    def iter_batches(self, batch_size: int, drop_last: bool) -> Iterator[I64]:
        """Yield the samples of `__iter__` in arrays. Like `__iter__`, apply the skip to this iteration only.

        Args:
            batch_size: samples per array, at least 1.
            drop_last: drop an incomplete last array.

        Yields:
            Dataset indices, int64 of shape (batch_size,).
        """
        return _batches(self._take_order(), integer("batch_size", batch_size, 1), drop_last)

    def state_dict(self) -> dict[str, Any]:
        """Return epoch, seed, num_replicas, rank, and everything else that the current epoch's order depends on."""
        return {
            "epoch": self._epoch,
            "seed": self.seed,
            "num_replicas": self.num_replicas,
            "rank": self.rank,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            **self._sizes(),
            **(self._draw_parameters() if self._drawn_with is None else self._drawn_with),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the epoch. The sampler keeps its own rank, not the rank in the state.

        The weights may differ from those in the state if the next iteration starts an epoch. If they differ in the
        middle of an epoch, the next iteration with a skip raises an error.

        Raises:
            SamplerStateError: the state has no epoch, or a different seed, size, number of replicas, shuffle or
                drop_last. A skip would then lead to different samples.
        """
        name = type(self).__name__
        if not isinstance(state, Mapping):
            raise SamplerStateError(f"{name}: the saved state is {shown(state)}: pass what state_dict() returned")
        message = "{key} {value}; expected {allowed}: it was edited; use another checkpoint"
        check(state, _STATE, f"{name}: the saved state has {message}", SamplerStateError)
        own = {"seed": self.seed, "num_replicas": self.num_replicas, **self._sizes()}
        own |= {"shuffle": self.shuffle, "drop_last": self.drop_last}
        for key, value in own.items():
            if key in state and state[key] != value:
                remedy = " (ElasticSampler resumes with any number)" if key == "num_replicas" else ""
                raise SamplerStateError(
                    f"{name}: the saved state has {key} {shown(state[key])}, this sampler has {key} {value}, which "
                    f"would change the order: use the saved {key}{remedy}"
                )
        if "counts" in state and sum(state["counts"]) != self.num_samples:
            raise SamplerStateError(
                f"{name}: the saved state has counts {shown(state['counts'])}; expected {self.num_samples} in all: it "
                "was edited; use another checkpoint"
            )
        self._epoch = state["epoch"]
        drawn_with = {name: state[name] for name in self._draw_parameters() if name in state}
        self._drawn_with, self._state_loaded = drawn_with or None, True

    @abstractmethod
    def indices_at(self, positions: I64, epoch: int | None = None) -> I64:
        """Look up dataset indices within an epoch. Too slow for training: draws the complete epoch.

        Args:
            positions: positions within the epoch, counted over all ranks, shape (count,).
            epoch: number of the epoch. If None, the current epoch.

        Returns:
            int64 of shape (count,).
        """

    def _take_order(self) -> IndexArray:
        parameters, skip, self._skip = self._draw_parameters(), self._skip, 0
        if self._state_loaded and skip and self._drawn_with not in (None, parameters):
            raise SamplerStateError(
                f"{type(self).__name__}: the saved state is within an epoch drawn with {_listed(self._drawn_with)}, "
                f"this sampler's weights give {_listed(parameters)}: finish that epoch with the saved weights"
            )
        self._drawn_with, self._state_loaded = parameters, False
        return self._order()[skip:]

    @abstractmethod
    def _order(self) -> IndexArray:
        """Return this rank's complete epoch."""

    @abstractmethod
    def _sizes(self) -> dict[str, Any]:
        """Return the sizes that must be the same in a state and in this sampler."""

    def _draw_parameters(self) -> dict[str, Any]:
        """Return the parameters that may change from one epoch to the next."""
        return {}


class DistributedSampler(_SeededSampler):
    """Shuffle a dataset with seed + epoch. Rank r takes every num_replicas-th sample, starting at index r.

    The sequence is the same as that of torch.utils.data.DistributedSampler with the same arguments.

    Example:
        ```python
        from exactdata import DistributedSampler, StatefulDataLoader

        data = list(range(10))
        sampler = DistributedSampler(data, num_replicas=2, rank=0, seed=1)
        loader = StatefulDataLoader(data, batch_size=2, sampler=sampler)
        for epoch in range(2):
            sampler.set_epoch(epoch)  # a different order in each epoch
            for batch in loader:
                print(epoch, batch.tolist())
        ```

    Args:
        dataset: anything with a length.
        num_replicas: number of ranks. If None, the world size of torch.distributed, or 1 without it.
        rank: this rank. If None, the rank in torch.distributed, or 0 without it.
        shuffle: if False, keep the order of the dataset.
        seed: seed of the shuffle. The epoch is added to it.
        drop_last: truncate the epoch to a multiple of num_replicas. If False, pad it by wrapping around.

    Raises:
        SamplerError: the number of replicas, the rank or the seed is invalid.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
    ) -> None:
        super().__init__(num_replicas, rank, shuffle, seed, drop_last)
        self.dataset = dataset
        self._size = len(dataset)
        self.num_samples = per_rank(self._size, self.num_replicas, drop_last)

    @classmethod
    def of_sources(
        cls, sizes: Mapping[str, int], weights: Sequence[float], temperature: float, **common: Any
    ) -> DistributedSampler:
        """Create a sampler over the concatenated sources. Ignores `weights`; see `exactdata.samplers.Kind`."""
        return cls(range(sum(sizes.values())), **common)

    def indices_at(self, positions: I64, epoch: int | None = None) -> I64:
        whole = self._whole(self._epoch if epoch is None else epoch)
        return whole[np.asarray(positions) % max(1, self._size)].astype(np.int64)

    def _whole(self, epoch: int) -> IndexArray:
        if not self.shuffle:
            return _identity(self._size)
        return permutation(self._size, torch.Generator().manual_seed(self.seed + epoch))

    def _order(self) -> IndexArray:
        return _stride(self._whole(self._epoch), self.rank, self.num_replicas, self.drop_last)

    def _sizes(self) -> dict[str, Any]:
        return {"size": self._size}


class MixtureSampler(_SeededSampler):
    """Sample each epoch from several sources, with shares p proportional to w^(1/T).

    The budget of a rank is the sum over all sources of size // num_replicas (rounded up without drop_last). A source
    gets round(p * budget) samples. These counts are then adjusted by one, in descending order of p, until they sum to
    the budget. A source with fewer samples than its count repeats them.

    Example:
        ```python
        import torch
        from torch.utils.data import TensorDataset

        from exactdata import MixtureDataset, MixtureSampler, StatefulDataLoader

        code, prose = (TensorDataset(torch.arange(n)) for n in (90, 30))
        data = MixtureDataset([code, prose], ["code", "prose"])
        sampler = MixtureSampler(data.cumulative_sizes, weights=[1, 2], num_replicas=1, rank=0)
        print(sampler.counts)  # samples of each source in an epoch
        for (sample,), source in StatefulDataLoader(data, batch_size=8, sampler=sampler):
            print(sample.tolist(), source.tolist())
        ```

    Args:
        cumulative_sizes: `MixtureDataset.cumulative_sizes`: [0, n_0, n_0 + n_1, ...].
        weights: w, one per source. Weight 0 excludes a source at any temperature.
        num_replicas: number of ranks. If None, the world size of torch.distributed, or 1 without it.
        rank: this rank. If None, the rank in torch.distributed, or 0 without it.
        shuffle: if False, keep the order of the sources and of their samples.
        seed: seed of the shuffle. The epoch is added to it.
        drop_last: truncate each source to a multiple of num_replicas. If False, pad it by wrapping around.
        temperature: T. Values above 1 flatten the mixture, values below 1 sharpen it.

    Raises:
        SamplerError: weights are negative, not finite, all 0, or not one per source. Also raised if a source is drawn
            but has fewer samples than there are ranks.
    """

    def __init__(
        self,
        cumulative_sizes: Sequence[int],
        weights: Sequence[float],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
        temperature: float = 1.0,
    ) -> None:
        super().__init__(num_replicas, rank, shuffle, seed, drop_last)
        bounds = [integer("cumulative_sizes: bound", bound) for bound in cumulative_sizes]
        if len(bounds) < 2 or bounds[0] != 0 or bounds != sorted(bounds):
            raise SamplerError(f"cumulative_sizes {bounds}: expected [0, n_0, n_0 + n_1, ...] for one source or more")
        self._offsets = bounds[:-1]
        self._source_sizes = [after - before for before, after in itertools.pairwise(bounds)]
        self.update_weights(weights, temperature)

    @classmethod
    def of_sources(
        cls, sizes: Mapping[str, int], weights: Sequence[float], temperature: float, **common: Any
    ) -> MixtureSampler:
        """Create a sampler for these sources; see `exactdata.samplers.Kind`."""
        bounds = list(itertools.accumulate(sizes.values(), initial=0))
        return cls(bounds, weights, **common, temperature=temperature)

    def update_weights(self, weights: Sequence[float], temperature: float = 1.0) -> None:
        """Change weights and temperature from the next `iter()` on. The length stays the same.

        Args:
            weights: a list, array or tensor with one weight per source.
            temperature: as for the constructor.

        Raises:
            SamplerError: as for the constructor. The sampler then keeps its previous weights.
        """
        sizes = self._source_sizes
        weights = [weight.item() if hasattr(weight, "item") else weight for weight in weights]
        if len(weights) != len(sizes):
            raise SamplerError(f"Expected {len(sizes)} weights (one per source), got {len(weights)}")
        check_weights(weights, temperature)
        available = [per_rank(size, self.num_replicas, self.drop_last) for size in sizes]
        counts = apportion(shares(weights, temperature), sum(available))
        for source, (count, samples) in enumerate(zip(counts, available, strict=True)):
            if count and not samples:
                raise SamplerError(
                    f"source {source} has {sizes[source]} samples for {self.num_replicas} replicas, so some ranks "
                    "would get none: set its weight to 0, or drop_last=False if it has any samples"
                )
        self.weights, self.temperature = weights, temperature
        self._counts = counts
        self._state_loaded = False  # weights set after loading a state are meant for the next iteration
        self.num_samples = sum(counts)

    @property
    def counts(self) -> list[int]:
        """Return the number of samples that this rank draws from each source in an epoch."""
        return list(self._counts)

    def indices_at(self, positions: I64, epoch: int | None = None) -> I64:
        positions = np.asarray(positions, np.int64)
        result = np.empty(positions.shape, np.int64)
        kept = self.rank, self._epoch
        try:
            self._epoch = self._epoch if epoch is None else epoch
            for rank in np.unique(positions % self.num_replicas).tolist():
                self.rank = rank
                mine = positions % self.num_replicas == rank
                result[mine] = self._order()[positions[mine] // self.num_replicas]
        finally:
            self.rank, self._epoch = kept
        return result

    def _order(self) -> IndexArray:
        generator = torch.Generator().manual_seed(self.seed + self._epoch)
        drawn: IndexArray = np.empty(
            self.num_samples, np.int32 if self._offsets[-1] + self._source_sizes[-1] < 2**31 else np.int64
        )
        end = 0
        for size, offset, count in zip(self._source_sizes, self._offsets, self._counts, strict=True):
            if count == 0:
                continue
            target = drawn[end : end + count]
            _fill(target, self._part(size, generator), offset)
            end += count
        if not self.shuffle:
            return drawn
        order = permutation(len(drawn), generator)
        for first in range(0, len(order), _CHUNK):  # in place, because an epoch may fill half of the memory
            part = order[first : first + _CHUNK]
            part[:] = drawn[part]
        return order

    def _part(self, size: int, generator: torch.Generator) -> IndexArray:
        order = permutation(size, generator) if self.shuffle else _identity(size)
        return _stride(order, self.rank, self.num_replicas, self.drop_last)

    def _sizes(self) -> dict[str, Any]:
        return {"sizes": list(self._source_sizes)}

    def _draw_parameters(self) -> dict[str, Any]:
        return {"counts": list(self._counts)}


def _listed(values: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{name} {value}" for name, value in (values or {}).items())


def _fill(target: IndexArray, part: IndexArray, offset: int) -> None:
    """Fill `target` with `part` plus `offset`, repeating `part` as often as needed."""
    for first in range(0, len(target), len(part)):
        window = target[first : first + len(part)]
        np.add(part[: len(window)], offset, out=window, dtype=target.dtype)


def integers(order: IndexArray) -> Iterator[int]:
    """Yield the indices in `order` as Python integers, converted in chunks."""
    for first in range(0, len(order), _CHUNK):
        yield from order[first : first + _CHUNK].tolist()


def _batches(order: IndexArray, batch_size: int, drop_last: bool) -> Iterator[I64]:
    whole = len(order) // batch_size * batch_size
    step = max(_CHUNK // batch_size, 1) * batch_size
    for first in range(0, whole, step):  # widen in chunks: iterating over rows is the cheapest way to split an array
        yield from order[first : min(first + step, whole)].astype(np.int64).reshape(-1, batch_size)
    if whole < len(order) and not drop_last:
        yield order[whole:].astype(np.int64)

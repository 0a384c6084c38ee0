"""Check a user's sampler, split its indices over the ranks, and resume it exactly.

Three kinds of sampler are supported:

- A sampler with `set_skip` or `state_dict_at`, like this package's samplers, is used unchanged.
- The state of a sampler with `state_dict` and `load_state_dict` is saved after each batch (`StatefulSampler`).
- A sampler with `set_epoch`, such as torch's DistributedSampler, is resumed by iterating the epoch again and skipping
  its first samples (`SkippingSampler`). Its order must depend only on the epoch. It may use the global random
  generators, because they are seeded for each epoch while it is iterated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np

from exactdata.generators import Generators
from exactdata.loading.fetch import is_stateful
from exactdata.order.arrays import I64
from exactdata.order.hashing import derive, stream_key
from exactdata.order.weights import SamplerError, SamplerStateError, integer
from exactdata.sampler import EpochSampler

Make = Callable[[int, int], Any]
"""Called with (num_replicas, rank), returns the user's sampler."""

_CHUNK = 4096  # number of indices drawn at a time


def own_sampler(make: Make, knows_ranks: bool, size: int, num_replicas: int, rank: int, seed: int) -> Any:
    """Create the user's sampler, and add the methods that a resumable sampler needs.

    Args:
        make: creates the user's sampler from (num_replicas, rank).
        knows_ranks: whether the sampler yields only the indices of its rank. Otherwise it yields the indices of all
            ranks, and every num_replicas-th index goes to this rank.
        size: number of samples in the dataset.
        num_replicas: number of ranks.
        rank: this rank.
        seed: seed of the global random generators while the sampler is iterated.

    Raises:
        SamplerError: the sampler lacks a required method.
    """
    with Generators(_key(seed, "creation", 0)).in_place():
        own = make(num_replicas, rank)
    name = f"sampler {type(own).__name__}"
    if not hasattr(own, "__iter__"):
        raise SamplerError(f"{name} has no __iter__: it must yield indices into the data")
    if hasattr(own, "set_skip") or hasattr(own, "state_dict_at"):
        if missing := [one for one in _CONTRACT if not hasattr(own, one)]:
            raise SamplerError(f"{name} lacks {', '.join(missing)}: add them, or remove set_skip and state_dict_at")
        if num_replicas > 1 and not knows_ranks:
            raise SamplerError(f"{name} does not take num_replicas and rank: it works on one rank only")
        return own
    try:
        length = len(own)
    except TypeError:
        raise SamplerError(f"{name} has no __len__: it must return the number of indices of an epoch") from None
    if is_stateful(own):
        return StatefulSampler(own, length, knows_ranks, size, num_replicas, rank, seed)
    if not callable(getattr(own, "set_epoch", None)):
        raise SamplerError(
            f"{name} has neither set_epoch(epoch) nor a state: shuffle with the epoch in set_epoch(epoch), or give it "
            "state_dict() and load_state_dict(state); DistributedSampler shuffles as torch's does"
        )
    sampler = SkippingSampler(own, length, knows_ranks, size, num_replicas, rank, seed)
    sampler.make = make
    return sampler


_CONTRACT = ("iter_batches", "set_epoch", "state_dict", "load_state_dict")


def _key(seed: int, purpose: str, epoch: int) -> int:
    return int(derive(stream_key(seed, f"own sampler {purpose}", epoch), np.zeros(1, np.int64))[0])


class _OwnSampler(EpochSampler):
    """Count and check the indices of a user's sampler. Base class of both kinds of adapter."""

    def __init__(
        self, own: Any, length: int, knows_ranks: bool, size: int, num_replicas: int, rank: int, seed: int
    ) -> None:
        super().__init__(num_replicas, rank, seed)
        self.own, self.size = own, size
        self.name = f"sampler {type(own).__name__}"
        self.dealt = not knows_ranks and num_replicas > 1
        self.num_samples = length // num_replicas if self.dealt else length
        self._length = length
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        super().set_epoch(epoch)
        if callable(getattr(self.own, "set_epoch", None)):
            self.own.set_epoch(epoch)

    def _checked(self, drawn: list[Any], before: int) -> list[int]:
        """Return the drawn indices as integers.

        Raises:
            SamplerError: an index is not an integer, or is outside the dataset.
        """
        for at, index in enumerate(drawn):
            if isinstance(index, bool) or not hasattr(index, "__index__"):
                raise self._wrong(index, before + at, "which is no integer")
            if not 0 <= index < self.size:
                raise self._wrong(index, before + at, f"outside of the data, 0 to {self.size - 1}")
        return [index.__index__() for index in drawn]

    def _wrong(self, index: Any, at: int, what: str) -> SamplerError:
        shown = f"{index!r:.60}"
        return SamplerError(f"{self.name} yields {shown} at {at} in epoch {self._epoch}, {what}: fix its __iter__")

    def _check_count(self, drawn: int) -> None:
        """Raise an error unless the epoch had as many indices as the sampler's length, which a resume relies on."""
        if drawn != self._length:
            raise SamplerError(
                f"{self.name} yields {drawn} indices in epoch {self._epoch}, but its __len__ is {self._length}: "
                "return their number"
            )


class SkippingSampler(_OwnSampler):
    """Adapt a sampler without a state, whose order depends only on the epoch."""

    make: Make
    _skip = 0

    def set_skip(self, skip: int) -> None:
        """Skip the first `skip` samples of this rank, in the next iteration only."""
        self._skip = integer("skip", skip, 0)

    def __iter__(self) -> Iterator[int]:
        skip, self._skip = self._skip, 0
        order = self._order()
        if self.dealt:
            groups = zip(*[order] * self.num_replicas, strict=False)  # drops an incomplete group
            order = (group[self.rank] for group in groups)
        return islice(order, skip, None)

    def iter_batches(self, batch_size: int, drop_last: bool) -> Iterator[I64]:
        """Yield the samples of `__iter__` in arrays of shape (batch_size,)."""
        indices = iter(self)
        while batch := list(islice(indices, batch_size)):
            if len(batch) == batch_size or not drop_last:
                yield np.array(batch, dtype=np.int64)

    def _order(self) -> Iterator[int]:
        """Yield the indices of the user's sampler for this epoch."""
        generators = Generators(_key(self.seed, "order", self._epoch))
        with generators.in_place():
            indices = iter(self.own)
        drawn = 0
        while True:
            with generators.in_place():
                chunk = list(islice(indices, _CHUNK))
            if not chunk:
                self._check_count(drawn)
                return
            yield from self._checked(chunk, drawn)
            drawn += len(chunk)

    def indices_at(self, positions: I64, epoch: int) -> I64:
        """Return the indices at positions within an epoch, over all ranks. Too slow for training."""
        wanted = np.asarray(positions)
        ranks = [0] if self.dealt or self.num_replicas == 1 else range(self.num_replicas)
        found = np.empty(len(wanted), np.int64)
        for rank in ranks:
            mine = np.ones(len(wanted), bool) if len(ranks) == 1 else wanted % self.num_replicas == rank
            if mine.any():
                at = wanted[mine] if len(ranks) == 1 else wanted[mine] // self.num_replicas
                order = self._of_rank(rank)._whole(epoch, int(at.max()) + 1)
                found[mine] = order[at]
        return found

    def _of_rank(self, rank: int) -> SkippingSampler:
        if rank == self.rank or self.dealt:
            return self
        other: SkippingSampler = own_sampler(self.make, True, self.size, self.num_replicas, rank, self.seed)
        return other

    def _whole(self, epoch: int, count: int) -> I64:
        before = self._epoch
        self.set_epoch(epoch)
        order = np.fromiter(islice(self._order(), count), np.int64)
        self.set_epoch(before)
        return order

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, and the settings that must be the same in the sampler that loads this state."""
        return {"epoch": self._epoch, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the epoch.

        Raises:
            SamplerStateError: the state has a different sampler, seed, size, length or number of ranks.
        """
        for key, value in self._identity().items():
            if not isinstance(state, Mapping) or state.get(key) != value:
                found = state.get(key) if isinstance(state, Mapping) else state
                raise SamplerStateError(
                    f"{self.name}: the saved state has {key} {found!r:.60}, this sampler has {value!r}: use that of "
                    "the checkpoint"
                )
        try:
            self.set_epoch(state["epoch"])
        except (KeyError, SamplerError) as error:
            raise SamplerStateError(f"{self.name}: the saved state has no epoch: use another checkpoint") from error

    def _identity(self) -> dict[str, Any]:
        return {
            "sampler": type(self.own).__name__,
            "seed": self.seed,
            "num_replicas": self.num_replicas,
            "size": self.size,
            "length": self._length,
        }


class StatefulSampler(_OwnSampler):
    """Adapt a sampler that saves its state, which must include everything that its order depends on."""

    def __iter__(self) -> Iterator[int]:
        generators = Generators(_key(self.seed, "order", self._epoch))
        with generators.in_place():
            indices = iter(self.own)
        return self._mine(indices)

    def _mine(self, indices: Iterator[Any]) -> Iterator[int]:
        # A complete group (one index per rank) is drawn at a time, so that the state is the same on every rank.
        drawn, group = 0, self.num_replicas if self.dealt else 1
        while len(chunk := list(islice(indices, group))) == group:
            yield self._checked(chunk, drawn)[self.rank if self.dealt else 0]
            drawn += group

    @property
    def begins_anew(self) -> bool:
        """Return whether the sampler starts over after its end; see `exactdata.loading.fetch.load_end`."""
        return bool(getattr(self.own, "begins_anew", False))

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "own": self.own.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of the user's sampler.

        Raises:
            SamplerStateError: the state was saved by a different kind of sampler.
        """
        if not isinstance(state, Mapping) or state.keys() != {"epoch", "own"}:
            raise SamplerStateError(f"{self.name}: the saved state is not of a sampler with a state: put it back")
        self.set_epoch(state["epoch"])
        self.own.load_state_dict(state["own"])

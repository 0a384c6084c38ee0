"""Define the interface of a data loader that can resume on any number of ranks and workers.

Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from exactdata.errors import UserError
from exactdata.order.arrays import I64

State = dict[str, Any]


class LoaderError(UserError, ValueError):
    """Arguments of the loader contradict each other."""


class DataEndedError(LoaderError):
    """The sampler has yielded all its samples, and no epoch can follow."""


class LoaderStateError(UserError, ValueError):
    """A saved state does not match this loader."""


@dataclass(frozen=True, eq=False)
class BatchRecord:
    """A record of which samples are in a batch.

    Attributes:
        indices: dataset indices, int64 of shape (samples,). None for an iterable dataset, or if indices are not
            integers.
        positions: global positions, int64 of shape (samples,). The sampler counts them from the start of the run
            (ElasticSampler) or of the epoch (DistributedSampler, MixtureSampler). None if the sampler has no
            `positions` method.
        epoch: the epoch of the batch, from 0.
    """

    indices: I64 | None
    positions: I64 | None
    epoch: int


@runtime_checkable
class RestartableDataLoader(Protocol):
    """Interface of an iterable over batches whose position can be saved and restored.

    When a checkpoint is saved, the states of all ranks are aggregated into a single state, which is stored in the train
    state. At a resume, each rank extracts its part, even if the number of ranks has changed. `StatefulDataLoader`
    implements this interface. Any iterable with these methods works.
    """

    def __iter__(self) -> Iterator[Any]: ...

    def state_dict(self) -> State:
        """Return this rank's state after the last yielded batch. Prefetched batches are not included."""
        ...

    def load_state_dict(self, state: State) -> None:
        """Resume from this rank's `state` at the next `iter()`.

        Raises:
            LoaderStateError: the state does not match this loader.
        """
        ...

    def aggregate_state_dict(self, states: Sequence[State]) -> State:
        """Combine the states of all ranks, ordered by rank, into one."""
        ...

    def deaggregate_state_dict(self, aggregated: State, rank: int, world_size: int) -> State:
        """Extract the state that `rank` of `world_size` ranks resumes from.

        Raises:
            LoaderStateError: the state cannot be split over this number of ranks.
        """
        ...


_rank, _world_size = 0, 1


def set_ranks(rank: int, world_size: int) -> None:
    """Set the return values of `ranks` and `shard` in this process. The loader calls it in every worker, too."""
    global _rank, _world_size
    _rank, _world_size = rank, world_size


def ranks() -> tuple[int, int]:
    """Return (rank, world size) of the loader that reads this dataset. Also works in its worker processes."""
    return _rank, _world_size


class Acting:
    """Context in which a dataset is read as a given shard, which may be an unfinished shard from before a resume.

    Attributes:
        shard: (index, number of shards) that `shard` returns.
        epoch: the loader's epoch.
        asked: whether `shard` was called in this context.
    """

    def __init__(self, shard: tuple[int, int], epoch: int) -> None:
        self.shard = shard
        self.epoch = epoch
        self.asked = False

    def __enter__(self) -> Acting:
        _acting.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _acting.pop()


_acting: list[Acting] = []


def shard() -> tuple[int, int]:
    """Return (index of this shard, number of shards), counted over all ranks and their workers.

    Split an iterable dataset without overlap by yielding every `number`-th item, starting at item `index`. With `W`
    workers per rank, worker `w` of rank `r` reads shard `r * W + w`. Without worker processes, each rank is one shard.

    Example:
        ```python
        from torch.utils.data import IterableDataset

        from exactdata import StatefulDataLoader, shard

        class Numbers(IterableDataset):
            def __iter__(self):
                index, number = shard()
                yield from range(index, 12, number)

        print([batch.tolist() for batch in StatefulDataLoader(Numbers(), batch_size=3, num_workers=2)])
        ```
    """
    from torch.utils.data import get_worker_info

    if _acting:
        _acting[-1].asked = True
        return _acting[-1].shard
    info = get_worker_info()
    worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
    return _rank * workers + worker, _world_size * workers


def epoch() -> int | None:
    """Return the epoch, from 0, of the loader that reads this iterable dataset, or None without a loader.

    Also works in worker processes. Use it instead of counting epochs in the dataset, because workers may end after each
    epoch.
    """
    return _acting[-1].epoch if _acting else None

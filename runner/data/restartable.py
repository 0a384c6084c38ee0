"""What a loader must offer so that a run can be taken up again, by however many ranks and workers.

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from runner.errors import UserError

State = dict[str, Any]


class LoaderError(UserError, ValueError):
    """Arguments that the loader cannot serve rightly."""


class LoaderStateError(UserError, ValueError):
    """A saved data state does not fit this loader."""


@runtime_checkable
class RestartableDataLoader(Protocol):
    """An iterable over batches whose place can be saved and found again.

    The state of all ranks is aggregated into the one that the train state holds, and taken apart again
    for the ranks that there are at the resume. `StatefulDataLoader` is one; so is any iterable of yours
    with these methods.
    """

    def __iter__(self) -> Iterator[Any]: ...

    def state_dict(self) -> State:
        """The place of this rank: what was yielded, not what was fetched ahead."""
        ...

    def load_state_dict(self, state: State) -> None:
        """Go on from a state of this rank; LoaderStateError if it does not fit."""
        ...

    def aggregate_state_dict(self, states: Sequence[State]) -> State:
        """One state out of those of all ranks, in the order of their ranks."""
        ...

    def deaggregate_state_dict(self, aggregated: State, rank: int, world_size: int) -> State:
        """The state that `rank` of now `world_size` ranks loads; LoaderStateError if it cannot be had."""
        ...


_rank, _world_size = 0, 1


def set_ranks(rank: int, world_size: int) -> None:
    """Tell this process which rank its loader belongs to; the loader calls it in every worker."""
    global _rank, _world_size
    _rank, _world_size = rank, world_size


def ranks() -> tuple[int, int]:
    """(rank, world size) of the loader that reads this dataset, also in its worker processes."""
    return _rank, _world_size


def shard() -> tuple[int, int]:
    """(number of this shard, number of shards) over all ranks and their workers.

    An iterable dataset that takes every `shards`-th item from the `shard`-th on is split without
    overlap over both. Worker `w` of `W` of rank `r` is shard `r * W + w`. Outside a worker process
    a rank is one shard.
    """
    from torch.utils.data import get_worker_info

    info = get_worker_info()
    worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
    return _rank * workers + worker, _world_size * workers


def current_ranks() -> tuple[int, int]:
    """(rank, world size) of torch.distributed, (0, 1) where it is not in use."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def require(state: State, keys: Sequence[str], loader: str) -> None:
    """Raise LoaderStateError, naming what is missing and which loader wrote it, unless all keys are there."""
    if not isinstance(state, dict):
        raise LoaderStateError(f"{loader} cannot load a {type(state).__name__}; give what its state_dict() returned")
    missing = [key for key in keys if key not in state]
    if missing:
        writer = state.get("loader") or _guess_writer(state)
        raise LoaderStateError(
            f"{loader} cannot load this state: {', '.join(map(repr, missing))} missing; it was written by "
            f"{writer} and has {sorted(map(str, state))}; load it into that loader or start the data anew"
        )


def _guess_writer(state: State) -> str:
    if "_snapshot" in state or "_num_yielded" in state:
        return "torchdata's StatefulDataLoader"
    return "an unknown loader"

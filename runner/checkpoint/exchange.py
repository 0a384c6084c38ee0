"""Small objects between ranks, in such a way that all ranks come to the same end.

An error on one rank must not leave the others waiting: every step that can fail is told to all.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from runner.checkpoint.state import rank_and_world
from runner.errors import CheckpointError, SupersededError, UserError

T = TypeVar("T")


class Exchange:
    """Collectives over a gloo group of its own, so that a background thread may use it while training
    uses the default group. One thread at a time."""

    def __init__(self, timeout_s: float = 1800.0) -> None:
        self.rank, self.world = rank_and_world()
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)) if self.world > 1 else None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def broadcast(self, value: T) -> T:
        """Rank 0's value, everywhere."""
        if self._group is None:
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]  # type: ignore[no-any-return]

    def gather(self, value: T) -> list[T]:
        """The values of all ranks in order of rank; complete on rank 0 only, elsewhere just the own one."""
        if self._group is None:
            return [value]
        box: list[Any] | None = [None] * self.world if self.is_main else None
        dist.gather_object(value, box, dst=0, group=self._group)
        return box if box is not None else [value]

    def together(self, action: Callable[[], T], only_main: bool = False) -> T:
        """Run `action` on every rank (or on rank 0, whose result all get); one failure fails them all.

        Raises:
            UserError, OSError: what the lowest failing rank raised; other errors as a CheckpointError.
        """
        result, error = None, None
        if self.is_main or not only_main:
            try:
                result = action()
            except Exception as failure:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
                error = failure
        if self._group is None:
            if error is not None:
                raise error
            return result  # type: ignore[return-value]
        failures = self.gather(_portable(error, self.rank))
        first = self.broadcast(next((failure for failure in failures if failure is not None), None))
        if first is not None:
            raise first from error
        return self.broadcast(result) if only_main else result  # type: ignore[return-value]


def _portable(error: Exception | None, rank: int) -> Exception | None:
    """An error that survives the journey to another rank, saying where it happened."""
    if error is None:
        return None
    if isinstance(error, OSError) and error.errno is not None:
        return OSError(error.errno, f"{error.strerror} (rank {rank})", error.filename and str(error.filename))
    if isinstance(error, SupersededError):
        return SupersededError(str(error))
    if isinstance(error, UserError):
        return CheckpointError(str(error))
    return CheckpointError(f"rank {rank}: {type(error).__name__}: {error}")

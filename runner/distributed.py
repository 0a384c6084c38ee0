"""Rank, world and the few collectives the runner needs.

`World.from_environment` reads what torchrun sets (the Slurm launcher sets the same from the SLURM
variables) and imports no torch. With one process every collective is the identity and nothing is
initialised. Control traffic goes over gloo on the CPU, gradients over nccl where there are GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from runner.errors import UserError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

# A rank that died is noticed at once, by its closed connection; this is for one that hangs. Rank 0 may
# take long over a slow disk or a scheduler that does not answer, while the others wait for it.
TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class World:
    """This process's place among the ranks of the run."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @staticmethod
    def from_environment() -> World:
        """RANK, WORLD_SIZE and LOCAL_RANK as torchrun sets them; one process where they are not set.

        Raises:
            UserError: the variables are not numbers or do not fit each other.
        """
        try:
            rank, size, local_rank = (
                int(os.environ.get(name, default))
                for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))
            )
        except ValueError as error:
            raise UserError(f"RANK, WORLD_SIZE and LOCAL_RANK must be whole numbers: {error}") from None
        if not 0 <= rank < size:
            raise UserError(f"RANK={rank} must be between 0 and WORLD_SIZE - 1 = {size - 1}")
        if size > 1:
            # DDP's advice to find no unused parameters, which `runner.parallel` gives a reason not to follow,
            # comes from C++ and can only be silenced before torch is imported.
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        return World(rank, size, local_rank)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the only one that writes the run directory."""
        return self.rank == 0

    def start(self, device: torch.device) -> None:
        """Join the process group (nothing to do with one process)."""
        if self.size == 1:
            return
        import torch.distributed as dist

        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, rank=self.rank, world_size=self.size, timeout=TIMEOUT)

    def stop(self) -> None:
        """Leave the process group."""
        if self.size > 1:
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group()

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of a CPU tensor over all ranks, in place."""
        if self.size > 1:
            import torch.distributed as dist

            dist.all_reduce(tensor)
        return tensor

    def broadcast(self, value: T) -> T:
        """Rank 0's value (anything picklable; only ever sent between the ranks of one job)."""
        if self.size == 1:
            return value
        import torch.distributed as dist

        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]  # type: ignore[no-any-return]

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in the order of the ranks, on every rank."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def on_main(self, function: Callable[[], T]) -> T:
        """Run `function` on rank 0 alone; its result, or its exception, on every rank."""
        result: T | None = None
        error: Exception | None = None
        if self.is_main:
            try:
                result = function()
            except Exception as caught:  # noqa: BLE001 raised again below, on every rank
                error = caught
        if self.size > 1:
            result, error = self.broadcast((result, error))
        if error is not None:
            if isinstance(error, UserError):
                error.everywhere = True
            raise error
        return result  # type: ignore[return-value]

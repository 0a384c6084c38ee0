"""Held-out loss during training: the same batches each time, without touching random generators or data order.

The value depends on the weights, the held-out samples and `eval.batch_size`, and not on the ranks: batch i always holds
the same samples, one rank computes it whole, and the sums of the batches are added in the order of the batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from runner.checkpoint import get_rng_state, set_rng_state
from runner.system.distributed import World
from runner.training.step import Forward


@dataclass(frozen=True)
class HeldOut:
    """Which held-out samples an evaluation takes, and which rank computes them.

    Attributes:
        samples: the size of the held-out data, 1 or more.
        batch_size: samples per batch; the last batch may have fewer.
        limit: batches at most.
    """

    samples: int
    batch_size: int
    limit: int

    @property
    def batches(self) -> int:
        return min(-(-self.samples // self.batch_size), self.limit)

    def indices(self, batch: int) -> list[int]:
        """The samples of a batch."""
        start = batch * self.batch_size
        return list(range(start, min(start + self.batch_size, self.samples)))

    def turns(self, world: World) -> range:
        """The numbers of the batches that this rank passes through the model, one in each turn, as many on every rank.

        FSDP's ranks need each other in every forward pass. A rank whose number in the last turn is `batches` or more
        repeats one of the first batches, and the result does not count.
        """
        return range(world.rank, -(-self.batches // world.size) * world.size, world.size)


@dataclass(frozen=True)
class RankBatches:
    """The samples of this rank's turns, for a DataLoader."""

    held_out: HeldOut
    world: World

    def __iter__(self) -> Iterator[list[int]]:
        return (self.held_out.indices(turn % self.held_out.batches) for turn in self.held_out.turns(self.world))


@dataclass
class Evaluation:
    """The mean loss over the held-out samples, every `every_steps` steps.

    Attributes:
        loader: this rank's batches of `held_out.turns`, in their order; iterated anew for every evaluation.
    """

    forward: Forward
    loader: Iterable[Any]
    held_out: HeldOut
    every_steps: int

    def due(self, step: int) -> bool:
        """Whether to evaluate after `step` complete steps."""
        return self.every_steps > 0 and step > 0 and step % self.every_steps == 0

    def run(self, stop: Callable[[], bool]) -> float | None:
        """The mean loss over all ranks; None if `stop()`, agreed across ranks and asked before each turn, is true."""
        rng = get_rng_state()
        self.forward.model.eval()
        sums = torch.zeros(self.held_out.batches, 2, dtype=torch.float64)  # of each batch: losses, samples
        stopped = False
        with torch.no_grad():
            for number, batch in zip(self.held_out.turns(self.forward.world), self.loader, strict=True):
                stopped = stop()
                if stopped:
                    break
                losses = self.forward(batch)
                if number < len(sums):
                    sums[number] = torch.tensor([losses.double().sum().item(), losses.numel()], dtype=torch.float64)
        self.forward.model.train()
        set_rng_state(rng)
        if stopped:
            return None
        # Each entry comes from one rank and is 0 on the others, so that their sum is exact.
        total, samples = (sum(column) for column in self.forward.world.sum(sums).T.tolist())
        return float(total / samples)

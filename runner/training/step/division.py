"""How the ranks share a training step: which micro-batches each computes, and how what they computed is added up.

In the usual way every rank computes as many micro-batches, and sums go over the ranks. See
`runner.training.step.invariant` for the one whose results do not depend on the number of ranks.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import nn

from runner.system.distributed import World
from runner.training.model.optimizers import Optimizers
from runner.training.ranks.parallel import Computation, SharedBuffers, accumulating, average_gradients, synchronized


class Division:
    """One rank's part in the steps; every rank calls the same methods in the same order.

    Here every rank computes `accum` micro-batches: with DDP, FSDP, or all-reduce where a task takes the step.

    Args:
        whole_steps: whether the task takes them: then nothing is reduced by itself.

    Attributes:
        count: micro-batches of this rank in a step.
        parts: by which the mean loss of a micro-batch is divided before its gradients are added up.
        total: micro-batches of all ranks in a step.
        in_loop: why calls that involve all ranks must not be made while micro-batches are iterated; None: they may.
    """

    in_loop: str | None = None

    def __init__(self, world: World, model: nn.Module, optimizers: Optimizers, accum: int, whole_steps: bool) -> None:
        self._world = world
        self._optimizers = optimizers
        self._whole_steps = whole_steps
        self._buffers = SharedBuffers(world, model)
        self._computation: nn.Module | None = None
        self.count = self.parts = accum
        self.total = accum * world.size

    def wrap(self, computation: Computation, device: torch.device) -> nn.Module:
        """What computes a micro-batch's loss in the default step.

        Raises:
            RuntimeError: the ranks cannot compare their parameters (see `peer_errors`).
        """
        self._computation = synchronized(computation, self._world, device)
        return self._computation

    def begin(self, index: int) -> None:
        """The step that begins when `index` steps are complete."""

    def iteration(self) -> AbstractContextManager[None]:
        """Around an iteration over this rank's micro-batches; a task that takes the step may iterate again."""
        return nullcontext()

    def micro_batch(self, number: int) -> AbstractContextManager[None]:
        """Around what is computed from this rank's micro-batch `number`, from 0, gradients included."""
        return accumulating(self._computation, last=number == self.count - 1)

    def sum(self, rows: np.ndarray, outside: np.ndarray) -> np.ndarray:
        """The sum of all rows of all ranks.

        Args:
            rows: one per micro-batch of this rank, float64 (count, width); of the same width on every rank.
            outside: what belongs to no micro-batch, from `everywhere`; float64 (width,).
        """
        return self._world.sum(torch.from_numpy(rows.sum(0) + outside)).numpy()

    def everywhere(self, values: np.ndarray, single: np.ndarray) -> np.ndarray:
        """What this rank has to add up of values that were logged outside of micro-batches.

        Args:
            values: those that are one per sample of this rank; float64 (N,).
            single: those that are one number; float64 (M,).
        """
        return np.concatenate([values, single])

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """The mean over the first dimension and all ranks, in float64; of shape `values.shape[1:]`."""
        sums = torch.cat([values.double().sum(0).reshape(-1).cpu(), torch.tensor([len(values)])])
        sums = self._world.sum(sums)
        return (sums[:-1] / sums[-1]).view(values.shape[1:])

    def check(self, name: str) -> None:
        """Before an optimizer's update exchanges anything.

        Raises:
            UserError: the step depends on ranks in a way that it must not.
        """

    def reduce_gradients(self, name: str) -> None:
        """Give the parameters of an optimizer their gradients of the whole step."""
        if self._whole_steps:
            average_gradients(self._optimizers.parameters(name), self._world)

    def holds_gradients(self) -> bool:
        """Whether any rank has gradients of an update to come that are not its parameters' yet; on every rank."""
        return False

    def end(self) -> None:
        """The step's updates are made."""
        self._buffers.synchronize()

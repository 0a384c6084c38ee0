"""Divide a training step among the ranks: the micro-batches of each rank, and the sums over all ranks.

Usually every rank computes the same number of micro-batches, and sums go over the ranks. See
`runner.training.step.invariant` for steps whose results do not depend on the number of ranks.
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
    """One rank's part in the steps. Every rank calls the same methods in the same order.

    Here, every rank computes `accum` micro-batches: with DDP, FSDP, or all-reduce if a task takes the step.

    Args:
        whole_steps: True if the task takes whole steps. Then the backward pass reduces nothing.

    Attributes:
        count: number of this rank's micro-batches in a step.
        parts: divisor of a micro-batch's mean loss, before its gradients are added up.
        total: number of all ranks' micro-batches in a step.
        in_loop: why calls that involve all ranks must not be made while micro-batches are iterated; None if they may.
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
        """Return the module that computes a micro-batch's loss in the default step.

        Raises:
            RuntimeError: the ranks cannot compare their parameters (see `peer_errors`).
        """
        self._computation = synchronized(computation, self._world, device)
        return self._computation

    def begin(self, index: int) -> None:
        """Begin the step after `index` complete steps."""

    def iteration(self) -> AbstractContextManager[None]:
        """Enclose an iteration over this rank's micro-batches. A task that takes the step may iterate again."""
        return nullcontext()

    def micro_batch(self, number: int) -> AbstractContextManager[None]:
        """Enclose the computation from this rank's micro-batch `number` (from 0), gradients included."""
        return accumulating(self._computation, last=number == self.count - 1)

    def sum(self, rows: np.ndarray, outside: np.ndarray) -> np.ndarray:
        """Return the sum of all rows of all ranks.

        Args:
            rows: one row per micro-batch of this rank, float64 (count, width); the same width on every rank.
            outside: values that belong to no micro-batch, from `everywhere`; float64 (width,).
        """
        return self._world.sum(torch.from_numpy(rows.sum(0) + outside)).numpy()

    def everywhere(self, values: np.ndarray, single: np.ndarray) -> np.ndarray:
        """Return this rank's addends among values that were logged outside of micro-batches.

        Args:
            values: values with one number per sample of this rank; float64 (N,).
            single: values that are a single number; float64 (M,).
        """
        return np.concatenate([values, single])

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return the mean over the first dimension and all ranks, in float64, of shape `values.shape[1:]`."""
        sums = torch.cat([values.double().sum(0).reshape(-1).cpu(), torch.tensor([len(values)])])
        sums = self._world.sum(sums)
        return (sums[:-1] / sums[-1]).view(values.shape[1:])

    def check(self, name: str) -> None:
        """Check the step before an optimizer's update exchanges anything.

        Raises:
            UserError: the step depends on the ranks in a way that is not allowed.
        """

    def reduce_gradients(self, name: str) -> None:
        """Reduce the gradients of an optimizer's parameters to the gradients of the whole step."""
        if self._whole_steps:
            average_gradients(self._optimizers.parameters(name), self._world)

    def holds_gradients(self) -> bool:
        """Check whether any rank has gradients of a later update outside of its parameters; on every rank."""
        return False

    def end(self) -> None:
        """End the step, after its updates."""
        self._buffers.synchronize()

"""Divide a training step among the ranks: assign micro-batches to ranks, and sum over all ranks.

Usually, every rank computes the same number of micro-batches, and results are summed over the ranks. See
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
    """A rank's share of each step. Every rank must call the same methods in the same order.

    In this class, every rank computes `accum` micro-batches. It uses DDP or FSDP, or an all-reduce if the task defines
    `take_step`.

    Args:
        whole_steps: True if the task defines complete steps (`take_step`). Then the backward pass does not reduce
            gradients.

    Attributes:
        count: number of micro-batches per step on this rank.
        parts: number by which a micro-batch's mean loss is divided before its gradients are summed.
        total: number of micro-batches per step over all ranks.
        in_loop: reason why calls that involve all ranks are forbidden while micro-batches are iterated, or None if they
            are allowed.
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
        """Wrap `computation` into the module that computes a micro-batch's loss in the default step.

        Raises:
            RuntimeError: the ranks cannot compare their parameters (see `peer_errors`).
        """
        self._computation = synchronized(computation, self._world, device)
        return self._computation

    def begin(self, index: int) -> None:
        """Begin the step that follows `index` completed steps."""

    def iteration(self) -> AbstractContextManager[None]:
        """Return a context for iterating over this rank's micro-batches. A task's `take_step` may iterate again."""
        return nullcontext()

    def micro_batch(self, number: int) -> AbstractContextManager[None]:
        """Return a context for the forward and backward passes of this rank's micro-batch `number` (from 0)."""
        return accumulating(self._computation, last=number == self.count - 1)

    def sum(self, rows: np.ndarray, outside: np.ndarray) -> np.ndarray:
        """Return the sum of all rows of all ranks.

        Args:
            rows: one row per micro-batch of this rank, float64 (count, width). All ranks have the same width.
            outside: values from outside of micro-batches, returned by `everywhere`, float64 (width,).
        """
        return self._world.sum(torch.from_numpy(rows.sum(0) + outside)).numpy()

    def everywhere(self, values: np.ndarray, single: np.ndarray) -> np.ndarray:
        """Return the values logged outside of micro-batches that this rank adds to the sum.

        Args:
            values: values with one number per sample on this rank, float64 (N,).
            single: values that are single numbers, float64 (M,).
        """
        return np.concatenate([values, single])

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return the mean over the first dimension and all ranks, in float64, of shape `values.shape[1:]`."""
        sums = torch.cat([values.double().sum(0).reshape(-1).cpu(), torch.tensor([len(values)])])
        sums = self._world.sum(sums)
        return (sums[:-1] / sums[-1]).view(values.shape[1:])

    def check(self, name: str) -> None:
        """Check the step before an optimizer's update communicates with other ranks.

        Raises:
            UserError: the step depends on the ranks in a way that is not allowed.
        """

    def reduce_gradients(self, name: str) -> None:
        """Reduce the gradients of an optimizer's parameters over all micro-batches and ranks."""
        if self._whole_steps:
            average_gradients(self._optimizers.parameters(name), self._world)

    def holds_gradients(self) -> bool:
        """Check whether any rank holds gradients for a later update outside of its parameters. All ranks call this."""
        return False

    def end(self) -> None:
        """End the step. Call this after the step's updates."""
        self._buffers.synchronize()

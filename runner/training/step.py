"""The computation of one training step: micro-batches forward and backward, clipping, optimizer, learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from runner.system.distributed import World
from runner.training.counting import Count, count_over_ranks, samples_in, tokens_in
from runner.training.parallel import accumulating, total_norm
from runner.training.peers import peer_errors

Batch = Any
Loss = Callable[[nn.Module, Batch], torch.Tensor]


@dataclass
class Forward:
    """Model and loss: a batch -> one loss per sample, on `device` and in the precision of `autocast`."""

    world: World
    device: torch.device
    model: nn.Module
    loss: Loss
    autocast: Callable[[], AbstractContextManager[Any]]

    def __call__(self, batch: Batch) -> torch.Tensor:
        """The losses, shape (samples,).

        Raises:
            PeerError: another rank has ended or does not answer.
        """
        batch = to_device(batch, self.device)
        with peer_errors(self.world), self.autocast():
            return self.loss(self.model, batch)


@dataclass(frozen=True)
class StepResult:
    """One step over all ranks.

    Attributes:
        loss: mean over the global batch, before the update.
        loss_by_source: the same by source; empty unless there are several.
        grad_norm: 2-norm of all gradients, before clipping.
        lr: learning rate of the update, of the first parameter group.
        samples: samples of the global batch.
        tokens: tokens of the global batch; None if the data have none.
    """

    loss: float
    loss_by_source: dict[str, float]
    grad_norm: float
    lr: float
    samples: int
    tokens: int | None

    @property
    def finite(self) -> bool:
        """Whether the update was applied: loss and gradient norm are numbers."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass
class TrainStep:
    """Computes steps. `sources` are the names behind `dataset_idx` in a batch; `accum` micro-batches make a step."""

    forward: Forward
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LambdaLR
    sources: Sequence[str]
    accum: int = 1
    clip_norm: float | None = None
    stated_tokens: Sequence[int] = ()  # see `runner.training.counting`

    def __call__(self, next_batch: Callable[[], Batch]) -> StepResult:
        """Draw the step's micro-batches and update the model, unless loss or gradients are not finite.

        Raises:
            PeerError: another rank has ended or does not answer.
        """
        losses, sources, counts = self._accumulate(next_batch)
        loss, by_source = self._reduce(losses, sources)
        samples, tokens = count_over_ranks(self.forward.world, counts)
        lr = float(self.scheduler.get_last_lr()[0])
        with peer_errors(self.forward.world):
            norm = total_norm(self.forward.model)
            result = StepResult(loss, by_source, norm.item(), lr, samples, tokens)
            if result.finite:
                if self.clip_norm is not None:
                    parameters = self.forward.model.parameters()
                    torch.nn.utils.clip_grads_with_norm_(parameters, self.clip_norm, norm)
                self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.scheduler.step()
        return result

    def _accumulate(self, next_batch: Callable[[], Batch]) -> tuple[list[torch.Tensor], list[Any], list[Count]]:
        """Forward and backward over the micro-batches: per-sample losses, their sources, their counts."""
        losses: list[torch.Tensor] = []
        sources: list[Any] = []
        counts: list[Count] = []
        model = self.forward.model.train()
        for micro in range(self.accum):
            batch = next_batch()
            counts.append((samples_in(batch), tokens_in(batch, self.stated_tokens)))
            sources.append(batch.get("dataset_idx") if isinstance(batch, dict) else None)
            with accumulating(model, last=micro == self.accum - 1):
                per_sample = self.forward(batch)
                with peer_errors(self.forward.world):
                    torch.autograd.backward(per_sample.mean() / self.accum)
            losses.append(per_sample.detach())
        return losses, sources, counts

    def _reduce(self, losses: list[torch.Tensor], sources: list[Any]) -> tuple[float, dict[str, float]]:
        """Mean loss over the global batch, and by source if there are several."""
        values = torch.cat([loss.reshape(-1) for loss in losses]).double().cpu().numpy()
        n = max(len(self.sources), 1)
        if n > 1 and all(source is not None for source in sources):
            where = torch.cat(sources).numpy()
        else:
            n, where = 1, np.zeros(len(values), dtype=np.int64)
        sums = np.stack([np.bincount(where, values, n), np.bincount(where, minlength=n)])
        total, count = self.forward.world.sum(torch.from_numpy(sums)).numpy()
        by_source = {name: float(total[i] / count[i]) for i, name in enumerate(self.sources) if n > 1 and count[i]}
        return float(total.sum() / count.sum()), by_source


def to_device(batch: Batch, device: torch.device) -> Batch:
    """`batch` with its tensors on `device` (copied asynchronously from pinned memory)."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device) for value in batch)
    return batch

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
from runner.training.average import Average
from runner.training.optimizers import Optimizers
from runner.training.parallel import SharedBuffers, accumulating
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
        tokens: tokens of the global batch.
    """

    loss: float
    loss_by_source: dict[str, float]
    grad_norm: float
    lr: float
    tokens: int

    @property
    def finite(self) -> bool:
        """Whether the update was applied: loss and gradient norm are numbers."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass
class TrainStep:
    """Computes steps. `sources` are the names behind `dataset_idx` in a batch; `accum` micro-batches make a step."""

    forward: Forward
    optimizers: Optimizers
    sources: Sequence[str]
    accum: int = 1
    clip_norm: float | None = None
    average: Average | None = None

    def __post_init__(self) -> None:
        self._buffers = SharedBuffers(self.forward.world, self.forward.model)

    def __call__(self, next_batch: Callable[[], Batch]) -> StepResult:
        """Draw the step's micro-batches and update the model, unless loss or gradients are not finite.

        Raises:
            PeerError: another rank has ended or does not answer.
        """
        losses, sources, tokens = self._accumulate(next_batch)
        loss, by_source = self._reduce(losses, sources)
        lr, allowed = self.optimizers.lr(), math.isfinite(loss)
        with peer_errors(self.forward.world):
            names = self.optimizers.names
            norm = math.hypot(*(self.optimizers.apply(name, self.clip_norm, allowed=allowed)[0] for name in names))
            self._buffers.synchronize()
            if self.average is not None:
                self.average.update(self.forward.model)
        self.optimizers.schedulers.step()
        return StepResult(loss, by_source, norm, lr, tokens * self.forward.world.size)

    def _accumulate(self, next_batch: Callable[[], Batch]) -> tuple[list[torch.Tensor], list[Any], int]:
        """Forward and backward over the micro-batches: per-sample losses, their sources, tokens."""
        losses: list[torch.Tensor] = []
        sources: list[Any] = []
        tokens = 0
        model = self.forward.model.train()
        for micro in range(self.accum):
            batch = next_batch()
            tokens += tokens_in(batch)
            sources.append(batch.get("dataset_idx") if isinstance(batch, dict) else None)
            with accumulating(model, last=micro == self.accum - 1):
                per_sample = self.forward(batch)
                with peer_errors(self.forward.world):
                    torch.autograd.backward(self.optimizers.scale(per_sample.mean() / self.accum))
            losses.append(per_sample.detach())
        return losses, sources, tokens

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


def tokens_in(batch: Batch) -> int:
    """Tokens in a batch: its labels if it has any, else its samples."""
    if isinstance(batch, dict):
        labels = batch.get("labels")
        if isinstance(labels, torch.Tensor):
            return labels.numel()
        batch = next(iter(batch.values()))
    elif isinstance(batch, (list, tuple)):
        batch = batch[0]
    return len(batch)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """`batch` with its tensors on `device` (copied asynchronously from pinned memory)."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device) for value in batch)
    return batch

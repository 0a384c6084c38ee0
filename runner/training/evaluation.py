"""Held-out loss during training: the same batches each time, without touching random generators or data order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from runner.checkpoint import get_rng_state, set_rng_state
from runner.training.step import Forward


@dataclass
class Evaluation:
    """The mean loss over the first `batches` batches of `loader` on each rank, every `every_steps` steps."""

    forward: Forward
    loader: Any
    batches: int
    every_steps: int

    def due(self, step: int) -> bool:
        """Whether to evaluate after `step` complete steps."""
        return self.every_steps > 0 and step > 0 and step % self.every_steps == 0

    def run(self, stop: Callable[[], bool]) -> float | None:
        """The mean loss over all ranks; None if `stop()`, agreed across ranks and asked before each batch, is true."""
        rng = get_rng_state()
        self.forward.model.eval()
        sums = torch.zeros(2, dtype=torch.float64)
        stopped = False
        with torch.no_grad():
            for index, batch in enumerate(self.loader):
                if index == self.batches:
                    break
                stopped = stop()
                if stopped:
                    break
                losses = self.forward(batch)
                sums += torch.tensor([losses.double().sum().item(), losses.numel()], dtype=torch.float64)
        self.forward.world.sum(sums)
        self.forward.model.train()
        set_rng_state(rng)
        return None if stopped else (sums[0] / sums[1]).item()

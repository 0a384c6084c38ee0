"""STAND-IN, to be replaced by the branch that owns it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from runner.training.parallel import total_norm


class Optimizers:
    scales = False

    def __init__(self, optimizer: Any, scheduler: Any) -> None:
        self.optimizer, self.schedulers = optimizer, scheduler

    def only(self) -> str:
        return "optimizer"

    def parameters(self, name: str) -> Sequence[torch.Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss

    def apply(self, name: str, clip_norm: float | None, finite: bool = True) -> tuple[float, bool]:
        norm = total_norm(self.parameters(name))
        value = norm.item()
        applied = finite and math.isfinite(value)
        if applied:
            if clip_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(self.parameters(name), clip_norm, norm)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return value, applied

    def advance(self) -> dict[str, float]:
        lrs = {"optimizer": float(self.schedulers.get_last_lr()[0])}
        self.schedulers.step()
        return lrs

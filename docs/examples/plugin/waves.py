"""A dataset, a model and a loss of one's own. Nothing here knows of the runner."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class Waves(Dataset[dict[str, Tensor]]):
    """Points x and the value y of a wave there; any map-style dataset will do.

    Args:
        size: number of samples.
        frequency: of the wave.
        start: the first point; held-out points lie between those of training.
    """

    def __init__(self, size: int, frequency: float = 1.0, start: float = 0.0) -> None:
        self.x = start + torch.arange(size) / size * 2 * math.pi
        self.y = torch.sin(frequency * self.x)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index].view(1), "y": self.y[index].view(1)}


class Perceptron(nn.Module):
    """(B, 1) -> (B, 1)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def squared_error(model: nn.Module, batch: Mapping[str, Tensor], scale: float = 1.0) -> Tensor:
    """One loss for each sample, shape (B,): that is all the runner asks of a loss."""
    return scale * (model(batch["x"]) - batch["y"]).square().flatten(1).mean(1)

"""A dataset, a model and a loss. Nothing here imports the runner."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class Waves(Dataset[dict[str, Tensor]]):
    """Points x on a sine wave and its values y there. Any map-style dataset works.

    Args:
        size: number of samples.
        frequency: number of periods in the range of x, 0 to 2 pi.
        start: the first point; a small offset gives held-out points between those of training.
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
    """Return one loss per sample, shape (B,), which is all that the runner requires of a loss."""
    return scale * (model(batch["x"]) - batch["y"]).square().flatten(1).mean(1)

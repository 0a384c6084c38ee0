"""Fit points of which most are close together, with a sampler that compensates for it."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import Sampler


class Points:
    """Noisy values of sin(8 x) for x from 0 to 1: with `crowding` above 1 most x are near 0, with 1 evenly spread."""

    def __init__(self, count: int, crowding: float, noise: float) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.rand(count, 1, generator=generator) ** crowding
        self.y = torch.sin(8 * self.x) + noise * torch.randn(count, 1, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "y": self.y[index]}


class Balanced(Sampler[int]):
    """Draw from each of several equal ranges of x equally often, however many points it has."""

    def __init__(self, points: Points, ranges: int) -> None:
        within = (points.x[:, 0] * ranges).long().clamp(max=ranges - 1)
        self.weights = 1 / within.bincount(minlength=ranges)[within]
        self.generator = torch.Generator()

    def set_epoch(self, epoch: int) -> None:
        self.generator.manual_seed(epoch)

    def __len__(self) -> int:
        return len(self.weights)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.multinomial(self.weights, len(self), replacement=True, generator=self.generator).tolist())


def squared_error(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the squared error of each point (B,)."""
    return mse_loss(model(batch["x"]), batch["y"], reduction="none")[:, 0]

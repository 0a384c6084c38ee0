"""The smallest training for a run: a few points, a linear model, dropout."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import nn

from runner.system import clock

SIZE = 7
FETCH_S = 0.15


class Points:
    """Points (x, y, z) from which a linear model predicts z.

    Args:
        number: selects the points.
        fetch_s: seconds to fetch a batch.
    """

    collated = True

    def __init__(self, number: int = 0, fetch_s: float = FETCH_S) -> None:
        self._points = _points(number)
        self._fetch_s = fetch_s

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"points": self._points[index]}

    def __getitems__(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return a batch of shape (B, 3)."""
        if self._fetch_s:
            clock.sleep(self._fetch_s)
        return {"points": self._points[list(indices)]}


@cache
def _points(number: int) -> torch.Tensor:
    return torch.randn(SIZE, 3, generator=torch.Generator().manual_seed(number))


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the squared error of each point, (B,). Drop a coordinate at random."""
    points = batch["points"]
    known = nn.functional.dropout(points[:, :2], 0.3, model.training)
    foretold: torch.Tensor = model(known)
    return (foretold.squeeze(1) - points[:, 2]).square()

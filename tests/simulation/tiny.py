"""The smallest thing that a run can train: a few points, a line through them, dropout."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import nn

from runner.system import clock

SIZE = 7
FETCH_S = 0.15


class Points:
    """Points (x, y, z), of which a line is to foretell z.

    Args:
        number: which ones.
        fetch_s: how long it takes to fetch a batch, in seconds.
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
        """A batch, of shape (B, 3)."""
        if self._fetch_s:
            clock.sleep(self._fetch_s)
        return {"points": self._points[list(indices)]}


@cache
def _points(number: int) -> torch.Tensor:
    return torch.randn(SIZE, 3, generator=torch.Generator().manual_seed(number))


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The squared error of each point, (B,); a coordinate is left out now and then, as the generators say."""
    points = batch["points"]
    known = nn.functional.dropout(points[:, :2], 0.3, model.training)
    foretold: torch.Tensor = model(known)
    return (foretold.squeeze(1) - points[:, 2]).square()

"""A user's loader that gives one rank fewer batches than the others."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from custom import Rows


class OnePass:
    """A loader of batches of 4 for a single pass. Rank `short` ends after `batches`, other ranks much later."""

    def __init__(self, short: int, batches: int) -> None:
        self.left = batches if os.environ.get("RANK", "0") == str(short) else 1000
        self.rows, self.at = Rows(4000), 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while self.at < self.left:
            samples = [self.rows[4 * self.at + number] for number in range(4)]
            self.at += 1
            yield {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]

    def aggregate_state_dict(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return states[0]

    def deaggregate_state_dict(self, aggregated: dict[str, Any], rank: int, world_size: int) -> dict[str, Any]:
        return aggregated

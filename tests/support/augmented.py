"""A user's dataset that calls `sample_rng` and nothing else of the runner: it adds noise to each sample."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset

from exactdata import sample_rng
from runner.data.text import PythonText


class Noisy(Dataset[dict[str, torch.Tensor]]):
    """Python's text with some bytes replaced at random, differently in each epoch."""

    def __init__(self, **options: Any) -> None:
        self.text = PythonText(**options)

    def __len__(self) -> int:
        return 150  # a few epochs in a short run

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = dict(self.text[index])
        rng = sample_rng()
        where = torch.from_numpy(rng.random(len(sample["input_ids"])) < 0.3)
        noise = torch.from_numpy(rng.integers(0, 256, len(where)))
        sample["input_ids"] = torch.where(where, noise, sample["input_ids"])
        return sample

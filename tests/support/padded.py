"""A user's sources with samples of different and random lengths, and a collate function that pads them."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Samples of up to `longest` tokens, truncated at a random place."""

    def __init__(self, size: int, longest: int) -> None:
        self.size, self.longest = size, longest

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        length = random.randint(2, self.longest)
        return {"tokens": torch.randint(0, 256, (length,))}


def pad(samples: list[dict[str, torch.Tensor]], to: int | None = None) -> dict[str, torch.Tensor]:
    """Return batches for the default loss, padded with ignored labels."""
    tokens = [sample["tokens"][:to] for sample in samples]
    return {
        "input_ids": pad_sequence([part[:-1] for part in tokens], batch_first=True),
        "labels": pad_sequence([part[1:] for part in tokens], batch_first=True, padding_value=-100),
    }


class Padding:
    """The same padding as a class."""

    def __init__(self, to: int | None = None) -> None:
        self.to = to

    def __call__(self, samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return pad(samples, self.to)


def refuses(samples: list[Any]) -> Any:
    raise KeyError("tokens")


def takes_nothing() -> Any:
    return None

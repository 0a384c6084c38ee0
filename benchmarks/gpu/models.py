"""Models, a loss and a dataset that the configs of the benchmark name."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.data import Dataset

from runner.models.gpt import GPT
from runner.models.loss import next_token_loss

OVERFLOW = 1e3


def checkpointed(**options: Any) -> nn.Module:
    """Build a GPT that recomputes the activations of its blocks in the backward pass."""
    model = GPT(**options)
    for place, block in enumerate(model.blocks):
        model.blocks[place] = checkpoint_wrapper(block)
    return model


def large_loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Multiply the usual loss, so that its gradients overflow in float16 until the scaler has lowered the scale."""
    return OVERFLOW * next_token_loss(model, batch)


class Zipped(Dataset[dict[str, torch.Tensor]]):
    """A dataset whose samples take about a millisecond each: tokens from a compressed block."""

    def __init__(self, length: int, vocabulary: int, samples: int = 4096) -> None:
        tokens = np.random.default_rng(0).integers(vocabulary, size=1 << 17, dtype=np.int64)
        self._block = zlib.compress(np.sort(tokens).tobytes(), 1)
        self._length, self._samples = length, samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = np.frombuffer(zlib.decompress(self._block), np.int64)
        begin = index * 31 % (len(tokens) - self._length - 1)
        row = torch.from_numpy(tokens[begin : begin + self._length + 1].copy())
        return {"input_ids": row[:-1], "labels": row[1:]}

"""Model, data and device of all parts: a GPT of 124 million parameters on a GPU, a tiny one on a CPU."""

from __future__ import annotations

import gc
import math
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from runner.models.gpt import GPT

PEAKS = {"H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Dense bf16 operations per second from the datasheet, keyed by words in the name of a GPU."""
TOKENS = 1 << 22


@dataclass(frozen=True)
class Size:
    """The size of the model and of a batch, and how often things are repeated.

    Attributes:
        batch: sequences per step where speed is measured.
        small_batch: sequences per step of runs that are compared, several of which share the GPU.
        turns, steps: how often speed is measured, and over how many steps each.
        rounds: saves whose content is checked.
        matrix: rows of the matrix product that gives the speed of the device.
    """

    vocabulary: int
    length: int
    layers: int
    heads: int
    width: int
    batch: int
    small_batch: int
    turns: int
    steps: int
    rounds: int
    matrix: int

    @property
    def options(self) -> dict[str, Any]:
        """Return the arguments of the model."""
        shape = {name: getattr(self, name) for name in ("layers", "heads", "width")}
        return {"vocab_size": self.vocabulary, "sequence_length": self.length, **shape}

    @property
    def overrides(self) -> list[str]:
        """Return the overrides of the model and the data, without paths. The model's first two follow the data."""
        places = {"vocab_size": "data", "sequence_length": "data"}
        return [f"{places.get(name, 'model')}.{name}={value}" for name, value in self.options.items()]

    def smaller(self) -> Size:
        """Return this size with a quarter of the layers and of the vocabulary."""
        return replace(self, layers=max(self.layers // 4, 1), vocabulary=self.vocabulary // 4)

    def model(self) -> GPT:
        """Create the model on the device."""
        return GPT(**self.options).to(DEVICE)

    @property
    def operations(self) -> float:
        """Return the floating-point operations per token, forward and backward (Chowdhery et al. 2022, appendix B)."""
        parameters = self.vocabulary * self.width + 12 * self.layers * self.width**2
        return 6 * parameters + 12 * self.layers * self.width * self.length


FULL = Size(50304, 1024, 12, 12, 768, batch=16, small_batch=4, turns=4, steps=50, rounds=8, matrix=8192)
TINY = Size(512, 64, 2, 2, 64, batch=4, small_batch=4, turns=3, steps=10, rounds=4, matrix=512)

# As it is used: every process sees the same devices.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
SIZE = FULL if ON_GPU else TINY
PRECISION = ("train.precision=bfloat16", "+optimizer.fused=true")
"""The overrides with which every run trains."""


def autocast() -> AbstractContextManager[Any]:
    return torch.autocast(DEVICE.type, torch.bfloat16)


def synchronize() -> None:
    """Wait until the device is idle."""
    if ON_GPU:
        torch.cuda.synchronize()


def free() -> None:
    """Free unused memory of the device."""
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()


def goal(**bound: float | None) -> dict[str, Any]:
    """Return the goal of a figure; small sizes on a CPU have none."""
    return bound if ON_GPU else {}


def fused_adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def batch(rows: int) -> dict[str, torch.Tensor]:
    """Draw random tokens and labels, int64 (rows, length), on the device."""
    drawn = torch.randint(SIZE.vocabulary, (rows, SIZE.length + 1), device=DEVICE)
    return {"input_ids": drawn[:, :-1].contiguous(), "labels": drawn[:, 1:].contiguous()}


def write_tokens(folder: Path) -> None:
    """Write token shards in which few tokens are frequent, as in text: P(rank r) falls as 1 / r."""
    for size in (SIZE, SIZE.smaller()):
        generator = np.random.default_rng(0)
        ranks = np.exp(generator.random(TOKENS) * math.log(size.vocabulary)).astype(np.int64) - 1
        np.save(_tokens(folder, size), generator.permutation(size.vocabulary).astype(np.uint16)[ranks])


def data(folder: Path, size: Size) -> list[str]:
    """Return the overrides that train a model of this size on the shards in `folder`."""
    return ["data=shards", f"data.sources.tokens.paths={_tokens(folder, size)}", *size.overrides, *PRECISION]


def _tokens(folder: Path, size: Size) -> Path:
    return folder / f"tokens-{size.vocabulary}.npy"


def machine() -> str:
    """Return name, memory and CUDA version of the GPU; empty without one."""
    if not ON_GPU:
        return ""
    found = torch.cuda.get_device_properties(0)
    count = torch.cuda.device_count()
    several = f"{count} x " if count > 1 else ""
    return f"{several}{found.name}, {found.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"


def peak() -> float | None:
    """Return the bf16 operations per second from the datasheet; None for an unknown GPU."""
    name = torch.cuda.get_device_name(0) if ON_GPU else ""
    return next((value for part, value in PEAKS.items() if all(word in name for word in part.split())), None)


def at_once() -> int:
    """Return how many runs that are not timed share the machine."""
    return max(1, min(14 if ON_GPU else 2, os.cpu_count() or 1))

"""Time several ways to gather a batch of tokens from a memory map; see docs/data.md."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from exactdata.datasets import MixtureDataset, TokenDataset

LENGTH, BATCH = 2048, 16


def microseconds(fetch: Callable[[Any], Any], batches: list[Any]) -> float:
    """Return the best mean of four rounds, each over a quarter of the batches, after a warmup."""
    rounds = [batches[start::4] for start in range(4)]
    for indices in batches[:200]:
        fetch(indices)
    best = float("inf")
    for part in rounds:
        began = time.perf_counter()
        for indices in part:
            fetch(indices)
        best = min(best, (time.perf_counter() - began) / len(part))
    return best * 1e6


def measure(folder: Path, count: int = 60_000_000, batches: int = 4000) -> dict[str, float]:
    """Return the microseconds per batch for each way of gathering."""
    rng = np.random.default_rng(0)
    np.save(folder / "tokens.npy", rng.integers(0, 50_000, count).astype(np.uint16))
    tokens = np.load(folder / "tokens.npy", mmap_mode="r")
    half = count // 2 // LENGTH * LENGTH
    data = TokenDataset(tokens, LENGTH, vocab_size=50_257)
    mixture = MixtureDataset(
        [TokenDataset(part, LENGTH, vocab_size=50_257) for part in (tokens[:half], tokens[half:])], ["a", "b"]
    )
    columns, plain, windows = np.arange(LENGTH + 1), tokens.view(np.ndarray), data.arrays[0].windows
    drawn = [rng.integers(0, len(mixture), BATCH) for _ in range(batches)]
    ways: dict[str, Callable[[Any], Any]] = {
        "index matrix": lambda i: tokens[i[:, None] * LENGTH + columns],
        "slices and np.stack": lambda i: np.stack([plain[j * LENGTH : j * LENGTH + LENGTH + 1] for j in i]),
        "rows of windows": lambda i: windows[i],
        "rows, widened twice": lambda i: [windows[i][:, cut].astype(np.int64) for cut in (slice(-1), slice(1, None))],
        "TokenDataset": data.__getitems__,
        "MixtureDataset": mixture.__getitems__,
    }
    return {name: microseconds(fetch, drawn) for name, fetch in ways.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for name, value in measure(Path(folder)).items():
            print(f"{name:<22} {value:6.1f} µs per batch")

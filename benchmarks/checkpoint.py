"""What a checkpoint costs: the stall of a save, the background write, and load with verification.

Each ratio is taken in one run, in turns, against the plainest thing that moves the same bytes; of each thing
the least disturbed turn counts.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from benchmarks.timing import seconds
from runner.checkpoint import TrainStateManager, build_train_state

MIB = 1 << 20


class State:
    """A model with AdamW's two moments: `size` bytes in `layers` times three tensors of equal size."""

    def __init__(self, size: int, layers: int) -> None:
        width = max(int((size / 12 / layers) ** 0.5), 1)
        self.model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.tensors = [parameter.detach() for parameter in self.model.parameters()]
        self.tensors += [v for state in self.optimizer.state.values() for k, v in state.items() if k != "step"]
        self.bytes = sum(tensor.nbytes for tensor in self.tensors)
        self.step = 0

    def save(self, manager: TrainStateManager, wait: bool = False) -> float:
        """Seconds that the caller stood still."""
        self.step += 1
        start = time.perf_counter()
        state = build_train_state(self.step, 0)
        manager.save(self.step, self.model, self.optimizer, state, wait=wait)
        return time.perf_counter() - start


def durable(path: Path, write: Callable[[int], object]) -> float:
    """Seconds to write a new file and make it durable."""
    path.unlink(missing_ok=True)
    start = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    write(fd)
    os.fsync(fd)
    os.close(fd)
    return time.perf_counter() - start


def raw_read(files: list[Path], buffer: memoryview) -> None:
    """Read files into memory that is there already."""
    for file in files:
        with open(file, "rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def reading(state: State, newest: Path, buffer: memoryview) -> tuple[float, float]:
    """Seconds for a raw read of a checkpoint's files, and for verifying and loading it."""
    files, loader = sorted(newest.iterdir()), TrainStateManager(newest.parent)
    return seconds(lambda: raw_read(files, buffer)), seconds(lambda: loader.load(state.model, state.optimizer))


def measure(size: int, layers: int, turns: int, folder: Path) -> None:
    """Print the ratios for one size of state."""
    folder.mkdir()
    state, manager = State(size, layers), TrainStateManager(folder / "checkpoints", keep_last=1)
    manager.warm_up()
    copies = [torch.empty_like(tensor) for tensor in state.tensors]
    raw = memoryview(b"".join(tensor.numpy().tobytes() for tensor in state.tensors))
    checkpoint = {"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict()}
    times: dict[str, list[float]] = {
        name: [] for name in ("clone", "copy", "stall", "write", "raw", "sync", "read", "load")
    }
    buffer = memoryview(bytearray(MIB))
    for turn in range(turns + 1):
        row = {"clone": seconds(lambda: [tensor.clone() for tensor in state.tensors])}
        row["copy"] = seconds(lambda: [c.copy_(t) for c, t in zip(copies, state.tensors, strict=True)])
        row["stall"] = state.save(manager)
        manager.wait()
        row["write"] = (manager.last_save or {"write_s": 0.0})["write_s"] - row["stall"]
        row["raw"] = durable(folder / "raw", lambda fd: os.writev(fd, [raw]))
        row["sync"] = durable(folder / "sync", lambda fd: torch.save(checkpoint, os.fdopen(os.dup(fd), "wb")))
        row["read"], row["load"] = reading(state, manager.directory / f"step_{state.step:08d}", buffer)
        if turn:  # the first turn pays for page faults and imports, on both sides
            for name, value in row.items():
                times[name].append(value)
    report(state.bytes, {name: min(values) for name, values in times.items()})


def report(size: int, t: dict[str, float]) -> None:
    rows = [
        ("stall of an async save / copy into memory that is there", t["stall"] / t["copy"], "at most 1.3"),
        ("stall of an async save / clone of every tensor", t["stall"] / t["clone"], "at most 1.3"),
        ("stall of an async save / torch.save and fsync", t["stall"] / t["sync"], "at most 0.1 at 500 MB"),
        ("background write / raw write and fsync of the bytes", t["write"] / t["raw"], ""),
        ("load and verify / raw read of the files (cached)", t["load"] / t["read"], ""),
    ]
    print(f"\n{size / 1e6:.0f} MB of state")
    for name, ratio, target in rows:
        print(f"  {name:<58}{ratio:8.2f}  {target}")
    print("  " + ", ".join(f"{name} {1000 * value:.1f} ms" for name, value in t.items()))


def main() -> None:
    """Print all ratios."""
    with tempfile.TemporaryDirectory() as folder:
        measure(10_000_000, 12, 15, Path(folder) / "10")
    with tempfile.TemporaryDirectory() as folder:
        measure(500_000_000, 24, 5, Path(folder) / "500")


if __name__ == "__main__":
    main()

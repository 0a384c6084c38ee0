"""Measure a checkpoint: the stall of a save, the time until it is durable, and load with verification.

Each ratio is taken in one run, in turns, against the plainest code that moves the same bytes. The least disturbed turn
of each side counts. The stall is the time in `save` and `finish_copy`, with a forward and backward pass of `ROWS` rows
in between. The steps with and without a save are complete steps on one thread, the default of `run.threads`, and their
medians count. `python -m benchmarks.checkpoint cpu` compares CPU time instead of wall time, on a machine that is busy
with other work.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from benchmarks.results import RECORDED, table
from runner.checkpoint import TrainStateManager, build_train_state
from runner.checkpoint.tensors.layout import memory

clock = time.process_time if "cpu" in sys.argv[1:] else time.perf_counter

ROWS = 1024
STEPS = 10
"""Steps from one save to the next."""

SIZES = {10_000_000: (12, 15), 100_000_000: (12, 9), 500_000_000: (24, 5)}
"""Bytes of state: layers, turns."""
LARGE = 100_000_000
"""Bytes of state from which on the goal of the stall applies."""


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
        self.width = width
        self.step = 0

    def backward(self) -> None:
        """Run the forward and backward pass of a step."""
        self.model(torch.full((ROWS, self.width), 1.0 / self.width)).mean().backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, manager: TrainStateManager | None) -> list[float]:
        """Time `STEPS` steps, the first of them right after a save if there is a manager."""
        times = []
        for number in range(STEPS):
            start = clock()
            if manager is not None and number == 0:
                self.save(manager, copy_later=True)
            self.backward()
            if manager is not None:
                manager.finish_copy()
            self.update()
            times.append(clock() - start)
        return times

    def stall(self, manager: TrainStateManager) -> float:
        """Time how long training waits for a save that is copied during the next forward and backward pass."""
        waited = timed(lambda: self.save(manager, copy_later=True))
        self.backward()
        waited += timed(manager.finish_copy)
        self.update()
        return waited

    def save(self, manager: TrainStateManager, wait: bool = False, copy_later: bool = False) -> None:
        self.step += 1
        state = build_train_state(self.step, 0)
        manager.save(self.step, self.model, self.optimizer, state, wait=wait, copy_later=copy_later)
        assert manager.last_error is None, manager.last_error


def timed(action: Callable[[], object]) -> float:
    start = clock()
    action()
    return clock() - start


def durable(path: Path, write: Callable[[int], object]) -> float:
    """Return the seconds to write a new file and make it durable."""
    path.unlink(missing_ok=True)

    def write_and_sync() -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        write(fd)
        os.fsync(fd)
        os.close(fd)

    return timed(write_and_sync)


def raw_read(files: list[Path], buffer: memoryview) -> None:
    """Read files into memory that is already allocated."""
    for file in files:
        with open(file, "rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def measure(size: int, layers: int, turns: int, folder: Path) -> None:
    """Measure all ratios for one size of state."""
    folder.mkdir()
    state, manager = State(size, layers), TrainStateManager(folder / "checkpoints", keep_last=1)
    manager.warm_up()
    copies = [torch.empty_like(tensor) for tensor in state.tensors]
    raw = [memory(tensor) for tensor in state.tensors]
    checkpoint = {"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict()}
    times: dict[str, list[float]] = {}
    buffer = memoryview(bytearray(1 << 20))
    for turn in range(turns + 1):
        row = {"clone": timed(lambda: [tensor.clone() for tensor in state.tensors])}
        row["copy"] = timed(lambda: [c.copy_(t) for c, t in zip(copies, state.tensors, strict=True)])
        row["stall"] = state.stall(manager)
        manager.wait()
        row["async"] = timed(lambda: state.save(manager)) + timed(manager.wait)
        row["sync"] = timed(lambda: state.save(manager, wait=True))
        row["raw write"] = durable(folder / "raw", lambda fd: os.writev(fd, raw))
        row["torch.save"] = durable(folder / "peer", lambda fd: torch.save(checkpoint, os.fdopen(os.dup(fd), "wb")))
        newest = manager.directory / f"step_{state.step:08d}"
        row["raw read"] = timed(lambda: raw_read(sorted(newest.iterdir()), buffer))  # noqa: B023
        loader = TrainStateManager(manager.directory)
        row["load"] = timed(lambda: loader.load(state.model, state.optimizer))  # noqa: B023
        if turn:  # the first turn pays for page faults and imports, on both sides
            for name, value in row.items():
                times.setdefault(name, []).append(value)
    without, saving = [], []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as `run.threads`: leaves a core for work in the background
    for _ in range(turns):
        without.append(state.train(None))
        saving.append(state.train(manager))
    torch.set_num_threads(threads)
    column = f"{state.bytes / 1e6:.0f} MB"
    report(column, size, {name: min(values) for name, values in times.items()})
    report_steps(column, without, saving)


def report(column: str, size: int, t: dict[str, float]) -> None:
    """Add the ratios of the least disturbed turns."""
    found = RECORDED["checkpoint"]
    found.add("stall of a save / copy", column, t["stall"] / t["copy"], at_most=0.25 if size >= LARGE else None)
    found.add("stall of a save / clone of every tensor", column, t["stall"] / t["clone"])
    found.add("asynchronous save, durable / torch.save and fsync", column, t["async"] / t["torch.save"], at_most=1.2)
    found.add("synchronous save, durable / torch.save and fsync", column, t["sync"] / t["torch.save"], at_most=1.2)
    found.add("synchronous save, durable / raw write and fsync", column, t["sync"] / t["raw write"])
    found.add("load and verify / raw read", column, t["load"] / t["raw read"], at_most=2)
    for name, value in t.items():
        RECORDED["checkpoint-times"].add(name, column, 1000 * value, "ms")


def report_steps(column: str, without: list[list[float]], saving: list[list[float]]) -> None:
    """Add the effect of saving on the steps."""
    usual = statistics.median(step for steps in without for step in steps)
    after_save = statistics.median(steps[0] for steps in saving)
    speed = statistics.median(sum(a) / sum(b) for a, b in zip(without, saving, strict=True))
    found = RECORDED["checkpoint"]
    found.add("the step after a save / a usual step", column, after_save / usual)
    found.add(f"speed with a save every {STEPS} steps / with none", column, speed, at_least=0.99)
    RECORDED["checkpoint-times"].add("a usual step", column, 1000 * usual, "ms")


def main() -> None:
    """Measure all sizes."""
    table("checkpoint", "state")
    table("checkpoint-times", "times")
    for size, (layers, turns) in SIZES.items():
        with tempfile.TemporaryDirectory() as folder:
            measure(size, layers, turns, Path(folder) / "state")


if __name__ == "__main__":
    main()

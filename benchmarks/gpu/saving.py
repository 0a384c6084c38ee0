"""Saves during training: their content, their stall, and memory.

The content is compared with clones that are made in the order of the device's work, right where the save begins. As a
control, the same is done with copies that do not wait for the work before them: then the check has to find differences,
or it could not find any.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.gpu import sizes
from benchmarks.gpu.models import checkpointed
from benchmarks.gpu.report import Report
from benchmarks.results import Table, table
from benchmarks.timing import seconds
from runner.checkpoint import TrainStateManager, build_train_state
from runner.checkpoint.files import manifest
from runner.checkpoint.files.directory import Folder
from runner.checkpoint.files.store import step_name
from runner.checkpoint.tensors.compare import tensor_difference
from runner.checkpoint.tensors.reader import CheckpointReader
from runner.checkpoint.tensors.staging import collect
from runner.models.loss import next_token_loss
from runner.system import processes

SIZE = sizes.SIZE
BUSY_CYCLES = 50_000_000
"""Clock cycles for which the device is kept busy before an update: about 30 ms."""
SAVES = 5


class Training:
    """A model that is trained on one batch, and saved."""

    def __init__(self, folder: Path, model: nn.Module | None = None, rows: int = SIZE.batch) -> None:
        torch.manual_seed(0)
        self.model = SIZE.model() if model is None else model
        self.optimizer = sizes.fused_adamw(self.model)
        self.batch = sizes.batch(rows)
        self.manager = TrainStateManager(folder, keep_last=1)
        self.steps = 0

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of a save by their names in the checkpoint."""
        return collect(self.model, self.optimizer).tensors

    def backward(self) -> None:
        """Run a forward and a backward pass."""
        with sizes.autocast():
            loss = next_token_loss(self.model, self.batch).mean()
        torch.autograd.backward(loss)

    def update(self) -> None:
        """Wait for the copies of a save, then update the weights."""
        self.manager.finish_copy()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def step(self) -> None:
        self.backward()
        self.update()

    def save(self) -> None:
        """Begin a save that copies during the next backward pass."""
        saved = self.manager.save(
            self.steps, self.model, self.optimizer, build_train_state(self.steps, self.steps), copy_later=True
        )
        if not saved or self.manager.last_error:
            raise RuntimeError(f"a save failed: {self.manager.last_error}")

    def wait(self) -> None:
        self.manager.wait()
        if self.manager.last_error:
            raise RuntimeError(f"a save failed: {self.manager.last_error}")

    def differing(self, expected: dict[str, torch.Tensor]) -> int:
        """Count the tensors of the newest checkpoint that differ from `expected`."""
        folder = self.manager.directory / step_name(max(self.steps - 1, 0))
        with CheckpointReader(Folder(folder), manifest.read(Folder(folder))) as reader:
            if reader.entries.keys() != expected.keys():
                raise RuntimeError("a checkpoint has other tensors than were saved")
            return sum(tensor_difference(reader.read(name), tensor) is not None for name, tensor in expected.items())


def busy() -> None:
    """Keep the device busy for a while, so that the work queued behind starts late."""
    if sizes.ON_GPU:
        torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]


def rounds(folder: Path) -> list[int]:
    """Save again and again during training; return how many tensors of each save are wrong."""
    small = SIZE.smaller()
    training = Training(folder, small.model(), rows=2)
    training.batch = {key: value % small.vocabulary for key, value in training.batch.items()}
    wrong = []
    for _ in range(SIZE.rounds):
        busy()
        training.step()
        expected = {name: tensor.detach().clone() for name, tensor in training.tensors.items()}
        training.save()
        training.step()  # nothing waits for the device between a save and the next update but the save itself
        training.wait()
        wrong.append(training.differing(expected))
    return wrong


@contextmanager
def copies_that_do_not_wait() -> Iterator[None]:
    """Inject the fault that the check must notice: copies that start before the work they depend on has ended."""
    stream: Any = torch.cuda.Stream
    original = stream.wait_event
    stream.wait_event = lambda self, event: None
    try:
        yield
    finally:
        stream.wait_event = original


def content(folder: Path, row: str, found: Table, **goal: Any) -> list[int]:
    """Add a row on the content of saves; return how many tensors of each are wrong."""
    wrong = rounds(folder)
    found.add(row, "saves", len(wrong), "saves")
    found.add(row, "wrong", sum(map(bool, wrong)), "saves", **goal)
    return wrong


def right(folder: Path, found: Table) -> None:
    wrong = content(folder / "content", "saves while the next backward pass runs", found, at_most=0)
    if any(wrong):
        raise RuntimeError(f"saves are not what was to be saved: {wrong} tensors differ")


def control(folder: Path, found: Table) -> None:
    with copies_that_do_not_wait():
        wrong = content(folder / "control", "the same, copies that do not wait (the control)", found)
    if not any(wrong):
        raise RuntimeError("copies that do not wait were right, so the check shows nothing")


def measured(training: Training, save: bool) -> float:
    """Time a step until the device is idle, with a save before it if `save`."""
    sizes.synchronize()

    def whole() -> None:
        if save:
            training.save()
        training.step()
        sizes.synchronize()

    return seconds(whole)


def stall(folder: Path) -> None:
    """Compare the time that a save adds to a step with a copy of the same bytes into pinned memory."""
    training = Training(folder / "stall")
    training.manager.warm_up()
    for _ in range(3):
        training.step()
    first = measured(training, save=True)
    training.wait()
    pinned = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=sizes.ON_GPU)
        for name, tensor in training.tensors.items()
    }

    def copy() -> None:
        for name, tensor in training.tensors.items():
            pinned[name].copy_(tensor.detach(), non_blocking=True)
        sizes.synchronize()

    copies, usual, saving, durable = [], [], [], []
    for _ in range(SAVES):
        copies.append(seconds(copy))
        usual.append(measured(training, save=False))
        saving.append(measured(training, save=True))
        training.wait()
        assert training.manager.last_save is not None
        durable.append(training.manager.last_save["write_s"])
    size = sum(tensor.nbytes for tensor in training.tensors.values())
    step, copied = statistics.median(usual), statistics.median(copies)
    stalled = statistics.median(saving) - step
    found, row = table("gpu-stall", "a save beside training"), f"{size / 1e6:,.0f} MB"
    found.add(row, "stall", 1000 * stalled, "ms")
    found.add(row, "copy to pinned memory", 1000 * copied, "ms")
    found.add(row, "stall / copy", stalled / copied)
    found.add(row, "a usual step", 1000 * step, "ms")
    found.add(row, "first save, stall", 1000 * (first - step), "ms")
    found.add(row, "durable after", statistics.median(durable), "s")


def peak_of(folder: Path, name: str, make: Callable[[], nn.Module] = SIZE.model, save: bool = False) -> tuple[int, int]:
    """Return the peak memory of a few steps and the bytes of model, gradients and optimizer.

    On a CPU, it is the peak of this process so far.
    """
    sizes.free()
    if sizes.ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    training = Training(folder / name, make())
    for _ in range(3):
        if save and training.steps:
            training.save()
        training.step()
    training.wait()
    state = sum(tensor.nbytes for tensor in training.tensors.values())
    state += sum(parameter.nbytes for parameter in training.model.parameters())
    return (torch.cuda.max_memory_allocated() if sizes.ON_GPU else processes.peak_memory()), state


def memory(folder: Path) -> None:
    """Compare the peak memory with the model's state: plain, with saves, and with activation checkpointing."""
    found = table("gpu-memory", f"batch of {SIZE.batch} sequences of {SIZE.length} tokens")
    cases: dict[str, dict[str, Any]] = {
        "training": {},
        "with saves": {"save": True},
        "activation checkpointing": {"make": lambda: checkpointed(**SIZE.options).to(sizes.DEVICE)},
    }
    base = 0
    for name, more in cases.items():
        peak, state = peak_of(folder, name.replace(" ", "-"), **more)
        base = base or peak
        found.add(name, "peak", peak / 1e9, "GB")
        found.add(name, "peak / model, gradients, optimizer", peak / state)
        found.add(name, "peak / training", peak / base, **(sizes.goal(at_most=1.02) if name == "with saves" else {}))


def main(report: Report, folder: Path) -> None:
    """Check the content of saves, then measure stall and memory."""
    found = table("gpu-copies", "what is in a checkpoint")
    report.step("saves while the next backward pass runs", lambda: right(folder, found))
    report.step("the control of it", lambda: control(folder, found), "" if sizes.ON_GPU else "a CPU has no streams")
    report.step("stall of a save", lambda: stall(folder))
    report.step("peak memory", lambda: memory(folder))

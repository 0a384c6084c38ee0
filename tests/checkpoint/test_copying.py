"""A save holds the state at the save, whenever its copies are made, and whatever forward passes change."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from checkpoints import Toy, manager, names
from torch import nn

from runner.checkpoint import TrainStateManager, build_train_state
from runner.checkpoint.files import manifest as manifests
from runner.checkpoint.files.directory import Folder
from runner.checkpoint.tensors.compare import compare_checkpoints
from runner.checkpoint.tensors.copying import Copy, HostBuffers


class Awkward(nn.Module):
    """A model whose forward passes change buffers, frozen weights through `.data`, and trained weights."""

    def __init__(self, sometimes: int = 0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 6, max_norm=0.5)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3))
        self.student, self.teacher = nn.Linear(8, 3), nn.Linear(8, 3)
        self.teacher.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(3))
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.sometimes = sometimes

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls.add_(1)
            self.teacher.weight.data.mul_(0.9).add_(0.1 * self.student.weight.data)
            self.scale.data.clamp_(0.999, 1.001)
            if self.sometimes and self.calls % self.sometimes == 0:
                self.teacher.bias.data.add_(1.0)  # which nothing can notice
                with torch.no_grad():
                    self.student.bias.mul_(0.5)
        hidden = self.body(self.embedding(rows))
        out: torch.Tensor = (self.student(hidden) - self.teacher(hidden)) * self.scale
        return out


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Delay copies as long as possible: until training waits for them."""
    awaited = threading.Event()
    complete, finish, wait = Copy.complete, TrainStateManager.finish_copy, TrainStateManager.wait

    def waiting(self: Copy) -> None:
        assert awaited.wait(60)
        awaited.clear()
        complete(self)

    def waited_for(method: Any) -> Any:
        def call(self: TrainStateManager) -> None:
            if self.copying:
                awaited.set()
            method(self)

        return call

    monkeypatch.setattr(Copy, "complete", waiting)
    monkeypatch.setattr(TrainStateManager, "finish_copy", waited_for(finish))
    monkeypatch.setattr(TrainStateManager, "wait", waited_for(wait))
    yield
    awaited.set()


def train(directory: Path, steps: int, sometimes: int = 0, **options: Any) -> TrainStateManager:
    """Train a model and save it after each step, with copies that may wait."""
    torch.manual_seed(0)
    model = Awkward(sometimes)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    saving = manager(directory, keep_last=99, **options)
    for step in range(1, steps + 1):
        loss = model(torch.randint(0, 12, (5,))).square().mean()
        loss.backward()
        saving.finish_copy()
        optimizer.step()
        optimizer.zero_grad()
        saving.save(step, model, optimizer, build_train_state(step, step), copy_later=True)
    saving.wait()
    return saving


def test_late_copies_are_of_the_state_at_the_save(tmp_path: Path, late: None) -> None:
    train(tmp_path / "late", 6)
    train(tmp_path / "sync", 6, mode="sync")
    for step in range(1, 7):
        one, two = (Folder(tmp_path / kind / f"step_{step:08d}") for kind in ("late", "sync"))
        found = compare_checkpoints(one, two, (manifests.read(one), manifests.read(two)))
        assert found.differences == []
        assert found.tensors > 20


def test_only_unchanging_tensors_are_copied_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first save copies everything at once; later ones copy at once what a forward pass changes."""
    later: list[set[str]] = []
    complete = Copy.complete

    def noting(self: Copy) -> None:
        later.append(set(self._copied_later))
        complete(self)

    monkeypatch.setattr(Copy, "complete", noting)
    train(tmp_path, 3)
    assert later[0] == set()
    assert later[1] == later[2]
    at_once = {
        "embedding.weight",
        "teacher.weight",
        "teacher.bias",
        "scale",
        "calls",
        "body.1.running_mean",
        "body.1.running_var",
    }
    assert not {f"model.{name}" for name in at_once} & later[1]
    kept = {"model.student.weight", "optimizer.state.embedding.weight.exp_avg"}
    assert kept <= later[1]


def test_tensors_first_saved_later_are_observed_then() -> None:
    """An optimizer's state may begin late, and this rank may then have to write other tensors."""
    old, new, clamped = (torch.ones(4) for _ in range(3))
    buffers = HostBuffers()
    buffers.observe(buffers.copy({"old": old}, ["old"]))
    for _ in range(2):
        copy = buffers.copy({"old": old, "new": new, "clamped": clamped}, ["old", "new", "clamped"])
        before = clamped.tolist()
        clamped.data.mul_(0.5)
        copy.complete()
        buffers.observe(copy)
        assert copy.tensors["clamped"].tolist() == before
    assert copy._copied_later == ["old", "new"]


def test_weight_changed_in_forward_spoils_at_most_one_save(
    tmp_path: Path, late: None, caplog: pytest.LogCaptureFixture
) -> None:
    """That save is not committed. From then on the weight is copied at once."""
    train(tmp_path / "late", 12, sometimes=4)
    train(tmp_path / "sync", 12, sometimes=4, mode="sync")
    missing = set(names(tmp_path / "sync")) - set(names(tmp_path / "late"))
    assert missing == {"step_00000003"}
    assert len(caplog.messages) == 1
    assert "step 3 could not be saved (a forward or backward pass changed model.student.bias" in caplog.messages[0]
    for name in names(tmp_path / "late"):
        one, two = Folder(tmp_path / "late" / name), Folder(tmp_path / "sync" / name)
        assert compare_checkpoints(one, two, (manifests.read(one), manifests.read(two))).differences == []


def test_training_waits_for_copies_that_are_not_made_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait is part of the stall."""
    gate = threading.Event()
    complete = Copy.complete

    def slow(self: Copy) -> None:
        gate.wait(60)
        complete(self)

    monkeypatch.setattr(Copy, "complete", slow)
    toy, saving = Toy(), manager(tmp_path)
    toy.train()
    saving.save(1, toy.model, toy.optimizer, toy.state(), copy_later=True)
    assert saving.copying
    waiting = threading.Thread(target=saving.finish_copy)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    gate.set()
    waiting.join(60)
    assert not waiting.is_alive()
    assert saving.last_save is not None
    assert 0.1 < saving.last_save["stall_s"] < 120.0  # a difference of two times, not their sum
    saving.wait()
    assert not saving.copying


def test_failed_copy_ends_the_save_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: Copy) -> None:
        raise MemoryError("no memory for a copy")

    toy, saving = Toy(), manager(tmp_path)
    toy.train()
    with monkeypatch.context() as patch:
        patch.setattr(Copy, "_copy", refuse)
        saving.save(1, toy.model, toy.optimizer, toy.state(), copy_later=True)
        saving.finish_copy()
        saving.wait()
    assert "no memory for a copy" in str(saving.last_error)
    assert toy.save(saving)
    assert names(tmp_path) == ["step_00000001"]


class Gpus:
    """A fake torch.cuda with two GPUs. As in CUDA, each thread begins on the first one."""

    def __init__(self) -> None:
        self.here = threading.local()
        self.queued: dict[Any, list[str]] = {}  # stream -> its queued copies that were not awaited

    def streams(self) -> dict[int, Any]:
        """Return the current stream of each GPU in this thread."""
        if not hasattr(self.here, "streams"):
            self.here.device, self.here.streams = 0, {0: "default of 0", 1: "default of 1"}
        return cast(dict[int, Any], self.here.streams)

    def set_device(self, device: torch.device) -> None:
        self.streams()
        self.here.device = device.index

    def current_stream(self, device: torch.device) -> Any:
        return SimpleNamespace(record_event=lambda: f"event of {self.streams()[device.index]}")

    def Stream(self, device: torch.device | None = None) -> Any:
        self.streams()
        made = SimpleNamespace(index=self.here.device if device is None else device.index, waited=[])
        made.wait_event, made.synchronize = made.waited.append, lambda: self.queued.pop(id(made), None)
        return made

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.streams()[stream.index] = self.streams()[stream.index], id(stream)
        yield
        self.streams()[stream.index] = before


class OnGpu:
    """A fake tensor on a GPU, or its copy."""

    is_cpu, is_cuda, _version = False, True, 0

    def __init__(self, gpus: Gpus, index: int) -> None:
        self.gpus, self.device = gpus, torch.device("cuda", index)

    def is_inference(self) -> bool:
        return False

    def detach(self) -> OnGpu:
        return self

    def copy_(self, source: OnGpu, non_blocking: bool) -> None:
        """Queue a copy in the current stream of the source's GPU."""
        stream = self.gpus.streams()[source.device.index]
        self.gpus.queued.setdefault(stream, []).append(f"a copy from {source.device}")


@pytest.mark.parametrize("indices", [[0], [1], [0, 1], [1, 0]])
def test_copies_from_every_gpu_are_awaited(indices: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank trains on one GPU, and the thread that copies must select it."""
    gpus = Gpus()
    for name in ("set_device", "current_stream", "Stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(gpus, name))
    sources: Any = {f"w{index}": OnGpu(gpus, index) for index in indices}
    copy = Copy({name: OnGpu(gpus, 0) for name in sources}, sources, set(sources))  # type: ignore[misc]
    left: list[Any] = []

    def complete() -> None:
        copy.complete()
        left.append(gpus.queued)

    thread = threading.Thread(target=complete)
    thread.start()
    thread.join()
    assert left == [{}]

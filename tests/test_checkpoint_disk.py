"""A disk that fills up or turns read-only during a save: training goes on, nothing is lost, and later saves work."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import FINGERPRINT, names
from torch import nn

from runner.checkpoint import TrainStateManager, store

SIZE = 8 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    directory = tmp_path / "disk"
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE},mode=755", "tmpfs", str(directory)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a tmpfs is not permitted here")
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True)


class Run:
    """A model of about 1 MiB, and what is reported."""

    def __init__(self, directory: Path, mode: str) -> None:
        self.model = nn.Linear(512, 512)
        self.reports: list[str] = []
        self.manager = TrainStateManager(
            directory / "checkpoints", fingerprint=FINGERPRINT, keep_last=2, mode=mode, report=self.reports.append
        )

    def save(self, step: int) -> bool:
        with torch.no_grad():
            self.model.weight.fill_(float(step))
        self.manager.save(step, self.model, None, {"step": step, "tokens_seen": 0})
        self.manager.wait()
        return self.manager.last_error is None

    def check(self, step: int) -> None:
        """`step` is the newest, and it is whole."""
        fresh = nn.Linear(512, 512)
        state = TrainStateManager(self.manager.directory, fingerprint=FINGERPRINT).load(fresh)
        assert state is not None
        assert state["step"] == step
        assert bool((fresh.weight == step).all())


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_disk_that_fills_up(disk: Path, mode: str) -> None:
    run = Run(disk, mode)
    assert all(run.save(step) for step in (1, 2, 3))
    ballast = disk / "ballast"
    free = shutil.disk_usage(disk).free
    for room in (0, 4096, 200_000, 700_000, 1_000_000):  # full before the directory, in the tensors, in the state
        ballast.write_bytes(bytes(free - room))
        run.reports.clear()
        assert not run.save(4)
        assert len(run.reports) == 1
        assert run.reports[0].startswith("step 4 could not be saved (No space left on device")
        assert not store.leftovers(run.manager.directory)
        run.check(3)
        ballast.unlink()
    assert run.save(5)
    run.check(5)
    assert names(run.manager.directory) == ["step_00000003", "step_00000005"]


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_directory_that_turns_read_only_and_back(disk: Path, mode: str) -> None:
    run = Run(disk, mode)
    assert run.save(1)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    assert not run.save(2)
    assert "Read-only file system" in run.reports[0]
    run.check(1)
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    assert run.save(3)
    run.check(3)


def test_a_damaged_checkpoint_on_a_read_only_disk_is_passed_over(disk: Path) -> None:
    run = Run(disk, "sync")
    assert run.save(1)
    assert run.save(2)
    os.truncate(run.manager.directory / "step_00000002" / "train_state.pt", 10)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    fresh = nn.Linear(512, 512)
    told: list[str] = []
    loading = TrainStateManager(run.manager.directory, fingerprint=FINGERPRINT, report=told.append)
    state = loading.load(fresh)
    assert state is not None
    assert state["step"] == 1
    assert "cannot be set aside" in told[0]

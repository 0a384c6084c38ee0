"""A disk that fills up or becomes read-only during a save: training continues, nothing is lost, later saves work."""

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

from runner.checkpoint import TrainStateManager, build_train_state
from runner.checkpoint.files import directory as checkpoint_dir

SIZE = 8 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 8 MiB."""
    directory = tmp_path / "disk"
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE},mode=755", "tmpfs", str(directory)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a tmpfs is not permitted here")
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True)


class Run:
    """A run with a model of about 1 MiB."""

    def __init__(self, directory: Path, mode: str) -> None:
        self.model = nn.Linear(512, 512)
        self.manager = TrainStateManager(directory / "checkpoints", fingerprint=FINGERPRINT, keep_last=2, mode=mode)

    def save(self, step: int) -> bool:
        with torch.no_grad():
            self.model.weight.fill_(float(step))
        self.manager.save(step, self.model, None, build_train_state(step, 0))
        self.manager.wait()
        return self.manager.last_error is None

    def check(self, step: int) -> None:
        """Check that `step` is the newest, and intact."""
        fresh = nn.Linear(512, 512)
        state = TrainStateManager(self.manager.directory, fingerprint=FINGERPRINT).load(fresh)
        assert state is not None
        assert state["step"] == step
        assert bool((fresh.weight == step).all())


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_disk_that_fills_up(disk: Path, mode: str, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(disk, mode)
    assert all(run.save(step) for step in (1, 2, 3))
    ballast = disk / "ballast"
    free = shutil.disk_usage(disk).free
    for room in (0, 4096, 200_000, 700_000, 1_000_000):  # full before the directory, in the tensors, in the state
        ballast.write_bytes(bytes(free - room))
        caplog.clear()
        assert not run.save(4)
        assert len(caplog.messages) == 1
        assert caplog.messages[0].startswith("step 4 could not be saved (No space left on device")
        assert not checkpoint_dir.leftovers(run.manager.directory)
        run.check(3)
        ballast.unlink()
    assert run.save(5)
    run.check(5)
    assert names(run.manager.directory) == ["step_00000003", "step_00000005"]


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_disk_that_becomes_read_only_and_writable_again(
    disk: Path, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(disk, mode)
    assert run.save(1)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    assert not run.save(2)
    assert "Read-only file system" in caplog.messages[0]
    run.check(1)
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    assert run.save(3)
    run.check(3)


def test_a_corrupt_checkpoint_on_a_read_only_disk_is_skipped(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(disk, "sync")
    assert run.save(1)
    assert run.save(2)
    os.truncate(run.manager.directory / "step_00000002" / "train_state.pt", 10)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    fresh = nn.Linear(512, 512)
    state = TrainStateManager(run.manager.directory, fingerprint=FINGERPRINT).load(fresh)
    assert state is not None
    assert state["step"] == 1
    assert "cannot be set aside" in caplog.messages[0]

"""A command line in an empty directory, with launchers that start nothing."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import fake_launcher
import pytest
from fake_launcher import Command, FakeLauncher

from runner import __main__ as entry
from runner.rundir.lease import Lease
from runner.system.signals import STOP, STOP_SIGNALS


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    """Runs `python -m runner ARGUMENTS` in this process, an attempt being replaced by a note in `launched`."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    FakeLauncher.reset()
    handlers = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}

    def attempt(run_dir: Path, job: object = None, lease: Lease | None = None) -> int:
        FakeLauncher.launched.append(run_dir)
        return 0

    monkeypatch.setattr("runner.training.attempt.attempt", attempt)

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["runner", *arguments])
        return entry.main()

    yield run
    STOP.signum = None
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    """A config directory with the fake launchers as launcher=fake, here and unfinished."""
    directory = tmp_path / "conf"
    (directory / "launcher").mkdir(parents=True)
    for name, made in (
        ("fake", FakeLauncher),
        ("here", fake_launcher.HereLauncher),
        ("unfinished", fake_launcher.Unfinished),
    ):
        node = {"_target_": f"{made.__module__}.{made.__name__}", "retry_failed": False, "dry_run": False}
        (directory / f"launcher/{name}.yaml").write_text(json.dumps({**node, "partition": None}))
    return directory


@pytest.fixture
def run(command: Command, conf: Path) -> Command:
    """Runs a training command with launcher=fake, or with the one passed as `launcher`."""

    def train(*arguments: str, launcher: str = "fake") -> int:
        return command("--config-dir", str(conf), f"launcher={launcher}", *arguments)

    return train

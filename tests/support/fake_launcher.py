"""Launchers that record requests without starting anything, and helpers to write the runs' results."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from runner.config.frozen import load
from runner.contracts import Finding, JobInfo, RankCounts
from runner.rundir.evaluations import Request
from runner.rundir.paths import RunDir
from runner.system import files

Command = Callable[..., int]


class FakeLauncher:
    """A launcher that submits nothing."""

    in_process: bool = False
    launched: ClassVar[list[Path]] = []
    queued: ClassVar[dict[Path, JobInfo]] = {}
    errors: ClassVar[list[str]] = []
    answers: ClassVar[bool] = True
    interrupt: ClassVar[bool] = False

    def __init__(self, retry_failed: bool = False, dry_run: bool = False, partition: str | None = None) -> None:
        self.retry_failed, self.dry_run, self.wait = retry_failed, dry_run, False

    @classmethod
    def reset(cls) -> None:
        cls.launched, cls.queued, cls.errors, cls.answers, cls.interrupt = [], {}, [], True, False

    def rank_counts(self) -> RankCounts:
        return RankCounts()

    def check(self, run_dirs: list[Path]) -> list[str]:
        return self.errors

    def examine(self, save_s: float | None) -> list[Finding]:
        return []

    def preview(self, run_dirs: list[Path]) -> str:
        return "would start " + " ".join(path.name for path in run_dirs)

    def cancel(self, run_dirs: list[Path]) -> dict[Path, str]:
        return {}

    def jobs(self, run_dirs: list[Path]) -> dict[Path, JobInfo]:
        if not self.answers:
            raise OSError("squeue does not answer")
        return {path: job for path, job in self.queued.items() if path in run_dirs}

    def launch(self, run_dirs: list[Path], attempt: str, guards: Sequence[files.Guard] = ()) -> int:
        assert attempt == "runner.training.attempt:attempt"
        if self.interrupt:
            os.kill(os.getpid(), signal.SIGINT)
        for path in run_dirs:
            load(path)
        self.launched.extend(run_dirs)
        return 0

    def follow(self, run_dirs: list[Path]) -> int:
        return 0


class HereLauncher(FakeLauncher):
    """A launcher that runs in this process, like the local one."""

    in_process = True


class QueueLauncher:
    """A second launcher, with a run in its queue."""

    waiting: ClassVar[list[Path]] = []

    def jobs(self, run_dirs: list[Path]) -> dict[Path, JobInfo]:
        return {path: JobInfo("12", "pending") for path in run_dirs if path in self.waiting}


class Unfinished:
    """A class that is not a launcher yet."""

    def __init__(self, retry_failed: bool, dry_run: bool, partition: str | None) -> None:
        self.retry_failed = retry_failed


def run_dirs() -> list[Path]:
    """Return the run directories that the commands have created."""
    return sorted(Path("outputs").absolute().iterdir()) if Path("outputs").exists() else []


def finish(path: Path, steps: int) -> None:
    """Write the completion mark of a run, and its last record."""
    RunDir(path).metrics.write_text(json.dumps({"step": steps, "loss": 1.0}) + "\n")
    RunDir(path).finished.write_text(json.dumps({"steps": steps}))


def fail(path: Path, state: str = "failed") -> None:
    """Record a failure of a run."""
    RunDir(path).status.write_text(json.dumps({"state": state, "reason": "the loss is nan"}))


class EvaluationLauncher(FakeLauncher):
    """A launcher that records evaluations without submitting them."""

    def launch(self, run_dirs: list[Path], attempt: str, guards: Sequence[files.Guard] = ()) -> int:
        assert attempt == "runner.training.evaluate:attempt"
        assert len(guards) == len(run_dirs)
        for path in run_dirs:
            Request.read(path)
        self.launched.extend(run_dirs)
        return 0

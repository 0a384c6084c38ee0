"""Attempts that train nothing but have a real lease, attempt log, recorder and checkpoints.

An attempt takes a few milliseconds, so a test can run one for every file system call of an attempt.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from composing import compose
from torch import nn

from runner.checkpoint import build_train_state
from runner.errors import TrainingError
from runner.rundir.attempt_log import AttemptLog, insist
from runner.rundir.lease import Lease
from runner.rundir.paths import RunDir
from runner.system import clock, files
from runner.system.distributed import World
from runner.system.signals import STOP
from runner.training import attempt as training_attempt
from runner.training.records.resources import StepMeter
from runner.training.records.start import open_recorder
from runner.training.saving import make_manager

STEPS = 2


class Clockwork:
    """A dataloader without data."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class TinySession:
    """A replacement for `Session` with one parameter. It saves every step and keeps the newest checkpoint."""

    def __init__(self, run: RunDir, config: Any, world: World, log: AttemptLog, lease: Lease) -> None:
        self.account = log.account
        self.early_end = None
        self._model = nn.Linear(1, 1, bias=False)
        self._scheduler = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(self._model.parameters()))
        self._manager = make_manager(config, run, lease, {})
        state = self._manager.load(self._model) or {}
        self.step = int(state.get("step", 0))
        order = {"sizes": {"code": 1}}
        insist(lambda: files.write_json(run.order, order, guard=run.guard), run.order)
        meter, manager = StepMeter(torch.device("cpu")), self._manager
        self._recorder: Any = open_recorder(
            run, config, log, meter, self.step, True, None, lambda: manager.last_save, lambda record: None
        )

    def train(self, steps: int) -> bool:
        try:
            while self.step < steps:
                self.step += 1
                self._recorder.step({"step": self.step, "loss": 1.0 / self.step}, 0.1, 1)
                if not self._save() and self.step == steps:
                    raise TrainingError("the last save failed")  # as the trainer does
            return True
        finally:
            self._manager.settle()
            self._recorder.close()

    def _save(self) -> bool:
        if not self._recorder.before_save():
            return False
        with torch.no_grad():
            self._model.weight.fill_(self.step)
        state = build_train_state(self.step, self.step, self._scheduler, Clockwork(), {})
        return self._manager.save(self.step, self._model, None, state, wait=True)


class TinyJob:
    """A job whose attempts know that those with lower restart counts are gone."""

    auto_restarts = False
    max_timeouts: int | None = None
    early_signal: int | None = None

    def __init__(self, restart_count: int) -> None:
        self.restart_count = restart_count

    def identity(self) -> dict[str, Any]:
        return {"job_id": "7", "restart_count": self.restart_count, "host": "here", "node": "n1"}

    def began(self) -> float:
        return clock.monotonic()

    def waited(self) -> dict[str, float]:
        return {}

    def on_started(self) -> None: ...

    def cause_of_loss(self, record: dict[str, Any]) -> str:
        return "killed"

    def yield_verdict(self, reason: str | None = None) -> bool:
        return False

    def record_verdict(self) -> None: ...

    def cause(self, signum: int) -> str:
        return "interrupted"

    def requeue_if_needed(self, cause: str) -> str:
        return cause


@contextmanager
def tiny_attempts() -> Iterator[pytest.MonkeyPatch]:
    """Let `attempt` run tiny attempts in the block: without syncs, heartbeats, signals, pauses or git."""

    def sync(fd: int) -> None: ...

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "fsync_fd", sync)
        patch.setattr("runner.config.frozen.load", lambda path: _config(STEPS))
        patch.setattr("runner.training.session.Session.open", TinySession)
        patch.setattr(training_attempt, "code_changes", lambda path: [])
        patch.setattr(STOP, "install", lambda: None)
        patch.setattr(STOP, "listen", lambda *_, **__: None)  # its sockets and thread would outlive the attempt
        patch.setattr(STOP, "wait_for_listener", lambda: None)
        patch.setattr(Lease, "_beat", lambda lease: None)
        patch.setattr(clock, "sleep", lambda seconds: None)
        yield patch


@contextmanager
def training_to(steps: int) -> Iterator[None]:
    """Let attempts that begin in the block train to `steps` steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runner.config.frozen.load", lambda path: _config(steps))
        yield


@cache
def _config(steps: int) -> Any:
    return compose([f"train.steps={steps}", "checkpoint.keep_last=1", "checkpoint.mode=sync", "logger=none"]).config


def attempt(path: Path, restart_count: int = 0) -> int:
    """Run an attempt in `path` and return its exit status."""
    return training_attempt.attempt(path, TinyJob(restart_count))


def contents(path: Path) -> dict[str, bytes]:
    """Return the content of every file in a run directory by name."""
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}

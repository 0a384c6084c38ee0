"""A job waits while the previous job still saves; nothing else waits, and a signal ends the wait."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from composing import compose

from runner.cli.start import start
from runner.cli.start.plan import PlannedRun
from runner.errors import ExitStatus, LockedError, StoppedError, SupersededError, UserError
from runner.rundir import lease, provenance
from runner.rundir.lease import Lease
from runner.rundir.paths import RunDir
from runner.system.signals import STOP
from runner.training.job import LocalJob

TIMEOUT_S = 0.3


class QueuedJob(LocalJob):
    """A job that a scheduler restarts."""

    auto_restarts = True

    def __init__(self) -> None:
        self.requeued: list[str] = []

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "job_id": "13"}

    def cause(self, signum: int) -> str:
        return "preempted"

    def requeue_if_needed(self, cause: str) -> str:
        self.requeued.append(cause)
        return cause


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


@pytest.fixture
def held(run: RunDir) -> Iterator[Lease]:
    with Lease.acquire(run.lease, {"job_id": "12"}, TIMEOUT_S) as lease:
        yield lease


def test_job_waits_until_the_previous_one_released_the_lease(run: RunDir, held: Lease) -> None:
    messages: list[str] = []

    def release(text: str) -> None:
        messages.append(text)
        held.release()

    with lease.acquire_for_job(run, QueuedJob(), TIMEOUT_S, release) as mine:
        assert mine.fence == held.fence + 1
    assert "job 12" in messages[0]


def test_a_process_started_by_hand_does_not_wait(run: RunDir, held: Lease) -> None:
    with pytest.raises(LockedError):
        lease.acquire_for_job(run, LocalJob(), TIMEOUT_S, print)


def test_the_wait_for_a_holder_that_keeps_training_ends(
    run: RunDir, held: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "JOB_WAIT_S", 0.1)
    job = QueuedJob()
    with pytest.raises(LockedError):
        lease.acquire_for_job(run, job, TIMEOUT_S, print)
    assert job.requeued == []


def test_a_signal_ends_the_wait_and_the_job_is_requeued(
    run: RunDir, held: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = QueuedJob()
    with pytest.raises(StoppedError, match=r"in use by process .*, job 12; preempted \(SIGTERM\)") as caught:
        lease.acquire_for_job(run, job, TIMEOUT_S, lambda _: monkeypatch.setattr(STOP, "signum", signal.SIGTERM))
    assert job.requeued == ["preempted"]
    assert caught.value.status == ExitStatus.INTERRUPTED


@pytest.mark.parametrize("held_by", [{}, {"job_id": "12", "pid": 1, "host": "another"}])
@pytest.mark.parametrize(("job", "requeued"), [(QueuedJob(), ["preempted"]), (LocalJob(), [])])
def test_a_signal_ends_the_wait_for_a_sign_of_life(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, job: LocalJob, requeued: list[str], held_by: dict[str, Any]
) -> None:
    """The holder is on another machine. A job that waited on would be killed at the end of its grace time."""
    run.lease.mkdir(parents=True)
    (run.lease / "00000001.json").write_text(json.dumps(held_by))
    asked = getattr(job, "requeued", [])
    asked.clear()
    with pytest.raises(StoppedError, match="may be in use by process") as caught:
        lease.acquire_for_job(run, job, 3600.0, lambda _: monkeypatch.setattr(STOP, "signum", signal.SIGTERM))
    assert asked == requeued
    assert caught.value.status == ExitStatus.INTERRUPTED
    assert [path.name for path in run.lease.iterdir()] == ["00000001.json"]


def test_second_of_two_commands_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let both look before either writes."""
    run_dir = f"run.dir={tmp_path / 'run'}"
    first, second = compose([run_dir, "seed=1"]), compose([run_dir, "seed=2"])
    run, launched = RunDir(tmp_path / "run"), []

    def attempt(run_dir: Path, job: object = None, lease: Lease | None = None) -> int:
        assert lease is not None
        lease.check_fence()
        with pytest.raises(LockedError):
            start.run_here(PlannedRun(second, "new", ""))
        launched.append(run.config.read_text())
        return 0

    monkeypatch.setattr("runner.training.attempt.attempt", attempt)
    assert start.run_here(PlannedRun(first, "new", "")) == 0
    with pytest.raises(UserError, match="seed: 1 -> 2 cannot be changed"):
        start.run_here(PlannedRun(second, "new", ""))
    assert launched == [first.text]


def test_a_superseded_command_does_not_freeze_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop it after its second look at the run, while a queued job trains."""
    job = compose([f"run.dir={tmp_path / 'run'}"])
    run = RunDir(tmp_path / "run")

    def stopped() -> dict[str, object]:
        run.config.write_text("of the newer attempt")
        (run.lease / "00000009.json").write_text("{}")
        return {}

    monkeypatch.setattr(provenance, "describe_code", stopped)
    monkeypatch.setattr(provenance, "code_changes", lambda *_: [])
    with pytest.raises(SupersededError):
        start.run_here(PlannedRun(job, "new", ""))
    assert run.config.read_text() == "of the newer attempt"
    assert not run.code.exists()


def test_command_makes_nothing_in_place_of_a_moved_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Suspend the command for longer than others wait for it. Its message does not blame the disk either."""
    job = compose([f"run.dir={tmp_path / 'run'}"])

    def moved() -> dict[str, object]:
        (tmp_path / "run").rename(tmp_path / "elsewhere")
        return {}

    monkeypatch.setattr(provenance, "describe_code", moved)
    with pytest.raises(SupersededError):
        start.run_here(PlannedRun(job, "new", ""))
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]


def test_a_superseded_command_does_not_call_a_run_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit status says that another process has finished the run."""
    job = compose([f"run.dir={tmp_path / 'run'}"])
    run = RunDir(tmp_path / "run")

    def stopped(*arguments: object, **options: object) -> PlannedRun:
        (run.lease / "00000009.json").write_text("{}")
        return PlannedRun(job, "finished", "finished, all 5 steps")

    monkeypatch.setattr(start, "plan_run", stopped)
    with pytest.raises(SupersededError):
        start.run_here(PlannedRun(job, "new", ""))

"""A job that starts while the one before still saves waits for it; nobody else does, and a signal ends the wait."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runner import turn
from runner.errors import ExitStatus, LockedError, StoppedError
from runner.job import LocalJob
from runner.lease import Lease
from runner.run_dir import RunDir
from runner.signals import STOP

TIMEOUT_S = 0.3


class QueuedJob(LocalJob):
    """One that a scheduler starts."""

    auto_restarts = True

    def __init__(self) -> None:
        self.left: list[str] = []

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "job_id": "13"}

    def cause(self, signum: int) -> str:
        return "preempted"

    def leave(self, cause: str) -> str:
        self.left.append(cause)
        return cause


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


@pytest.fixture
def held(run: RunDir) -> Iterator[Lease]:
    with Lease.acquire(run.lease, {"job_id": "12"}, TIMEOUT_S) as lease:
        yield lease


def test_a_job_waits_until_the_one_before_has_left(run: RunDir, held: Lease) -> None:
    told: list[str] = []

    def leave(text: str) -> None:
        told.append(text)
        held.release()

    with turn.take(run, QueuedJob(), TIMEOUT_S, leave) as lease:
        assert lease.fence == held.fence + 1
    assert "job 12" in told[0]


def test_a_process_that_somebody_started_does_not_wait(run: RunDir, held: Lease) -> None:
    with pytest.raises(LockedError):
        turn.take(run, LocalJob(), TIMEOUT_S, print)


def test_a_holder_that_trains_on_is_not_waited_for_without_end(
    run: RunDir, held: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn, "JOB_WAIT_S", 0.1)
    job = QueuedJob()
    with pytest.raises(LockedError):
        turn.take(run, job, TIMEOUT_S, print)
    assert job.left == []


def test_a_signal_ends_the_wait_and_the_job_sees_to_its_coming_back(
    run: RunDir, held: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = QueuedJob()
    with pytest.raises(StoppedError, match=r"in use by process .*, job 12; preempted \(SIGTERM\)") as caught:
        turn.take(run, job, TIMEOUT_S, lambda _: monkeypatch.setattr(STOP, "signum", signal.SIGTERM))
    assert job.left == ["preempted"]
    assert caught.value.status == ExitStatus.INTERRUPTED

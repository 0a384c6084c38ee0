"""A job that starts while the one before still saves waits for it; nobody else does, and a signal ends the wait."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runner import command, turn
from runner.config import compose
from runner.errors import ExitStatus, LockedError, StoppedError, UserError
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


def test_a_command_holds_its_run_from_the_look_to_the_attempt(run: RunDir) -> None:
    with turn.reserved(run, TIMEOUT_S, print):
        with pytest.raises(LockedError):
            Lease.acquire(run.lease, None, TIMEOUT_S)
        lease = turn.take(run, LocalJob(), TIMEOUT_S, print)
    lease.check()  # the attempt's own from then on
    lease.release()
    with turn.reserved(run, TIMEOUT_S, print):
        pass  # nothing came of it
    Lease.acquire(run.lease, None, TIMEOUT_S).release()


def test_of_two_commands_the_second_neither_trains_nor_changes_the_config(tmp_path: Path) -> None:
    """Both have looked before either wrote."""
    place = f"run.dir={tmp_path / 'run'}"
    first, second = compose([place, "seed=1"]), compose([place, "seed=2"])
    run, launched = RunDir(tmp_path / "run"), []

    class Launcher:
        in_process, dry_run = True, False

        def launch(self, run_dirs: list[Path], attempt: str) -> int:
            with pytest.raises(LockedError):
                command._here(second, self)
            launched.append(run.config.read_text())
            return 0

    assert command._here(first, Launcher()) == 0
    with pytest.raises(UserError, match="seed: 1 -> 2 cannot be changed"):
        command._here(second, Launcher())
    assert launched == [first.text]
    assert run.config.read_text() == first.text

"""Limits for a job that Slurm restarts again and again, decided at the start of an attempt from the records."""

from __future__ import annotations

import json
import signal
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_attempts import TinyJob, tiny_attempts

from launch.requeue import REQUEUED_CAUSES
from runner.errors import CrashLoopError, ExitStatus, FileError, PeerError, SupersededError, TimeoutsError
from runner.rundir.attempt_log import CRASH_LOOP_LIMIT, AttemptLog
from runner.rundir.paths import RunDir
from runner.system.signals import STOP
from runner.training import attempt as training_attempt

IDENTITY = {"restart_count": 0, "host": "here", "node": "n1"}
FAILURES = ("time limit", "killed", "node failure", "crash", "hang")
GAINED = st.sampled_from([False] * 9 + [True])
CAUSES = (*FAILURES, "preempted", "requeued", "interrupted")


def begin(run: RunDir, job_id: str = "7", submission: str | None = None) -> AttemptLog:
    identity = {**IDENTITY, "job_id": job_id, "submission": submission}
    return AttemptLog.begin(run, identity, 100, lambda record: "killed")


def test_attempts_of_a_reused_job_id_are_not_counted(tmp_path: Path) -> None:
    for _ in range(CRASH_LOOP_LIMIT):
        begin(RunDir(tmp_path), submission="one")  # and then it is killed
    begin(RunDir(tmp_path), submission="another").check_budgets(max_timeouts=1)
    begin(RunDir(tmp_path), submission="one")
    for _ in range(CRASH_LOOP_LIMIT):
        log = begin(RunDir(tmp_path), submission="another")
    log.check_budgets()
    with pytest.raises(CrashLoopError):
        begin(RunDir(tmp_path), submission="another").check_budgets()


def test_time_limits_in_every_first_step_end_the_run(tmp_path: Path) -> None:
    """Such an attempt never reaches the end at which it could count the time limit."""
    run = RunDir(tmp_path)
    for _ in range(2):
        log = begin(run)
        log.check_budgets(max_timeouts=2)
        log.note(cause="time limit")  # and then it is killed
    log = begin(run)
    with pytest.raises(TimeoutsError, match=r"2 time limits in a row .* at step 0 .* increase launcher\.time, or save"):
        log.check_budgets(max_timeouts=2)


def test_job_at_its_limit_of_time_limits_starts_no_attempt(tmp_path: Path) -> None:
    """The job may be in the queue again: a timer requeues it before its end if a save takes long."""
    log = begin(RunDir(tmp_path))
    log.note(cause="time limit")
    with pytest.raises(TimeoutsError):
        log.check_timeouts(max_timeouts=1)
    log.end("timeouts", 1)
    with pytest.raises(TimeoutsError, match="1 time limits in a row"):
        begin(RunDir(tmp_path)).check_budgets(max_timeouts=1)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    history=st.lists(st.tuples(st.sampled_from(CAUSES), GAINED, st.booleans()), max_size=6),
    max_timeouts=st.one_of(st.none(), st.integers(1, 5)),
    others=st.integers(0, 3),
)
def test_the_budget_agrees_with_a_recount_of_the_attempts(
    history: list[tuple[str, bool, bool]], max_timeouts: int | None, others: int
) -> None:
    """Close the attempts themselves, or kill them and let the next one close them."""
    with TemporaryDirectory() as folder:
        run = RunDir(Path(folder))
        for number, (cause, gained, closed) in enumerate(history):
            log = begin(run, job_id="6" if number < others else "7")
            if gained:
                saved = run.checkpoint(number + 1)
                saved.mkdir(parents=True)
                (saved / "manifest.json").write_text(json.dumps({"step": number + 1, "sha256": ""}))
            if closed:
                log.end(cause, 75)
            else:
                log.note(cause=cause)  # killed
        log = begin(run)
        ended = [
            # An interruption that was noted alone may follow from a crash.
            "killed" if cause == "interrupted" and not closed else cause
            for cause, gained, closed in reversed(history[others:])
            for cause in ([cause] if not gained else ["progress"])
        ]
        stuck = list(takewhile(lambda cause: cause in FAILURES, ended))
        timeouts = stuck.count("time limit") if max_timeouts is not None else 0
        if max_timeouts is not None and timeouts >= max_timeouts:
            with pytest.raises(TimeoutsError):
                log.check_budgets(max_timeouts)
        elif len(stuck) - timeouts >= CRASH_LOOP_LIMIT:
            with pytest.raises(CrashLoopError):
                log.check_budgets(max_timeouts)
        else:
            log.check_budgets(max_timeouts)


@pytest.mark.parametrize("cause", sorted(REQUEUED_CAUSES))
def test_the_status_shows_that_a_run_is_requeued(tmp_path: Path, cause: str) -> None:
    log = begin(RunDir(tmp_path))
    log.auto_restarts = True
    log.announce_end(cause)
    assert json.loads(log.run.status.read_text())["state"] == "requeued"


@pytest.mark.parametrize("restarts", [True, False])
def test_rank_that_lost_another_has_not_failed_after_a_restart(tmp_path: Path, restarts: bool) -> None:
    """Rank 0 yields the verdict, and the batch script requeues the job."""

    class Restarted(TinyJob):
        def yield_verdict(self, reason: str | None = None) -> bool:
            return restarts

    def lose_a_peer(*arguments: object) -> None:
        raise PeerError("another rank of this job has ended")

    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    with tiny_attempts() as patch:
        patch.setattr("runner.training.session.Session.open", lose_a_peer)
        assert training_attempt.attempt(run.path, Restarted(0)) == 1
    status = json.loads(run.status.read_text())
    assert (status["state"], status["cause"]) == ("requeued" if restarts else "failed", "crash")


@pytest.mark.parametrize(
    ("holder", "continued"),
    [
        ({"job_id": "7", "restart_count": 0}, False),  # an earlier start, on a node that was cut off
        ({"job_id": "7", "restart_count": 2}, True),
        ({"job_id": "8", "restart_count": 0}, True),
        ({}, False),  # a command, such as `checkpoints --prune`, while the job was suspended
        (None, True),  # the run was moved or removed
    ],
)
def test_superseded_job_ends_for_good_only_with_a_successor(
    tmp_path: Path, holder: dict[str, object] | None, continued: bool
) -> None:
    yielded = []

    class Suspended(TinyJob):
        def yield_verdict(self, reason: str | None = None) -> bool:
            yielded.append(reason)
            return True

    run = RunDir(tmp_path / "run")
    run.path.mkdir()

    def taken(*arguments: object) -> None:
        if holder is None:
            run.path.rename(tmp_path / "moved")
        else:
            (run.lease / "00000002.json").write_text(json.dumps({"pid": 1, **holder}))
        raise SupersededError("taken over")

    with tiny_attempts() as patch:
        patch.setattr("runner.training.session.Session.open", taken)
        assert training_attempt.attempt(run.path, Suspended(1)) == ExitStatus.SUPERSEDED
    assert bool(yielded) != continued


def test_unreadable_checkpoint_dir_does_not_count_as_timeout(tmp_path: Path) -> None:
    """At the time limit the job is requeued, and its next start looks again."""

    class Limited(TinyJob):
        auto_restarts, requeued = True, False
        max_timeouts: int | None = 1

        def cause(self, signum: int) -> str:
            return "time limit"

        def requeue_if_needed(self, cause: str) -> str:
            self.requeued = True
            return cause

    def refuse(*arguments: object) -> None:
        raise FileError("checkpoints cannot be read")

    run, job = RunDir(tmp_path / "run"), Limited(0)
    run.path.mkdir()
    with tiny_attempts() as patch:
        patch.setattr(AttemptLog, "check_timeouts", refuse)
        patch.setattr(STOP, "signum", signal.SIGUSR2)
        assert training_attempt.attempt(run.path, job) == ExitStatus.INTERRUPTED
    assert job.requeued

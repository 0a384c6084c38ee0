"""When a job is requeued, by which process, and under which cause (docs/slurm.md), with fake Slurm commands on PATH."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from datetime import datetime, timedelta
from pathlib import Path
from unittest.mock import Mock

import pytest
from fake_slurm import RUNNING, FakeSlurm, inside, job_line, row, slurm
from runs import ROOT

from launch import job, rendezvous, requeue, scheduler
from launch.slurm import SlurmLauncher
from runner.errors import ExitStatus
from runner.system import clock, files, processes

__all__ = ["inside", "slurm"]

AT = "2026-01-01T00:00:00"
ENDING = {**RUNNING, "JobState": "COMPLETING"}
SILENT = "Unable to contact slurm controller\n"


# The cause of a stop


# The signals as measured on a real cluster, and how the job is then requeued. Slurm would requeue a cancelled
# job as well, unless it is asked for a job that is not over (`incomplete`).
CAUSES = [
    (signal.SIGTERM, {**RUNNING, "PreemptTime": AT}, "preempted", "incomplete 12_1"),
    (signal.SIGUSR2, {**RUNNING, "PreemptTime": AT}, "preempted", "incomplete 12_1"),
    (signal.SIGUSR2, RUNNING, "time limit", "incomplete 12_1"),
    (signal.SIGUSR1, RUNNING, "time limit", "incomplete 12_1"),
    # States of a running job until the last node has acknowledged the signal.
    (signal.SIGTERM, {**RUNNING, "JobState": "SIGNALING", "PreemptTime": AT}, "preempted", "incomplete 12_1"),
    (signal.SIGTERM, {**RUNNING, "JobState": "STOPPED", "PreemptTime": AT}, "preempted", "incomplete 12_1"),
    (signal.SIGTERM, ENDING, "cancelled", None),
    (signal.SIGTERM, {**ENDING, "Reason": "TimeLimit"}, "time limit", "12_1"),
    (signal.SIGTERM, {"JobState": "COMPLETING", "Restarts": "1"}, "requeued", None),
    (signal.SIGTERM, RUNNING, "interrupted", "incomplete 12_1"),
    (signal.SIGINT, RUNNING, "cancelled", None),
    # PreemptMode=CANCEL without a grace time ends the job in the second of the preemption; a scancel does not.
    (signal.SIGTERM, {**ENDING, "PreemptTime": AT, "EndTime": AT}, "preempted", "12_1"),
    (signal.SIGTERM, {**ENDING, "PreemptTime": AT, "EndTime": "2026-01-01T00:00:04"}, "cancelled", None),
    # The batch script or the node was lost, and this process lives on.
    (signal.SIGTERM, {**ENDING, "Reason": "JobLaunchFailure"}, "node failure", "12_1"),
    (signal.SIGTERM, {**ENDING, "Reason": "NodeDown"}, "node failure", "12_1"),
    # Not a limit that was reached: the reason for its wait when it was cancelled.
    (signal.SIGTERM, {**ENDING, "Reason": "BeginTime"}, "cancelled", None),
]


@pytest.mark.parametrize(("signum", "state", "cause", "requeues"), CAUSES)
def test_cause_follows_from_the_jobs_state(
    inside: FakeSlurm, signum: int, state: dict[str, str], cause: str, requeues: str | None
) -> None:
    inside.shows_job(**state)
    here = job.SlurmJob()
    assert here.cause(signum) == cause
    assert here.requeue_if_needed(cause) == cause
    # A task of an array is named in this form: its job id may be that of the whole array.
    assert set(inside.calls("scontrol show job")) <= {"scontrol show job -o 12_1"}
    assert inside.calls("scontrol requeue")[-1:] == ([f"scontrol requeue {requeues}"] if requeues else [])


def test_a_signal_may_arrive_before_the_state_that_explains_it(
    inside: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside.shows_job(**RUNNING)
    monkeypatch.setattr(clock, "sleep", lambda seconds: inside.shows_job(**{**ENDING, "Restarts": "1"}))
    assert job.SlurmJob().cause(signal.SIGTERM) == "requeued"


def test_cause_follows_from_the_signal_if_slurm_is_silent(inside: FakeSlurm) -> None:
    inside.fails("scontrol_show_job", SILENT)
    assert job.SlurmJob().cause(signal.SIGUSR2) == "time limit"
    assert job.SlurmJob().cause(signal.SIGTERM) == "interrupted"


@pytest.mark.parametrize(
    ("end", "cause"),
    [
        ("2026-01-01T00:03:00", "time limit"),
        ("2026-01-01T00:07:59", "time limit"),  # a minute early, by clocks that differ
        ("2026-01-01T00:08:01", "interrupted"),
        ("2026-01-02T00:00:00", "interrupted"),
        ("Unknown", "interrupted"),
    ],
)
def test_a_signal_long_before_the_time_limit_is_not_its_notice(
    inside: FakeSlurm, monkeypatch: pytest.MonkeyPatch, end: str, cause: str
) -> None:
    """Such a signal comes from `scancel --signal=USR2`, by hand."""
    monkeypatch.setattr(clock, "wall", lambda: datetime.fromisoformat(f"{AT}+00:00").timestamp())
    inside.shows_job(**{**RUNNING, "EndTime": end})
    here = job.SlurmJob(notice_s=120)
    assert here.cause(signal.SIGUSR2) == cause
    assert here.requeue_if_needed(cause) == cause
    assert len(inside.calls("scontrol requeue")) == 1


def test_a_kill_is_distinguished_from_a_lost_node(
    inside: FakeSlurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setenv("RUNNER_JOB_FOLDER", str(tmp_path))
    before = {"job_id": "12_1", "restart_count": 0}
    assert job.SlurmJob().cause_of_loss(before) == "node failure"
    starts = requeue.starts_file(tmp_path, "12_1")
    starts.write_text(f"{'1 it ended with status 137':{requeue.NOTE_BYTES}}\n")
    here = job.SlurmJob()
    here.on_started()
    assert here.cause_of_loss(before) == "killed"
    assert requeue.failed_starts(starts) == (0, "")
    assert job.SlurmJob().cause_of_loss({"job_id": "11", "restart_count": 0}) == "killed"
    assert job.SlurmJob(submission="s").cause_of_loss(before) == "killed"  # an earlier job with the same id


@pytest.mark.parametrize(
    ("node", "cause"),
    [
        ("State=IDLE BootTime=2025-12-31T00:00:00", "requeued"),
        ("State=ALLOCATED+DRAIN BootTime=2025-12-31T00:00:00", "requeued"),
        ("State=DOWN* BootTime=2025-12-31T00:00:00", "node failure"),
        ("State=IDLE*+DRAIN BootTime=2025-12-31T00:00:00", "node failure"),
        ("State=IDLE+NOT_RESPONDING BootTime=2025-12-31T00:00:00", "node failure"),
        ("State=IDLE BootTime=2026-01-01T00:00:01", "node failure"),
        ("State=IDLE BootTime=None SlurmdStartTime=2026-01-02T00:00:00", "node failure"),
    ],
)
def test_restart_without_a_signal_is_a_lost_node_if_one_was(
    inside: FakeSlurm, monkeypatch: pytest.MonkeyPatch, node: str, cause: str
) -> None:
    """A job that is requeued while suspended has no chance to note the cause either."""
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    inside.prints("scontrol_show_node", f"NodeName=n1 {node}\n")
    before = {"job_id": "12_1", "restart_count": 0, "node": "n1", "started": 1767225600.0}
    assert job.SlurmJob().cause_of_loss(before) == cause
    inside.fails("scontrol_show_node", SILENT)
    assert job.SlurmJob().cause_of_loss(before) == "node failure"


OWN, THEIRS = "a" * 32, "b" * 32
WRAPPED = {"Command": "/var/spool/wrapped.sh"}  # sbatch is a script of the site, which submits a copy
# A record of another job with the id of this one, which began just now.
ANOTHER = [
    {"Command": f"/x/.submission_file_{THEIRS}-1.sh"},  # of the same run, even
    {"Command": f"/x/.submission_file_{THEIRS}-1.sh", "SubmitTime": "2999-01-01T00:00:00"},
    {"Command": f"/x/.submission_file_{OWN}.sh"},  # of somebody's own submitit
    {"Restarts": "0"},
    {**WRAPPED, "UserId": "somebody(99999)"},
    {**WRAPPED, "Restarts": "0"},  # this one has been restarted once
    {**WRAPPED, "JobName": "theirs", "SubmitTime": "2999-01-01T00:00:00"},
]
SAME = [
    {"JobName": "renamed", "SubmitTime": "2999-01-01T00:00:00"},
    {**WRAPPED, "JobName": "renamed", "SubmitTime": "2000-01-01T00:00:00"},
    {**WRAPPED, "JobName": "mine", "SubmitTime": "2999-01-01T00:00:00"},  # the clocks of the machines differ
]


@pytest.mark.parametrize(("fields", "ours"), [*((each, False) for each in ANOTHER), *((each, True) for each in SAME)])
def test_a_job_that_reuses_the_id_of_this_one_is_left_alone(
    inside: FakeSlurm,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    fields: dict[str, str],
    ours: bool,
) -> None:
    """Such a state is not this job's, and neither a rank nor the batch script requeues the other job."""
    own = {"JobName": "mine", "UserId": f"me({os.getuid()})", **RUNNING, "Restarts": "1"}
    script = {"SubmitTime": "2000-01-01T00:00:00", "Command": f"/x/.submission_file_{OWN}-1.sh"}
    for name, value in {"RESTART_COUNT": "1", "JOB_NAME": "mine", "JOB_UID": str(os.getuid())}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    inside.prints("scontrol_show_job", job_line(**{**own, **script, **fields}))
    here = job.SlurmJob(submission=OWN)
    assert here.cause(signal.SIGUSR2) == ("time limit" if ours else "cancelled")
    assert here.requeue_if_needed("time limit") == ("time limit" if ours else "cancelled")
    assert ("belongs to another job" in capsys.readouterr().err) != ours
    assert len(inside.calls("scontrol requeue")) == ours
    assert batch_script(inside, tmp_path / "run", "exit 137", [], submission=OWN) == 137
    assert len(inside.calls("scontrol requeue")) == 2 * ours
    said = "belongs to another job" in capsys.readouterr().out
    assert said == (not ours and fields.get("Restarts") is None)  # (with fewer restarts it cannot know more)


def test_a_signal_before_the_attempt_has_handlers_is_remembered(inside: FakeSlurm) -> None:
    before = {signum: signal.getsignal(signum) for signum in job.STOP_SIGNALS}
    try:
        here = job.SlurmJob()
        here.catch_signals()
        os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGTERM)
        assert here.early_signal == signal.SIGUSR2
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


# Requeueing from inside the job


def test_step_longer_than_the_notice_requeues_before_the_kill(
    inside: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else would requeue it. An attempt whose timer requeued the job keeps its cause."""
    monkeypatch.setattr(requeue, "KILL_MARGIN_S", 3600.0)  # the end is nearer than that: at once
    soon = (requeue.utc_now() + timedelta(minutes=1)).isoformat(timespec="seconds")
    inside.shows_job(**RUNNING, EndTime=soon)
    here = job.SlurmJob()
    assert here.cause(signal.SIGUSR2) == "time limit"
    deadline = time.monotonic() + 60
    while not inside.calls("scontrol requeue") and time.monotonic() < deadline:
        time.sleep(0.01)
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join()
    assert inside.calls("scontrol requeue") == ["scontrol requeue incomplete 12_1"]
    inside.shows_job(JobState="COMPLETING", Restarts="1")
    assert here.requeue_if_needed("time limit") == "time limit"
    assert len(inside.calls("scontrol requeue")) == 1


def test_timer_and_end_of_an_attempt_requeue_once(inside: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second request would bring back a job that was cancelled after the first."""
    inside.shows_job(**RUNNING)
    here, asked = job.SlurmJob(), threading.Event()

    def cancelled_after_it(*_: object, **__: object) -> None:
        asked.set()
        time.sleep(0.2)
        inside.shows_job(**ENDING)

    monkeypatch.setattr(scheduler, "requeue", Mock(side_effect=cancelled_after_it))
    timer = threading.Thread(target=here._requeuer._requeue_unfinished)
    timer.start()
    asked.wait(60)
    assert here.requeue_if_needed("preempted") == "cancelled"
    timer.join()
    assert scheduler.requeue.call_count == 1  # type: ignore[attr-defined]


def test_job_cancelled_during_its_notice_is_not_requeued(inside: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    delays: list[float] = []

    def cancelled_meanwhile(seconds: float, function: Callable[[], None]) -> None:
        delays.append(seconds)
        inside.shows_job(**ENDING)
        function()

    monkeypatch.setattr(clock, "call_later", cancelled_meanwhile)
    soon = (requeue.utc_now() + timedelta(minutes=1)).isoformat(timespec="seconds")
    inside.shows_job(**RUNNING, EndTime=soon)
    assert job.SlurmJob().cause(signal.SIGUSR2) == "time limit"
    assert 50 < delays[0] <= 55  # five seconds before its end, at the latest
    assert not inside.calls("scontrol requeue")


def test_nothing_is_requeued_while_slurm_does_not_answer(inside: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job may have been cancelled: a requeue on a guess would undo a person's decision."""
    inside.fails("scontrol_show_job", SILENT)
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            inside.shows_job(**ENDING)

    monkeypatch.setattr(clock, "sleep", pause)
    assert job.SlurmJob().requeue_if_needed("preempted") == "cancelled"
    assert not inside.calls("scontrol requeue")


def test_job_cancelled_just_before_its_requeue_stays_cancelled(
    inside: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside.shows_job(**RUNNING)
    ask = scheduler.requeue

    def cancelled_first(job_id: str, only_running: bool) -> None:
        inside.shows_job(**ENDING)
        ask(job_id, only_running)

    monkeypatch.setattr(scheduler, "requeue", cancelled_first)
    assert job.SlurmJob().requeue_if_needed("preempted") == "cancelled"
    assert inside.calls("scontrol requeue") == ["scontrol requeue incomplete 12_1"]


@pytest.mark.parametrize("end", [{"PreemptTime": AT, "EndTime": AT}, {"Reason": "TimeLimit"}])
def test_job_ended_by_slurm_before_its_requeue_is_requeued(
    inside: FakeSlurm, monkeypatch: pytest.MonkeyPatch, end: dict[str, str]
) -> None:
    """The job ended to make room, or at its time limit. Requests for a job that runs then have no effect."""
    inside.shows_job(**RUNNING)
    ask = scheduler.requeue

    def ended_first(job_id: str, only_running: bool) -> None:
        inside.shows_job(**{**ENDING, **end})
        ask(job_id, only_running)

    monkeypatch.setattr(scheduler, "requeue", ended_first)
    assert job.SlurmJob().requeue_if_needed("preempted") == "preempted"
    assert inside.calls("scontrol requeue") == ["scontrol requeue incomplete 12_1", "scontrol requeue 12_1"]


def test_request_counts_once_slurm_has_reported_the_job(inside: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job may have ended just before, so that the request had no effect. Slurm may not answer the second query."""
    inside.shows_job(**RUNNING)
    ask = scheduler.requeue

    def ended_first(job_id: str, only_running: bool) -> None:
        if only_running:
            inside.shows_job(**{**ENDING, "PreemptTime": AT, "EndTime": AT})
            inside.fails("scontrol_show_job", SILENT)
        ask(job_id, only_running)

    monkeypatch.setattr(scheduler, "requeue", ended_first)
    monkeypatch.setattr(clock, "sleep", lambda seconds: (inside.folder / "scontrol_show_job.err").unlink())
    assert job.SlurmJob().requeue_if_needed("preempted") == "preempted"
    assert inside.calls("scontrol requeue") == ["scontrol requeue incomplete 12_1", "scontrol requeue 12_1"]


@pytest.mark.parametrize("failure", ["no process", "bytes"])
def test_slurm_command_that_cannot_start_has_not_answered(
    inside: FakeSlurm, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    """The machine is short of processes, or a path has another encoding: the job is looked up again."""
    inside.shows_job(**RUNNING)
    monkeypatch.setattr(clock, "sleep", lambda seconds: None)
    answer = b"JobState=RUNNING PreemptTime=None Command=/\\351\\n"
    if failure == "bytes":
        (inside.folder / "scontrol").write_bytes(b"#!/bin/sh\nprintf '" + answer + b"'\n")
    else:
        refused = BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        monkeypatch.setattr(processes, "start", Mock(side_effect=refused))
    assert job.SlurmJob().cause(signal.SIGTERM) == "interrupted"


def test_a_job_is_requeued_although_the_sites_default_is_not_to(inside: FakeSlurm) -> None:
    inside.shows_job(**RUNNING)
    inside.fails("scontrol_requeue_incomplete", "Requested operation is presently disabled for job 12_1\n")
    (inside.folder / "scontrol_update_jobid=12_1.then").write_text("scontrol_requeue_incomplete.err")
    assert job.SlurmJob().requeue_if_needed("preempted") == "preempted"
    assert inside.calls("scontrol update") == ["scontrol update jobid=12_1 requeue=1"]
    assert len(inside.calls("scontrol requeue")) == 2


def test_silent_controller_does_not_count_as_a_refusal(inside: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exit in any of this time would end the job for good."""
    inside.fails("scontrol_show_job", SILENT)
    pauses = 0

    def pause(seconds: float) -> None:
        nonlocal pauses
        pauses += 1
        if pauses == 3 * requeue.MAX_REFUSALS:
            inside.shows_job(**RUNNING)

    monkeypatch.setattr(clock, "sleep", pause)
    assert job.SlurmJob().requeue_if_needed("interrupted") == "interrupted"
    assert len(inside.calls("scontrol requeue")) == 1


def test_a_job_that_slurm_has_lost_is_not_waited_for_for_ever(
    inside: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such a job cannot be requeued. A single answer may come from a controller that has not read its state yet."""
    lost = "slurm_load_jobs error: Invalid job id specified\n"
    inside.fails("scontrol_show_job", lost)
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == requeue.MAX_FORGOTTEN - 1:
            inside.fails("scontrol_show_job", SILENT)
        elif len(pauses) == requeue.MAX_FORGOTTEN:
            inside.fails("scontrol_show_job", lost)

    monkeypatch.setattr(clock, "sleep", pause)
    assert job.SlurmJob().requeue_if_needed("preempted") == "cancelled"
    assert len(pauses) == 2 * requeue.MAX_FORGOTTEN - 1  # they count in a row only
    assert not inside.calls("scontrol requeue")
    assert "Slurm has lost job 12_1: nothing is requeued" in capsys.readouterr().err


def test_a_refused_requeue_is_retried(inside: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    inside.shows_job(**RUNNING)
    inside.fails("scontrol_requeue_incomplete", SILENT)
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            inside.prints("scontrol_requeue_incomplete", "")

    monkeypatch.setattr(clock, "sleep", pause)
    assert job.SlurmJob().requeue_if_needed("time limit") == "time limit"
    assert len(inside.calls("scontrol requeue")) == 4
    assert pauses == [requeue.RETRY_S] * 3


def test_batch_script_decides_after_a_refused_requeue(
    inside: FakeSlurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No end of the job is near that would stop the attempts to requeue it."""
    monkeypatch.setenv("RUNNER_JOB_FOLDER", str(tmp_path))
    inside.shows_job(**RUNNING)
    inside.fails("scontrol_requeue_incomplete", "Access/permission denied\n")
    here = job.SlurmJob()
    assert here.requeue_if_needed("interrupted") == "interrupted"
    assert len(inside.calls("scontrol requeue")) == requeue.MAX_REFUSALS
    here.record_verdict()
    assert not requeue.verdict_file(tmp_path, "12_1", 0).exists()


def test_a_job_that_is_queued_already_counts_as_requeued(inside: FakeSlurm) -> None:
    inside.shows_job(**RUNNING)
    inside.fails("scontrol_requeue_incomplete", "Job is pending execution for job 12_1\n")
    assert job.SlurmJob().requeue_if_needed("preempted") == "preempted"
    assert len(inside.calls("scontrol requeue")) == 1


def test_a_job_that_is_cancelled_while_it_saves_is_not_requeued(inside: FakeSlurm) -> None:
    inside.shows_job(**ENDING)
    assert job.SlurmJob().requeue_if_needed("preempted") == "cancelled"
    assert not inside.calls("scontrol requeue")


# Between the ranks and the batch script


def test_impossible_requeues_are_left_to_the_batch_script(
    inside: FakeSlurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Python may be in a container without Slurm's commands; the batch script is not."""
    monkeypatch.setenv("RUNNER_JOB_FOLDER", str(tmp_path))
    monkeypatch.setenv("PATH", "/nonexistent")
    here = job.SlurmJob()
    cause = here.cause(signal.SIGUSR2)
    assert here.requeue_if_needed(cause) == "time limit"
    here.record_verdict()
    assert not requeue.verdict_file(tmp_path, "12_1", 0).exists()


@pytest.mark.parametrize("decides", [True, False])
def test_batch_script_learns_how_a_rank_ended_the_job(
    inside: FakeSlurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, decides: bool
) -> None:
    """A rank that ends because another one did reports nothing."""
    monkeypatch.setenv("RUNNER_JOB_FOLDER", str(tmp_path))
    monkeypatch.setenv("SLURM_RESTART_COUNT", "3")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    module = type(sys)("somewhere")

    def attempt(run_dir: Path, job: job.SlurmJob) -> int:
        if not decides:
            job.yield_verdict()
        return 1

    module.attempt = attempt  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "somewhere", module)
    before = {signum: signal.getsignal(signum) for signum in (*job.STOP_SIGNALS, signal.SIGCONT)}
    try:
        with pytest.raises(SystemExit) as left:
            job.start(str(tmp_path), "somewhere:attempt")
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    assert left.value.code == 1
    assert [path.name for path in tmp_path.glob("*.verdict")] == (["12_1.3.verdict"] if decides else [])


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ESTALE, "Stale file handle"), "OSError: [Errno 116] Stale file handle"),
        (ImportError("no module"), "ImportError: no module"),
    ],
)
def test_attempt_that_cannot_be_imported_waits_for_a_start(
    inside: FakeSlurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, reason: str
) -> None:
    """The environment may work again by then. The batch script counts such starts."""
    monkeypatch.setenv("RUNNER_JOB_FOLDER", str(tmp_path))
    monkeypatch.setattr(job.SlurmJob, "catch_signals", lambda self: None)
    monkeypatch.setattr(rendezvous, "export", Mock(side_effect=error))
    starts = requeue.starts_file(tmp_path, "12_1")
    starts.write_text(f"{1:<{requeue.NOTE_BYTES}}\n")
    with pytest.raises(type(error)):
        job.start(str(tmp_path), "somewhere:attempt")
    assert not list(tmp_path.glob("*.verdict"))
    assert requeue.failed_starts(starts) == (1, reason)


def test_an_attempt_knows_the_submission_of_its_job(
    slurm: FakeSlurm, inside: FakeSlurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The attempt reads the name that the command wrote, the same as in job.json."""
    run = tmp_path / "run"
    run.mkdir()
    slurm.shows_job(JobName="run")
    assert SlurmLauncher().launch([run], "somewhere:attempt") == 0
    monkeypatch.delenv("SLURM_ARRAY_JOB_ID", raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    identities: list[dict[str, object]] = []
    module = type(sys)("somewhere")
    module.attempt = lambda _, job: identities.append(job.identity())  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "somewhere", module)
    monkeypatch.setattr(job.SlurmJob, "catch_signals", lambda self: None)
    monkeypatch.setattr(rendezvous, "export", lambda: None)
    with pytest.raises(SystemExit):
        job.main(str(run / "logs"))
    name = json.loads((run / "job.json").read_text())["submission"]
    assert identities[0]["submission"] == name
    assert f"REQUEUE_SUBMISSION={name}" in (run / "logs" / "12_submission.sh").read_text().splitlines()


@pytest.mark.parametrize("own", [True, False])
def test_reused_job_id_does_not_do_the_earlier_jobs_work(
    inside: FakeSlurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: bool
) -> None:
    """The job finds its file by id. Until the command has renamed its file, that may be another run's."""
    monkeypatch.setenv("RUNNER_JOB_FOLDER", str(tmp_path))
    monkeypatch.setenv("REQUEUE_SUBMISSION", OWN)
    monkeypatch.setattr(job.SlurmJob, "catch_signals", lambda self: None)
    monkeypatch.setattr(rendezvous, "export", lambda: None)
    module = type(sys)("somewhere")
    module.attempt = lambda _, job: 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "somewhere", module)
    starts = requeue.starts_file(tmp_path, requeue.mark("12_1", OWN))
    starts.write_text(f"{0:<{requeue.NOTE_BYTES}}\n")
    with pytest.raises(SystemExit) as left:
        job.start(str(tmp_path), "somewhere:attempt", submission=OWN if own else THEIRS)
    assert left.value.code == (0 if own else ExitStatus.FAILED)
    # The batch script counts it as a start that failed, and requeues the job.
    assert [path.name for path in tmp_path.glob("*.verdict")] == ([f"12_1.{OWN}.0.verdict"] if own else [])
    assert ("an earlier job with this id" in requeue.failed_starts(starts)[1]) != own


@pytest.mark.parametrize("names_it", [True, False])
def test_job_of_a_run_with_another_job_trains_nothing(
    inside: FakeSlurm,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    names_it: bool,
) -> None:
    monkeypatch.setenv("RUNNER_JOB_FOLDER", str(tmp_path))
    monkeypatch.setattr(job.SlurmJob, "catch_signals", lambda self: None)
    monkeypatch.setattr(rendezvous, "export", lambda: None)
    module = type(sys)("somewhere")
    module.attempt = lambda _, job: 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "somewhere", module)
    (tmp_path / "job.json").write_text(json.dumps({"job_id": "13", "submission": "a" if names_it else "b"}))
    with pytest.raises(SystemExit) as left:
        job.start(str(tmp_path), "somewhere:attempt", submission="a")
    assert left.value.code == (0 if names_it else ExitStatus.SUPERSEDED)
    assert ("job.json names another job" in capsys.readouterr().out) != names_it
    assert len(list(tmp_path.glob("*.verdict"))) == 1


def test_log_on_a_full_disk_does_not_change_how_a_job_ends(
    inside: FakeSlurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RUNNER_JOB_FOLDER", str(tmp_path))
    monkeypatch.setattr(job.SlurmJob, "catch_signals", lambda self: None)
    (tmp_path / "job.json").write_text(json.dumps({"job_id": "13", "submission": "b"}))
    left: pytest.ExceptionInfo[SystemExit]
    # The file refuses once more when it is closed.
    with suppress(OSError), open("/dev/full", "w") as full, redirect_stdout(full), pytest.raises(SystemExit) as left:
        job.start(str(tmp_path), "somewhere:attempt", submission="a")
    assert left.value.code == ExitStatus.SUPERSEDED


def test_unreadable_count_of_failed_starts_is_not_reset(
    inside: FakeSlurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RUNNER_JOB_FOLDER", str(tmp_path))
    starts = requeue.starts_file(tmp_path, "12_1")
    starts.write_text(f"{2:<{requeue.NOTE_BYTES}}\n")
    here = job.SlurmJob()
    with monkeypatch.context() as patch:
        patch.setattr(files, "read_regular", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
        here.yield_verdict("no space")
    assert requeue.failed_starts(starts) == (2, "")


@pytest.mark.parametrize(("words", "end"), [(150, "word"), (10_000, " ...")])
def test_why_a_start_failed_is_stored_whole_or_marked_as_cut(tmp_path: Path, words: int, end: str) -> None:
    starts = requeue.starts_file(tmp_path, "12_1")
    starts.write_text(f"{0:<{requeue.NOTE_BYTES}}\n")
    requeue.note_failed_starts(starts, 2, " ".join(["word"] * words))
    assert requeue.failed_starts(starts)[1].endswith(end)
    assert len(starts.read_bytes()) == requeue.NOTE_BYTES + 1


# Requeueing from the batch script


def batch_script(
    slurm: FakeSlurm,
    run: Path,
    srun: str,
    setup: list[str],
    left: Sequence[str] = (),
    requeue_killed: bool = True,
    submission: str = "",
) -> int:
    """Run the batch script as task 1 of array 12, with `srun` as its ranks. Return its exit status.

    Check that apart from `left`, only the count of failed starts is left.
    """
    (slurm.folder / "srun").write_text(f"#!/bin/sh\n{srun}\n")
    (run / "logs").mkdir(parents=True, exist_ok=True)
    shown, named = "REQUEUE_SUBMISSION=''", f"REQUEUE_SUBMISSION='{submission}'"
    script = SlurmLauncher(setup=setup, requeue_killed=requeue_killed).preview([run]).replace(shown, named)
    assert named in script
    environment = {**os.environ, "SLURM_JOB_ID": "13", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "1"}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert "unbound" not in done.stderr
    starts = f"{requeue.mark('12_1', submission)}.starts"
    assert {path.name for path in (run / "logs").iterdir()} - {starts} == set(left), done.stderr
    return done.returncode


# No rank decided how the job ends:
# (state of the job, kills before, status of srun) -> (is requeued, kills after)
ENDS = [
    (RUNNING, 0, 137, True, 1),
    (RUNNING, 2, 143, True, 3),
    (RUNNING, 3, 137, False, 3),  # the environment is broken
    (RUNNING, 0, 1, True, 1),  # a memory limit, or an srun that reached no controller
    (RUNNING, 0, 0, False, 0),
    ({"JobName": "my JobState=FAILED run", **RUNNING, "Command": "/x JobState=FAILED Restarts=7"}, 0, 137, True, 1),
    ({**RUNNING, "Restarts": "1"}, 0, 137, False, 0),  # the job runs again already, elsewhere
    ({**RUNNING, "JobState": "SIGNALING"}, 0, 137, True, 1),
    (ENDING, 0, 137, False, 0),  # it was cancelled
    ({**ENDING, "PreemptTime": AT, "EndTime": "2026-01-01T00:00:04"}, 0, 143, False, 0),  # during its grace time
    # To make room, or for its time limit, before Python handled signals, or while it was killed.
    ({**ENDING, "PreemptTime": AT, "EndTime": AT}, 3, 143, True, 3),
    ({**ENDING, "Reason": "TimeLimit"}, 0, 137, True, 1),
    ({**ENDING, "Reason": "TimeLimit", "Restarts": "1"}, 0, 137, False, 0),
    ({**ENDING, "Reason": "BeginTime"}, 0, 137, False, 0),  # cancelled while it waited
    ({**RUNNING, "JobState": "CANCELLED"}, 0, 137, False, 0),
    ({**RUNNING, "PreemptTime": AT}, 3, 143, True, 3),  # before Python handled signals, any number of times
]


@pytest.mark.parametrize(("state", "before", "status", "requeued", "after"), ENDS)
def test_batch_script_requeues_a_job_with_a_killed_rank(
    slurm: FakeSlurm,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    state: dict[str, str],
    before: int,
    status: int,
    requeued: bool,
    after: int,
) -> None:
    """Include a setup as strict as a user's may be; the tests below have none."""
    slurm.prints("scontrol_show_job", job_line(**state) + "\n")
    starts = requeue.starts_file(tmp_path / "run" / "logs", "12_1")
    starts.parent.mkdir(parents=True)
    starts.write_text(f"{before:<{requeue.NOTE_BYTES}}\n")
    if before:
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        slurm.shows_job(**{**state, "Restarts": "1"})
    assert batch_script(slurm, tmp_path / "run", f"exit {status}", ["set -euo pipefail"]) == status
    only = "" if state["JobState"] == "COMPLETING" else "incomplete "
    assert slurm.calls("scontrol requeue") == ([f"scontrol requeue {only}12_1"] if requeued else [])
    assert requeue.failed_starts(starts)[0] == after
    assert status == 0 or starts.stat().st_size == requeue.NOTE_BYTES + 1


@pytest.mark.parametrize(
    ("end", "again"),
    [
        ({"PreemptTime": AT, "EndTime": AT}, True),
        ({"Reason": "TimeLimit"}, True),
        ({}, False),
        ({"Restarts": "1"}, False),
    ],
)
def test_batch_script_requeues_jobs_that_slurm_ends_just_before(
    slurm: FakeSlurm, tmp_path: Path, end: dict[str, str], again: bool
) -> None:
    """Slurm calls a request between two looks a success and ignores it. A cancelled job is not requeued."""
    (slurm.folder / "scontrol_requeue_incomplete.then").write_text("scontrol_show_job.out")
    slurm.prints("scontrol", job_line(**{**ENDING, **end}))
    slurm.shows_job(**RUNNING)
    assert batch_script(slurm, tmp_path / "run", "exit 137", []) == 137
    then = ["scontrol requeue 12_1"] if again else []
    assert slurm.calls("scontrol requeue") == ["scontrol requeue incomplete 12_1", *then]


def test_the_batch_script_respects_the_verdict_of_a_rank(slurm: FakeSlurm, tmp_path: Path) -> None:
    """The other ranks do not matter then."""
    slurm.shows_job(**RUNNING)
    verdict = requeue.verdict_file(tmp_path / "run" / "logs", "12_1", 0)
    verdict.parent.mkdir(parents=True)
    assert batch_script(slurm, tmp_path / "run", f"touch {verdict}; exit 137", []) == 137
    assert not slurm.calls("scontrol requeue")
    verdict.touch()  # it was killed right after that
    assert batch_script(slurm, tmp_path / "run", "exit 137", []) == 137
    assert len(slurm.calls("scontrol requeue")) == 1


def test_a_verdict_of_an_earlier_start_decides_nothing(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank of that start, on a node that was cut off, wrote it after the next start had begun."""
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    slurm.shows_job(**{**RUNNING, "Restarts": "2"})
    late, own = (requeue.verdict_file(tmp_path / "run" / "logs", "12_1", count) for count in (1, 2))
    assert batch_script(slurm, tmp_path / "run", f"touch {late} {own}; exit 1", [], left=[late.name]) == 1
    assert not slurm.calls("scontrol requeue")
    assert batch_script(slurm, tmp_path / "run", f"touch {late}; exit 137", [], left=[late.name]) == 137
    assert slurm.calls("scontrol requeue") == ["scontrol requeue incomplete 12_1"]
    assert batch_script(slurm, tmp_path / "run", "exit 0", []) == 0  # the next start removes it


def test_leftovers_of_a_reused_job_id_decide_nothing(slurm: FakeSlurm, tmp_path: Path) -> None:
    """Slurm lost that job. One of its ranks ends while this job, a later submission of the run, already works."""
    slurm.shows_job(**RUNNING)
    logs = tmp_path / "run" / "logs"
    theirs = requeue.mark("12_1", THEIRS)
    starts, verdict = requeue.starts_file(logs, theirs), requeue.verdict_file(logs, theirs, 0)
    logs.mkdir(parents=True)
    starts.write_text(f"{'3 no space':{requeue.NOTE_BYTES}}\n")
    srun, left = f"touch {verdict}; exit 137", [starts.name, verdict.name]
    assert batch_script(slurm, tmp_path / "run", srun, [], left=left, submission=OWN) == 137
    assert slurm.calls("scontrol requeue") == ["scontrol requeue incomplete 12_1"]
    assert requeue.failed_starts(requeue.starts_file(logs, requeue.mark("12_1", OWN)))[0] == 1
    assert requeue.failed_starts(starts) == (3, "no space")


def test_batch_script_requeues_against_the_sites_default(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Request it at once: the job may be killed before the pause between two requests is over."""
    monkeypatch.setattr(requeue, "SCRIPT_TRIES", 1)
    slurm.shows_job(**RUNNING)
    slurm.fails("scontrol_requeue_incomplete", "Requested operation is presently disabled for job 12_1\n")
    (slurm.folder / "scontrol_update_jobid=12_1.then").write_text("scontrol_requeue_incomplete.err")
    assert batch_script(slurm, tmp_path / "run", "exit 137", []) == 137
    assert [call.split()[1] for call in slurm.calls("scontrol")] == ["show", "requeue", "update", "requeue"]


def test_a_setup_that_fails_ends_the_job(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.shows_job(**RUNNING)
    assert batch_script(slurm, tmp_path / "run", "exit 0", ["exit 3"]) == 3
    assert not slurm.calls("scontrol requeue")


@pytest.mark.promise("a job whose launcher.setup fails does not train in another environment")
@pytest.mark.parametrize(
    ("setup", "failed"),
    [
        (["source /nonexistent/activate", "true"], "source /nonexistent/activate ended with status 1"),
        (["set -eu", "module-nowhere load cuda"], "module-nowhere load cuda ended with status 127"),
        (["source SCRIPT", "[ -f /nonexistent ] && source /nonexistent", "false || true", "sh -c 'kill -TERM $$'"], ""),
    ],
)
def test_a_command_of_the_setup_that_fails_ends_the_job(
    slurm: FakeSlurm, tmp_path: Path, setup: list[str], failed: str
) -> None:
    """Exceptions are commands in a sourced file or a condition, and commands that a signal has ended."""
    slurm.shows_job(**RUNNING)
    (tmp_path / "script").write_text("false\ntrue\n")
    ran = tmp_path / "ran"
    setup = [line.replace("SCRIPT", str(tmp_path / "script")) for line in setup]
    assert bool(batch_script(slurm, tmp_path / "run", f"touch {ran}", setup)) == bool(failed)
    assert ran.exists() != bool(failed)
    assert not slurm.calls("scontrol requeue")
    starts = requeue.starts_file(tmp_path / "run" / "logs", "12_1")
    expected = f"{requeue.GIVEN_UP}launcher.setup failed: {failed}" if failed else ""
    assert requeue.failed_starts(starts)[1] == expected


@pytest.mark.parametrize("strict", [[], ["set -euo pipefail"]])
@pytest.mark.parametrize("state", [{**ENDING, "Reason": "TimeLimit"}, {**RUNNING, "PreemptTime": AT}])
def test_a_setup_that_reaches_the_time_limit_ends_the_job(
    slurm: FakeSlurm, tmp_path: Path, strict: list[str], state: dict[str, str]
) -> None:
    """Slurm's signal ends its command. After a preemption, the ranks handle the request."""
    slurm.shows_job(**state)
    starts = requeue.starts_file(tmp_path / "run" / "logs", "12_1")
    ran, limit = tmp_path / "ran", "Reason" in state and state["Reason"] == "TimeLimit"
    setup = [*strict, "sh -c 'kill -TERM $PPID; exit 143'" + (" || true" if strict and not limit else "")]
    status = batch_script(slurm, tmp_path / "run", f"touch {ran}", setup)
    assert (status != 0, ran.exists()) == (limit, not limit)
    assert not slurm.calls("scontrol requeue")
    if limit:
        assert requeue.failed_starts(starts)[1].startswith(f"{requeue.GIVEN_UP}launcher.setup reached the time limit")


def test_the_batch_script_waits_for_a_controller_that_is_away(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing controller ends no job, and cannot requeue one either."""
    monkeypatch.setattr(requeue, "SCRIPT_PAUSE_S", 0.1)
    slurm.shows_job(**RUNNING)
    slurm.fails("scontrol_show_job", SILENT)
    slurm.fails("scontrol_requeue_incomplete", SILENT)
    slurm.fails("scontrol_update_jobid=12_1", SILENT)

    def come_back() -> None:
        for call, error in (
            ("scontrol show", "scontrol_show_job"),
            ("scontrol requeue", "scontrol_requeue_incomplete"),
        ):
            while len(slurm.calls(call)) < 2:
                time.sleep(0.01)
            (slurm.folder / f"{error}.err").unlink()

    threading.Thread(target=come_back, daemon=True).start()
    assert batch_script(slurm, tmp_path / "run", "exit 137", ["set -euo pipefail"]) == 137
    assert len(slurm.calls("scontrol requeue")) >= 2
    # One kill, however often Slurm was asked.
    assert requeue.failed_starts(requeue.starts_file(tmp_path / "run" / "logs", "12_1"))[0] == 1


def test_batch_script_gives_up_waiting_for_a_lost_job(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise it would keep the node for an hour."""
    monkeypatch.setattr(requeue, "SCRIPT_PAUSE_S", 0.01)
    slurm.fails("scontrol_show_job", "slurm_load_jobs error: Invalid job id specified\n")
    assert batch_script(slurm, tmp_path / "run", "exit 137", []) == 137
    assert len(slurm.calls("scontrol show job")) == requeue.MAX_FORGOTTEN
    assert not slurm.calls("scontrol requeue")
    assert "Slurm has lost job 12_1: nothing is requeued" in capsys.readouterr().out


def test_starts_that_fail_early_are_given_up_with_a_reason(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk that stays full, for example, the reason that a rank could not record is shown all the same."""
    run = tmp_path / "run"
    launcher = SlurmLauncher()
    rank = (
        f"SLURM_JOB_ID=13 SLURM_ARRAY_JOB_ID=12 SLURM_ARRAY_TASK_ID=1 RUNNER_JOB_FOLDER={run}/logs {sys.executable} -c "
        "'from launch.job import SlurmJob; SlurmJob().yield_verdict(\"No space left on device\")'; exit 1"
    )
    (run / "logs").mkdir(parents=True)
    (run / "job.json").write_text(json.dumps({"job_id": "12_1", "folder": str(run / "logs")}))

    def restarted(count: int) -> None:
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(count))
        slurm.shows_job(**{**RUNNING, "Restarts": str(count)})

    for failed in (1, 2, 3):
        restarted(failed - 1)
        assert batch_script(slurm, run, f"cd {ROOT}; {rank}", []) == 1
        assert requeue.failed_starts(requeue.starts_file(run / "logs", "12_1")) == (failed, "No space left on device")
        slurm.prints("squeue", row("12_1", "PENDING", "BeginTime", restarts=failed))
        assert launcher.jobs([run])[run].state == "requeued"
        assert "its last start ended early: No space left on device" in str(launcher.jobs([run])[run].reason)
    restarted(3)
    assert batch_script(slurm, run, f"cd {ROOT}; {rank}", []) == 1
    assert len(slurm.calls("scontrol requeue")) == 3
    for remembered in (row("12_1", "FAILED", restarts=3), ""):
        slurm.prints("squeue", remembered)
        given_up = launcher.jobs([run])[run]
        assert (given_up.state, given_up.live) == ("failed", False)
        assert given_up.reason == f"{requeue.GIVEN_UP}No space left on device"


def test_uncountable_failed_starts_make_all_restarts_count(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    starts = requeue.starts_file(tmp_path / "run" / "logs", "12_1")
    starts.mkdir(parents=True)  # cannot be written, as on a full disk that copies what is overwritten
    for restarts in range(5):
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
        slurm.shows_job(**{**RUNNING, "Restarts": str(restarts)})
        assert batch_script(slurm, tmp_path / "run", "exit 1", []) == 1
    assert len(slurm.calls("scontrol requeue")) == requeue.MAX_FAILED_STARTS
    said = capsys.readouterr().out
    assert "after 3 restarts this one did before an attempt could begin" in said
    assert "in a row" not in said


def test_the_batch_script_keeps_a_count_that_it_cannot_read(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it can read it, the limit is on all restarts."""
    starts = requeue.starts_file(tmp_path / "run" / "logs", "12_1")
    starts.parent.mkdir(parents=True)
    starts.write_text(f"{'2 a reason':{requeue.NOTE_BYTES}}\n")
    fails = 'case $(readlink /proc/$BASHPID/fd/0) in *.starts) return 1 ;; esac; builtin read "$@"'
    for restarts in (1, 2, 3):
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
        slurm.shows_job(**{**RUNNING, "Restarts": str(restarts)})
        with monkeypatch.context() as patch:
            patch.setenv("BASH_FUNC_read%%", f"() {{ {fails}; }}")
            assert batch_script(slurm, tmp_path / "run", "exit 1", []) == 1
        assert len(slurm.calls("scontrol requeue")) == min(restarts, 2)
        assert requeue.failed_starts(starts) == (2, "a reason")
    assert batch_script(slurm, tmp_path / "run", "exit 1", []) == 1
    assert requeue.failed_starts(starts) == (3, "it ended with status 1, see its log")


@pytest.mark.parametrize("status", [75, 143])
def test_preemptions_leave_the_file_that_counts_failed_starts(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """On a disk that is full at the next start it could be overwritten, but not created again."""
    run = tmp_path / "run"
    starts = requeue.starts_file(run / "logs", "12_1")
    verdict = run / "logs" / "12_1.$SLURM_RESTART_COUNT.verdict"
    inodes = set()
    for restarts in range(5):
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
        slurm.shows_job(**{**RUNNING, "Restarts": str(restarts)})
        assert batch_script(slurm, run, f"touch {verdict}; exit {status}", []) == status
        inodes.add(starts.stat().st_ino)
        assert requeue.failed_starts(starts) == (0, "")
    assert len(inodes) == 1
    assert batch_script(slurm, run, f"touch {verdict}; exit 0", []) == 0
    assert not starts.exists()


@pytest.mark.parametrize(("status", "requeued"), [(137, False), (75, True)])
def test_without_requeue_killed_only_interruptions_requeue(
    slurm: FakeSlurm, tmp_path: Path, status: int, requeued: bool
) -> None:
    """A rank that saved but could not ask Slurm, perhaps in a container, was not killed."""
    slurm.shows_job(**RUNNING)
    assert batch_script(slurm, tmp_path / "run", f"exit {status}", [], requeue_killed=False) == status
    assert slurm.calls("scontrol requeue") == (["scontrol requeue incomplete 12_1"] if requeued else [])


def test_the_batch_script_needs_no_file_of_this_installation(slurm: FakeSlurm, tmp_path: Path) -> None:
    """An upgrade between a submission and a requeue does not change how the job is requeued."""
    script = SlurmLauncher().preview([tmp_path])
    assert requeue.SCRIPT.read_text().strip() in script
    assert str(requeue.SCRIPT) not in script


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing(slurm: FakeSlurm, tmp_path: Path) -> None:
    alone = subprocess.run(["shellcheck", requeue.SCRIPT], capture_output=True, text=True, check=False)
    assert alone.returncode == 0, alone.stdout
    script = SlurmLauncher(nodes=2).preview([tmp_path])
    whole = subprocess.run(
        ["shellcheck", "--severity=warning", "-"], input=script, capture_output=True, text=True, check=False
    )
    assert whole.returncode == 0, whole.stdout

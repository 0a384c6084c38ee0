"""Decide whether to requeue a job, ask Slurm until it has, and write the batch script's part of this.

Slurm never requeues a job that exits, not even one that exits with status 0 in the grace time of a preemption. The run
would be lost. A job that is asked to stop therefore requeues itself, and requeue.sh requeues a job whose ranks were
killed. docs/slurm.md, "How requeueing decides", explains how these parts work together.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import signal
import sys
import textwrap
import threading
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from launch import scheduler
from runner.contracts import SLURM_NOT_RUNNING
from runner.system import clock, files, processes

# After these causes the job requeues itself, because Slurm would not. "interrupted" is a SIGTERM to a running job
# without a preemption, for example because its node shuts down.
REQUEUED_CAUSES = frozenset({"preempted", "time limit", "interrupted", "node failure"})
# Slurm's reasons for ending a job whose node or batch script was lost; scancel sets none.
LOST_REASONS = frozenset({"NodeDown", "JobLaunchFailure", "SystemFailure"})
STATE_CHECKS, STATE_CHECK_PAUSE_S = 4, 0.5  # a signal may arrive before the job's state explains it
NOTICE_EARLY_S = 60.0  # Slurm checks time limits this rarely, and signals early rather than late
KILL_MARGIN_S = 5.0  # requeue this long before Slurm kills the job, even if a step or save is unfinished
RETRY_S = 5.0  # pause between two requeue requests
MAX_REFUSALS = 12  # after an interruption, when Slurm is not about to kill the job
MAX_FORGOTTEN = 12  # answers in a row, seconds apart, that no such job exists: Slurm has lost it

# The batch script keeps asking for an hour, so that no job is lost while the controller is away.
SCRIPT = Path(__file__).with_name("requeue.sh")
SCRIPT_TRIES, SCRIPT_PAUSE_S = 360, 10
MAX_FAILED_STARTS = 3  # in a row, before an attempt could begin; the environment is then considered broken
GIVEN_UP = "not requeued: "  # prefix of the batch script for the reason of the last failed start
NOTE_BYTES = 1000  # size of the line in a file of failed starts, without its line break
SUBMISSION = "REQUEUE_SUBMISSION"
"""The environment variable in which the batch script passes the name of its submission."""
BATCH_BEGAN = "RUNNER_BATCH_BEGAN"
"""The environment variable with the time the batch script began: boot id of its machine, seconds since boot."""
ARM_SCRIPT = "requeue_arm"
"""The line of the batch script after the user's setup: from here on, a job that fails may be requeued."""
CHECK_SETUP, CHECKED_SETUP = "requeue_check_setup", "trap - ERR"
"""The lines around the user's setup: a command in it that fails ends the job."""

Record = Mapping[str, str]
"""The record of a job as `scontrol show job` prints it; empty if Slurm did not answer."""


def mark(job_id: str, submission: str | None) -> str:
    """Return the prefix of a job's marker files.

    The prefix contains the submission's name, because Slurm may reuse the id of a lost job that is still running.
    """
    return f"{job_id}.{submission}" if submission else job_id


def verdict_file(folder: Path, mark: str, restart_count: int) -> Path:
    """Return the path of a file that exists once a rank has decided how this start ends.

    A start that ends without the file was killed.

    srun's exit status does not show this. It is also 1 if a memory limit was exceeded or srun could not start the
    ranks. Each start has a separate file, because a rank of an earlier start, on a disconnected node, may write late.
    """
    return folder / f"{mark}.{restart_count}.verdict"


def starts_file(folder: Path, mark: str) -> Path:
    """Return the path of the file that counts consecutive starts which failed before an attempt, and states why.

    The file has one line of a fixed size. The batch script creates it at the first start and later overwrites it in
    place. Overwriting works on a full disk, where failed starts must be counted too.
    """
    return folder / f"{mark}.starts"


def failed_starts(path: Path) -> tuple[int, str]:
    """Return how many starts failed in a row, and why the last one failed. Without the file, the count is 0.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        text = files.read_regular(path, limit=files.SMALL_BYTES, follow=True).decode(errors="replace")
    except FileNotFoundError:
        text = ""
    count, _, reason = text.strip().partition(" ")
    return (int(count) if re.fullmatch("[0-9]{1,9}", count) else 0), reason


def note_failed_starts(path: Path, count: int, reason: str = "") -> None:
    """Overwrite the count and reason of failed starts in place.

    Raises:
        OSError: the file does not exist, or cannot be written.
    """
    shown = textwrap.shorten(reason, NOTE_BYTES - len(f"{count} {GIVEN_UP}"), placeholder=" ...")
    line = f"{count} {shown}".encode("ascii", "replace").ljust(NOTE_BYTES) + b"\n"
    fd = files.open_fd(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        files.overwrite(fd, line)
    finally:
        files.close_fd(fd)


def script_lines(folder: Path, requeue_killed: bool, submission: str = "") -> list[str]:
    """Return requeue.sh and its parameters for the batch script.

    requeue.sh is copied, so that an upgrade of this package between submission and requeue does not change it.

    Args:
        folder: directory for the job's marker files.
        requeue_killed: whether to requeue a job that no rank has ended.
        submission: name of the submission; empty in a preview.
    """
    parameters = {
        "FOLDER": folder,
        "SUBMISSION": submission,
        "MAX_FAILED_STARTS": MAX_FAILED_STARTS if requeue_killed else 0,
        "GIVEN_UP": GIVEN_UP,
        "NOTE_BYTES": NOTE_BYTES,
        "NOT_RUNNING": " ".join(sorted(SLURM_NOT_RUNNING)),
        "TRIES": SCRIPT_TRIES,
        "PAUSE_S": SCRIPT_PAUSE_S,
        "MAX_FORGOTTEN": MAX_FORGOTTEN,
    }
    assignments = [f"REQUEUE_{name}={shlex.quote(str(value))}" for name, value in parameters.items()]
    return [*assignments, *files.read_text(SCRIPT).splitlines()]


def setup_lines(setup: Sequence[str]) -> list[str]:
    """Return the user's setup commands for the batch script, wrapped so that the job ends if one of them fails."""
    return [CHECK_SETUP, *setup, CHECKED_SETUP] if setup else []


def is_running(job: Record) -> bool:
    """Return whether the job is in a state other than waiting, ending or ended."""
    return job.get("JobState", "COMPLETING") not in SLURM_NOT_RUNNING


def ended_by(job: Record, restart_count: int) -> str | None:
    """Return how Slurm ended this start of the job, or None if it still runs or Slurm did not answer.

    Args:
        job: record of the job.
        restart_count: how often the job had been restarted when this start began.
    """
    if int(job.get("Restarts", "0")) > restart_count:  # the job may already run again on other nodes
        return "requeued"
    if not job or is_running(job):
        return None
    reason = job.get("Reason", "")
    if reason == "TimeLimit":  # "BeginTime" and "PartitionTimeLimit" are reasons to wait
        return "time limit"
    if reason in LOST_REASONS:
        return "node failure"
    return "preempted" if _ended_at_preemption(job) else "cancelled"


def _ended_at_preemption(job: Record) -> bool:
    """Return whether Slurm cancelled the job at the second of its preemption (CANCEL without a grace time).

    A job that is cancelled during its grace time has a preemption time too, but ends later.
    """
    preempted = _time(job.get("PreemptTime"))
    return preempted is not None and preempted == _time(job.get("EndTime"))


def cause_of_stop(job: Record, restart_count: int, signum: int, notice_s: float | None = None) -> str:
    """Return why the job received `signum`. If Slurm did not answer, infer it from the signal alone.

    Args:
        job: record of the job.
        restart_count: see `ended_by`.
        signum: number of the signal.
        notice_s: seconds from Slurm's signal to the time limit; None if unknown.
    """
    if ended := ended_by(job, restart_count):
        return ended
    if _time(job.get("PreemptTime")):
        return "preempted"
    if signum not in (signal.SIGUSR1, signal.SIGUSR2):
        return "interrupted"
    left_s = seconds_left(job) if job and notice_s is not None else 0.0
    is_near = left_s is not None and left_s <= (notice_s or 0.0) + NOTICE_EARLY_S + scheduler.CLOCKS_DIFFER_S
    return "time limit" if is_near else "interrupted"  # by `scancel --signal`


def is_preempted(job: Record) -> bool:
    """Return whether this start of the job runs and is preempted. Preemptions of earlier starts are ignored."""
    began, preempted = _time(job.get("StartTime")), _time(job.get("PreemptTime"))
    return is_running(job) and began is not None and preempted is not None and began <= preempted


def seconds_left(job: Record) -> float | None:
    """Return the seconds until Slurm ends the job (time limit or end of a grace time), or None if it will not."""
    end = _time(job.get("EndTime"))
    return None if end is None else (end - utc_now()).total_seconds()


def utc_now() -> datetime:
    """Return the current UTC time without a zone, in the form in which `scheduler.ask` makes Slurm print times."""
    return datetime.fromtimestamp(clock.wall(), UTC).replace(tzinfo=None)


def _time(text: str | None) -> datetime | None:
    """Parse a time that Slurm prints. Return None for the words that mean no time, such as N/A."""
    try:
        return datetime.fromisoformat(text or "")
    except ValueError:
        return None


class Requeuer:
    """Requeue the job that this process is part of.

    Args:
        job_id: `12`, or `12_3` for a task of an array.
        restart_count: how often Slurm has restarted the job.
        submission: name of the job's submission.
        notice_s: see `cause_of_stop`.
    """

    def __init__(
        self, job_id: str, restart_count: int, submission: str | None = None, notice_s: float | None = None
    ) -> None:
        self._job_id = job_id
        self._restart_count = restart_count
        self._submission = submission
        self._notice_s = notice_s
        self._began = utc_now()
        self._asked = False  # whether Slurm was asked to requeue the job, possibly by the timer
        self._forgotten = False  # whether Slurm's last answer was that there is no such job
        self._turn = threading.Lock()  # the timer and the end of the attempt must not ask at the same time

    def cause(self, signum: int) -> str:
        """Return why the job is asked to stop. If Slurm will kill but not requeue it, start a timer that requeues it.

        The timer requeues the job before the kill, so that a step or save longer than the notice does not end the run.
        """
        if signum == signal.SIGINT:
            return "cancelled"
        for _ in range(STATE_CHECKS):
            job = self.record()
            cause = cause_of_stop(job, self._restart_count, signum, self._notice_s)
            if cause != "interrupted":
                break
            clock.sleep(STATE_CHECK_PAUSE_S)
        left_s = seconds_left(job)
        if cause in REQUEUED_CAUSES and left_s is not None:
            clock.call_later(max(0.0, left_s - KILL_MARGIN_S), self._requeue_unfinished)
        return cause

    def requeue(self, cause: str) -> str | None:
        """Requeue the job if `cause` requires it; return once Slurm has done so.

        If Slurm refuses, retry until the job is killed. Exiting would end the job for good, whereas Slurm requeues a
        preempted job that waits to be killed.

        Returns:
            the final cause: "cancelled" if the job has been cancelled, or Slurm has lost it; "requeued" if Slurm or
            somebody else requeued it first. None if this process cannot requeue it, because there is no scontrol (for
            example in a container), or because Slurm refused `MAX_REFUSALS` times after an interruption.
        """
        if cause not in REQUEUED_CAUSES:
            return cause
        outcome = self._ask_until_queued(RETRY_S, MAX_REFUSALS if cause == "interrupted" else math.inf)
        if outcome == "asked":
            _print(f"{cause}: requeued job {self._job_id}")
            return cause
        return cause if outcome == "requeued" and self._asked else outcome

    def _requeue_unfinished(self) -> None:
        if self._ask_until_queued(STATE_CHECK_PAUSE_S) == "asked":
            _print(f"the notice is nearly over and the attempt is not done: requeued job {self._job_id} as it is")

    def _ask_until_queued(self, pause_s: float, max_refusals: float = math.inf) -> str | None:
        """Ask Slurm until the job is queued. Return "asked", "requeued" (by others), "cancelled", or None on giving up.

        While Slurm does not answer, do not requeue: the job may have been cancelled. Treat a job that Slurm has lost as
        cancelled, since there is nothing to requeue. Rerunning the command submits a new job.
        """
        refusals = forgotten = 0
        while processes.find_command("scontrol") and refusals < max_refusals:
            outcome = self._look_and_ask()
            if outcome not in ("refused", None):
                return outcome
            refusals += outcome == "refused"
            forgotten = forgotten + 1 if self._forgotten else 0
            if forgotten == MAX_FORGOTTEN:
                _print(f"Slurm has lost job {self._job_id}: nothing is requeued, rerun the command to continue")
                return "cancelled"
            clock.sleep(RETRY_S if forgotten else pause_s)
        return None

    def _look_and_ask(self) -> str | None:
        """Read the job's state and ask Slurm to requeue it, unless it is queued or cancelled.

        Return "asked" or "refused"; "requeued" or "cancelled" if that has already happened; None if Slurm did not
        answer.
        """
        with self._turn:
            job = self.record()
            ended = ended_by(job, self._restart_count)
            if ended in ("requeued", "cancelled"):
                return ended
            if not job:
                return None
            if not self._ask(job):
                return "refused"
            if not is_running(job):
                return "asked"
            # Slurm reports success but does nothing if the job has ended since its state was read.
            job = self.record()
            if not job:
                return None
            ended = ended_by(job, self._restart_count)
            if ended in (None, "requeued"):
                return "asked"
            if ended == "cancelled":
                return ended
            return "asked" if self._ask(job) else "refused"

    def _ask(self, job: Record) -> bool:
        """Ask Slurm once to requeue the job. Return whether Slurm did so."""
        self._asked = True  # set first, because Slurm may requeue the job without answering
        try:
            scheduler.requeue(self._job_id, only_running=is_running(job))
        except scheduler.SchedulerError as error:
            _print(f"cannot requeue job {self._job_id} yet: {error}")
            return False
        return True

    def record(self) -> dict[str, str]:
        """Return the job's record: empty if Slurm does not answer, state REVOKED if a different job has the id now."""
        try:
            found = scheduler.show_job(self._job_id)
            self._forgotten = False
        except scheduler.SchedulerError as error:
            self._forgotten = isinstance(error, scheduler.ForgottenError)
            _print(f"Slurm does not report the state of job {self._job_id}: {error}")
            return {}
        if self._is_another(found):
            _print(f"the id {self._job_id} belongs to another job now, and this job is gone: nothing is requeued")
            return {"JobState": "REVOKED"}
        return found

    def _is_another(self, found: Record) -> bool:
        """Return whether Slurm has lost this job (for example its state was deleted) and reused its id.

        The path of the batch script identifies the job. If sbatch is a wrapper that submits a copy of the script, the
        user, name and submit time identify it. When in doubt, assume that it is this job, which would be lost
        otherwise. `RecordedJob.is_same` assumes the opposite, because it must not mistake a different job for the run's
        job. requeue.sh has the same check.
        """
        restarts = int(found.get("Restarts", self._restart_count))
        if restarts < self._restart_count:
            return True
        script = found.get("Command", "")
        if self._submission is not None and scheduler.SCRIPT_PREFIX in script:
            return f"{scheduler.SCRIPT_PREFIX}{self._submission}-" not in script
        user = re.search(r"\((\d+)\)$", found.get("UserId", ""))
        if user and user[1] != processes.environment.get("SLURM_JOB_UID", user[1]):
            return True
        if restarts > self._restart_count:
            return False
        name, submitted = found.get("JobName"), _time(found.get("SubmitTime"))
        renamed = name is not None and name != processes.environment.get("SLURM_JOB_NAME", name)
        return renamed and submitted is not None and submitted > self._began


def _print(text: str) -> None:
    print(f"[launch] {text}", file=sys.stderr, flush=True)

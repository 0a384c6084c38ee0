"""Determine the state of a run from its records, its lease and its job, the same way for every command.

`look` neither waits nor writes. Anybody may have written the records, so call it within `trust.reading`. Clocks of
different machines are never compared. Nothing here imports torch, hydra or numpy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.contracts import JobInfo
from runner.rundir import submitted_jobs, withdrawal
from runner.rundir.attempt_log import Finish, ended_attempts, last_record, status_of
from runner.rundir.lease import LeaseWatcher, describe_holder, liveness, read_holder
from runner.rundir.paths import RunDir
from runner.system import files, processes

IN_QUEUE = ("pending", "requeued", "suspended", "ending")
"""States, besides `running`, of a run whose job will continue without a command."""

_BY_URGENCY = (
    *("failed", "crash loop", "stuck", "killed", "unreadable", "running", "suspended", "ending", "requeued", "pending"),
    *("interrupted", "cancelled", "withdrawn", "paused", "finished", "not started", "waiting"),
)


@dataclass(frozen=True)
class State:
    """The state of a run at one moment.

    Attributes:
        run: its directory.
        word: the state: `finished`, `running`, one of `IN_QUEUE`, `paused` (by a search) or `not started`; or, if the
            run has ended, `interrupted`, `cancelled`, `killed`, `failed`, `crash loop`, `stuck` or `withdrawn`.
        holder: description of the process that certainly trains the run now; None if there is none, or if this machine
            cannot determine it.
        job: the run's job, if the scheduler knows more about it than the records do; else None.
        status: see `attempt_log.status_of`.
        attempts: the ended attempts.
        newest: the record of the last step.
        finish: how far it has finished.
    """

    run: RunDir
    word: str
    holder: str | None
    job: JobInfo | None
    status: dict[str, Any]
    attempts: list[dict[str, Any]]
    newest: dict[str, Any]
    finish: Finish

    @property
    def step(self) -> int:
        """Return the last recorded step, which may be a few seconds newer than the status."""
        return max(entry(self.newest, "step", int) or 0, entry(self.status, "step", int) or 0)

    @property
    def reason(self) -> str | None:
        """Return why the run failed, or why its job waits."""
        recorded: str | None = entry(self.status, "reason", str)
        if self.job is None:
            return recorded
        if self.word == "failed":
            return self.job.reason or f"job {self.job.job_id} ended without recording why: see its logs"
        return self.job.reason if self.word in (self.job.state, "requeued") else recorded

    @property
    def cause(self) -> str | None:
        """Return why the last attempt ended, or why there was none."""
        if self.word in ("killed", "failed", "cancelled") and not self.status:
            return "ended before it started training: see its logs" if _has_log(self.run) else "left the queue"
        recorded: str | None = entry(self.status, "cause", str)
        return recorded


def look(
    run: RunDir, job: JobInfo | None = None, unanswered: bool = False, watcher: LeaseWatcher | None = None
) -> State:
    """Determine the state of a run now.

    Args:
        run: the run directory, which may be missing.
        job: the job that the scheduler reports; None if it reports none.
        unanswered: whether the scheduler could not be asked, so that there may be a job although `job` is None.
        watcher: if passed, also uses heartbeats to decide whether the lease's holder is alive.

    Raises:
        OSError: a record cannot be read.
        ValueError: a record has a value of the wrong type.
    """
    if not files.is_dir(run.path):
        return State(run, "not started", None, None, {}, [], {}, Finish())
    holder = holder_of(run.lease)
    alive = holder is not None if watcher is None else watcher.is_alive(run.lease)
    status, attempts = status_of(run), ended_attempts(run)
    finish = Finish.of(run)
    if job is not None and not job.live and not _knows_better(job, run, status, attempts, alive):
        job = None
    word = _word(run, status, finish, alive, job, unanswered)
    stopped = word in withdrawal.STOPPED or (unanswered and word in ("pending", "requeued"))
    if stopped and withdrawal.is_withdrawn(run, status):
        word = "withdrawn"
    return State(run, word, holder, job, status, attempts, last_record(run), finish)


def asked(run: RunDir) -> State:
    """Ask the scheduler about a run, then determine its state. This takes seconds if only heartbeats show life.

    Raises:
        OSError: a record cannot be read.
        ValueError: a record has a value of the wrong type.
    """
    jobs, unanswered = submitted_jobs.jobs([run])
    watcher = LeaseWatcher()
    found = look(run, jobs.get(run.path), run.path in unanswered, watcher)
    return look(run, jobs.get(run.path), run.path in unanswered, watcher) if watcher.wait() else found


def holder_of(lease: Path) -> str | None:
    """Describe the holder of a lease if that process is certainly alive, else return None.

    Raises:
        OSError: it cannot be read.
    """
    found = read_holder(lease)
    if found is None or "pid" not in found[1] or liveness(found[1], processes.this_process()) != "alive":
        return None
    return describe_holder(found[1])


def entry(record: Mapping[str, Any], name: str, kind: type) -> Any:
    """Return the entry `name` of a record, or None if it is missing.

    Raises:
        ValueError: it has a different type.
    """
    value = record.get(name)
    if kind is float and type(value) is int:
        value = float(value)
    if value is not None and type(value) is not kind:
        raise ValueError(f"{name} is {value!r:.60}, not of type {kind.__name__}")
    return value


def urgency(word: str) -> int:
    """Return a sort key. States with low keys are shown first if a window has too few lines for all runs."""
    return _BY_URGENCY.index(word) if word in _BY_URGENCY else -1


def submitted_job(run: RunDir) -> str | None:
    """Read the id of the run's most recently submitted job."""
    job_id: str | None = entry(files.read_object(run.job), "job_id", str)
    return job_id


def sweep_of(run: RunDir) -> str | None:
    """Return the name of the sweep that the run was submitted in, or None if unknown."""
    with suppress(OSError):  # for example a different user's run
        name = files.read_object(run.job).get("sweep")
        return name if isinstance(name, str) else None
    return None


def _word(
    run: RunDir,
    status: Mapping[str, Any],
    finish: Finish,
    alive: bool,
    job: JobInfo | None,
    unanswered: bool,
) -> str:
    recorded = entry(status, "state", str) or ""
    own = job is not None and job.job_id == status.get("job_id")
    if recorded == "finished" and job is not None and job.live and _is_newer(run.finished, run.job):
        return "finished"  # its job may stay in the queue, possibly forever
    if job is not None and job.state != "ending":
        return job.state
    if job is not None and own and job.restarts > (status.get("restart_count") or 0):
        return "requeued"  # although the job is still releasing its node
    if recorded == "running" and alive:
        return "running"
    if job is not None:  # the job is releasing its node; the state that the attempt recorded is still valid
        return recorded if recorded not in ("", "running", "failed") else "ending"  # a failed job may be requeued
    if recorded == "running":
        total = entry(status, "total", int)
        # Only the status is written after the completion mark, so only the status may be missing.
        return "finished" if total and (finish.steps >= total or finish.early is not None) else "killed"
    if recorded == "requeued" and not unanswered:
        return "cancelled"  # it waited in the queue and has left it
    return recorded or _before_start(run, unanswered)


def _before_start(run: RunDir, unanswered: bool) -> str:
    """Return the state of a run that has no attempt and no job in the queue."""
    if not files.exists(run.job):
        return "not started"
    if unanswered:
        return "pending"
    return "failed" if _has_log(run) else "cancelled"


def _has_log(run: RunDir) -> bool:
    """Check whether the submitted job has written to its log.

    An array task's log is a link whose target may be missing.
    """
    names = files.list_dir(run.logs) if files.is_dir(run.logs) else []
    mine = [name for name in names if name.startswith(f"{submitted_job(run)}_") and name.endswith("_log.out")]
    return any(files.exists(run.logs / name) for name in mine)


def _knows_better(
    job: JobInfo, run: RunDir, status: Mapping[str, Any], attempts: list[dict[str, Any]], alive: bool
) -> bool:
    """Check whether a job ended in a way that the run could not record."""
    if job.state == "completed":
        return False
    if job.state == "failed" and job.reason is not None:
        # The scheduler abandoned the job, and no attempt could begin or record anything. The run may have been started
        # elsewhere since then.
        return not alive and not _has_gone_on(job, run, status)
    recorded = status.get("state")
    if recorded == "running":  # killed; only the scheduler knows whether by scancel
        return bool(job.state == "cancelled" and job.job_id == status.get("job_id"))
    if recorded in (None, "requeued"):
        return True
    known = (status, files.read_object(run.attempt), *attempts)
    return job.job_id not in [each.get("job_id") for each in known]  # it never started an attempt


def _has_gone_on(job: JobInfo, run: RunDir, status: Mapping[str, Any]) -> bool:
    """Check whether, since the submission, the run has finished or a different job or process has made an attempt.

    Compare file modification times, which all come from the file system's clock.
    """
    submitted = modified(run.job) or 0.0
    foreign = [run.status, run.attempt, run.attempts] if status.get("job_id") != job.job_id else []
    return any((modified(path) or -math.inf) >= submitted for path in (run.finished, *foreign))


def _is_newer(one: Path, other: Path) -> bool:
    return (modified(one) or 0.0) > (modified(other) or 0.0)


def modified(path: Path) -> float | None:
    """Return a file's modification time (file system's clock), or None if it is missing."""
    with suppress(FileNotFoundError):
        return files.lstat(path).st_mtime
    return None

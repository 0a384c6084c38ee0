"""Start an attempt inside a Slurm job, and give it access to the job (`runner.contracts.Job`).

Slurm sends signals to stop a job. One signal can have several meanings, so the job's state determines the cause (see
`launch.requeue`).
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from launch import batch, rendezvous, requeue, scheduler, submission
from runner.contracts import is_same_job
from runner.errors import ExitStatus, UserError
from runner.rundir.paths import RunDir
from runner.system import files, processes, signals

STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
LAUNCHER = "launch.slurm.SlurmLauncher"  # the launcher of these jobs, by name: this module does not import it
# States of a node that has lost its jobs, see scontrol(1). A "*" after the state means that the node does not respond.
LOST_NODE = {"DOWN", "FAIL", "NOT_RESPONDING", "POWERED_DOWN", "REBOOT_ISSUED"}


def start(
    run_dir: str,
    attempt: str,
    submission: str | None = None,
    max_timeouts: int | None = None,
    requeue_killed: bool = True,
    notice_s: float | None = None,
) -> NoReturn:
    """Make one attempt in this job and exit with its status.

    Args:
        run_dir: the run directory; everything else is read from it.
        attempt: `module:function`, called as `function(run_dir, job=job)`.
        submission: name of the job's submission.
        max_timeouts: stop the run after this many consecutive time limits without a new checkpoint. If None, time
            limits are treated like other attempts without progress.
        requeue_killed: whether the batch script requeues the job if no rank has decided how it ends.
        notice_s: seconds from the signal to the time limit; None if unknown.
    """
    named = processes.environment.get(requeue.SUBMISSION) or submission
    job = SlurmJob(max_timeouts, requeue_killed, named, notice_s)
    job.catch_signals()
    module, _, name = attempt.partition(":")
    try:
        if submission not in (None, named):
            job.yield_verdict("the file that was found is of an earlier job with this id")  # the right file will follow
            sys.exit(ExitStatus.FAILED)
        if job.is_of_another(RunDir(Path(run_dir))):
            with suppress(OSError):  # for example, the log's disk is full
                print(f"[launch] {run_dir}/job.json names another job: this one ends, and requeues nothing", flush=True)
            sys.exit(ExitStatus.SUPERSEDED)
        try:
            rendezvous.export()
            make_attempt = getattr(importlib.import_module(module), name)
        except Exception as error:
            job.yield_verdict(f"{type(error).__name__}: {error}")  # the environment may work at the next start
            raise
        sys.exit(make_attempt(Path(run_dir), job=job))
    finally:
        job.record_verdict()


def main(folder: str) -> NoReturn:
    """Start the attempt of this job. This is the entry point of each task, `python -m launch.job FOLDER`."""
    processes.environment[batch.FOLDER] = folder
    try:
        batch.check_folder(Path(folder))
    except (UserError, OSError) as error:
        sys.exit(f"[launch] {error}")
    found = batch.find_start(Path(folder), own_id())
    if found is None:
        sys.exit(f"[launch] the command that submitted job {own_id()} has not recorded it in {folder}")
    start(**asdict(found))


def own_id() -> str:
    """Return the id of this process's job; `ARRAY_TASK` for an array task, so that only it is requeued."""
    array, task = processes.environment.get("SLURM_ARRAY_JOB_ID"), processes.environment.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array else processes.environment["SLURM_JOB_ID"]


class SlurmJob:
    """The Slurm job that this process runs in (a `runner.contracts.Job`)."""

    auto_restarts = True

    def __init__(
        self,
        max_timeouts: int | None = None,
        requeue_killed: bool = True,
        submission: str | None = None,
        notice_s: float | None = None,
    ) -> None:
        self.max_timeouts = max_timeouts
        self.submission = submission
        self._requeue_killed = requeue_killed
        self.early_signal: int | None = None
        self.restart_count = rendezvous.restart_count()
        self.job_id = own_id()
        self._requeuer = requeue.Requeuer(self.job_id, self.restart_count, submission, notice_s)
        self._has_verdict = True  # whether this process's exit decides how the job ends
        folder = Path(processes.environment.get(batch.FOLDER, os.devnull))
        mark = requeue.mark(self.job_id, submission)
        self._starts = requeue.starts_file(folder, mark)
        self._verdict = requeue.verdict_file(folder, mark, self.restart_count)
        self._was_killed = False
        with suppress(OSError):
            self._was_killed = requeue.failed_starts(self._starts)[0] > 0

    def is_of_another(self, run: RunDir) -> bool:
        """Return whether the run has a different job.

        That happens if a suspended command submitted this job too late.
        """
        with suppress(OSError):  # the attempt will find the error
            return self.submission is not None and not submission.is_named(run, self.submission)
        return False

    def catch_signals(self) -> None:
        """Remember the first signal that asks this job to stop, until the attempt installs its own handlers."""
        for signum in set(STOP_SIGNALS) & set(signals.handled()):
            signal.signal(signum, self._on_signal)
        signal.signal(signal.SIGCONT, signal.SIG_DFL)  # accompanies every SIGTERM and means nothing

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.early_signal = self.early_signal or signum

    def identity(self) -> dict[str, Any]:
        """Return entries that identify the job and where it runs.

        The keys are job_id, submission, restart_count, host, node, launcher, job_name and nodes. launcher and job_name
        identify the job if the command that submitted it was killed before it recorded the job.
        """
        return {
            "job_id": self.job_id,
            "submission": self.submission,
            "restart_count": self.restart_count,
            "host": processes.host_name(),
            "node": processes.environment.get("SLURMD_NODENAME"),
            "launcher": LAUNCHER,
            "job_name": processes.environment.get("SLURM_JOB_NAME"),
            "nodes": int(processes.environment.get("SLURM_JOB_NUM_NODES", "1")),
        }

    def began(self) -> float:
        """Return when this start's batch script (or this process, on other nodes) began, on `clock.monotonic`."""
        boot, _, seconds = processes.environment.get(requeue.BATCH_BEGAN, "").partition(" ")
        with suppress(ValueError):
            if boot and boot == processes.boot_id() and float(seconds) >= 0:
                return min(processes.uptime(float(seconds)), processes.began())
        return processes.began()

    def waited(self) -> dict[str, float]:
        """Return how long this job waited before this start, in seconds of Slurm's clock.

        `hold_s` is the time held by the user, by a dependency, or for two minutes after a requeue. `queue_s` is the
        time spent waiting for nodes. The result is empty if Slurm does not answer.

        If the job was preempted before this process existed, send SIGTERM to this process now. With PreemptMode=CANCEL
        nothing else would requeue the job.
        """
        try:
            record = self._requeuer.record()
            if requeue.is_preempted(record):
                processes.send_signal(processes.own_pid(), signal.SIGTERM)
            times = [datetime.fromisoformat(record[f"{name}Time"]) for name in ("Submit", "Eligible", "Start")]
        except (KeyError, ValueError):
            return {}
        hold, queue = ((after - before).total_seconds() for before, after in pairwise(times))
        return {"hold_s": max(hold, 0.0), "queue_s": max(queue, 0.0)}

    def on_started(self) -> None:
        """Reset the count of failed starts. From here on, attempts without progress are counted instead."""
        with suppress(OSError):
            requeue.note_failed_starts(self._starts, 0)

    def cause(self, signum: int) -> str:
        """Return why `signum` was sent: preempted, time limit, cancelled, requeued, node failure or interrupted."""
        return self._requeuer.cause(signum)

    def cause_of_loss(self, record: dict[str, Any]) -> str:
        """Infer how an attempt without a recorded end ended: "node failure", "requeued" or "killed".

        Slurm restarts a job without a signal if its node is lost, or if somebody requeues it while it is suspended.
        """
        mine = {"job_id": self.job_id, "submission": self.submission}
        restarted = is_same_job(record, mine) and record.get("restart_count", 0) < self.restart_count
        if not restarted or self._was_killed:
            return "killed"
        return "node failure" if _node_was_lost(record) else "requeued"

    def requeue_if_needed(self, cause: str) -> str:
        """Requeue the job if `cause` requires it, wait until that is done, and return the final cause."""
        final = self._requeuer.requeue(cause)
        if final is None:  # the batch script requeues it
            self.yield_verdict()
            return cause
        return final

    def yield_verdict(self, reason: str | None = None) -> bool:
        """Let a different rank or the batch script decide how this job ends, instead of this process's exit.

        Return whether the batch script requeues a job that no rank has ended.
        """
        self._has_verdict = False
        if reason is not None:
            with suppress(OSError):
                requeue.note_failed_starts(self._starts, requeue.failed_starts(self._starts)[0], reason)
        return self._requeue_killed

    def record_verdict(self) -> None:
        """Record for the batch script that this process decides how the job ends, unless `yield_verdict` was called."""
        if self._has_verdict:
            with suppress(OSError):
                files.touch(self._verdict)


def _node_was_lost(record: dict[str, Any]) -> bool:
    """Return whether an earlier attempt's node has been lost since the attempt began, or is unknown to Slurm."""
    try:
        (node,) = scheduler.show_nodes(str(record["node"])) if record.get("node") else [{}]
        began = datetime.fromtimestamp(record["started"], UTC).strftime("%Y-%m-%dT%H:%M:%S")
    except (scheduler.SchedulerError, KeyError, TypeError, ValueError):
        return True
    states = node.get("State", "DOWN")
    restarted = any(node.get(each, "")[:1].isdigit() and node[each] > began for each in ("BootTime", "SlurmdStartTime"))
    return restarted or "*" in states or not LOST_NODE.isdisjoint(states.split("+"))


if __name__ == "__main__":
    main(sys.argv[1])

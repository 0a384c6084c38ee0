"""Inside a Slurm job: the entry point that is submitted, and what an attempt may ask its job (`runner.contracts.Job`).

Slurm asks a job to stop by signals, and one signal means different things: the state of the job decides (see
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
LAUNCHER = "launch.slurm.SlurmLauncher"  # whose jobs these are; imported there, and not here
# States of a node that has lost its jobs, see scontrol(1); "*" after the state: it does not respond.
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
        submission: the name of the submission that the job is of.
        max_timeouts: time limits in a row without a new checkpoint after which the run stops; None: they count as
            other attempts without progress do.
        requeue_killed: whether the batch script requeues the job if no rank decides how it ends.
        notice_s: how long before its time limit the job is signalled; None: nobody knows.
    """
    named = processes.environment.get(requeue.SUBMISSION) or submission
    job = SlurmJob(max_timeouts, requeue_killed, named, notice_s)
    job.catch_signals()
    module, _, name = attempt.partition(":")
    try:
        if submission not in (None, named):
            job.yield_verdict("the file that was found is of an earlier job with this id")  # the right one is to come
            sys.exit(ExitStatus.FAILED)
        if job.is_of_another(RunDir(Path(run_dir))):
            with suppress(OSError):  # the log is on a full disk, say
                print(f"[launch] {run_dir}/job.json names another job: this one ends, and requeues nothing", flush=True)
            sys.exit(ExitStatus.SUPERSEDED)
        try:
            rendezvous.export()
            make_attempt = getattr(importlib.import_module(module), name)
        except Exception as error:
            job.yield_verdict(f"{type(error).__name__}: {error}")  # the environment may be whole at the next start
            raise
        sys.exit(make_attempt(Path(run_dir), job=job))
    finally:
        job.record_verdict()


def main(folder: str) -> NoReturn:
    """What the batch script starts in each task, `python -m launch.job FOLDER`: do what this job was submitted for."""
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
    """The id of this process's job; of a task of an array the form by which it is requeued."""
    array, task = processes.environment.get("SLURM_ARRAY_JOB_ID"), processes.environment.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array else processes.environment["SLURM_JOB_ID"]


class SlurmJob:
    """The job that this process runs in."""

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
        self._has_verdict = True  # the end of this process decides how the job ends
        folder = Path(processes.environment.get(batch.FOLDER, os.devnull))
        mark = requeue.mark(self.job_id, submission)
        self._starts = requeue.starts_file(folder, mark)
        self._verdict = requeue.verdict_file(folder, mark, self.restart_count)
        self._was_killed = False
        with suppress(OSError):
            self._was_killed = requeue.failed_starts(self._starts)[0] > 0

    def is_of_another(self, run: RunDir) -> bool:
        """Whether the run has another job: the command of this one was suspended while another one submitted it."""
        with suppress(OSError):  # what works on the run finds out
            return self.submission is not None and not submission.is_named(run, self.submission)
        return False

    def catch_signals(self) -> None:
        """Remember the first signal that asks this job to stop, until the attempt installs its own handlers."""
        for signum in set(STOP_SIGNALS) & set(signals.handled()):
            signal.signal(signum, self._on_signal)
        signal.signal(signal.SIGCONT, signal.SIG_DFL)  # comes with every SIGTERM and means nothing

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.early_signal = self.early_signal or signum

    def identity(self) -> dict[str, Any]:
        """job_id, submission, restart_count, host, node (its name in Slurm), number of nodes, launcher and job_name.

        The last two tell which job it is where the command that submitted it was killed before it recorded that.
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
        """When the batch script of this start began, on `clock.monotonic`; on another machine, this process."""
        boot, _, seconds = processes.environment.get(requeue.BATCH_BEGAN, "").partition(" ")
        with suppress(ValueError):
            if boot and boot == processes.boot_id() and float(seconds) >= 0:
                return min(processes.uptime(float(seconds)), processes.began())
        return processes.began()

    def waited(self) -> dict[str, float]:
        """How long this job waited before it was started this time, by Slurm's clock.

        `hold_s`: held back, by its user, by a dependency, or for two minutes after a requeue. `queue_s`: waiting for
        nodes. Empty if Slurm does not answer.

        If the job was preempted before there was a process to get the signal, this one gets it now: with
        PreemptMode=CANCEL nobody would requeue the job.
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
        """From here on attempts without progress are counted, instead of starts that fail before an attempt began."""
        with suppress(OSError):
            requeue.note_failed_starts(self._starts, 0)

    def cause(self, signum: int) -> str:
        """Why `signum` came: preempted, time limit, cancelled, requeued, node failure or interrupted."""
        return self._requeuer.cause(signum)

    def cause_of_loss(self, record: dict[str, Any]) -> str:
        """How an attempt ended that did not record its end: "node failure", "requeued" or "killed".

        Slurm restarts a job without a signal if its node is lost, and also if somebody requeues it while it is
        suspended.
        """
        mine = {"job_id": self.job_id, "submission": self.submission}
        restarted = is_same_job(record, mine) and record.get("restart_count", 0) < self.restart_count
        if not restarted or self._was_killed:
            return "killed"
        return "node failure" if _node_was_lost(record) else "requeued"

    def requeue_if_needed(self, cause: str) -> str:
        """Requeue the job if `cause` requires it, and return only then; the final cause."""
        final = self._requeuer.requeue(cause)
        if final is None:  # the batch script requeues it
            self.yield_verdict()
            return cause
        return final

    def yield_verdict(self, reason: str | None = None) -> bool:
        """Let another rank or the batch script decide how this job ends, rather than this process's exit."""
        self._has_verdict = False
        if reason is not None:
            with suppress(OSError):
                requeue.note_failed_starts(self._starts, requeue.failed_starts(self._starts)[0], reason)
        return self._requeue_killed

    def record_verdict(self) -> None:
        """Tell the batch script that this process decides how the job ends, unless it yielded that."""
        if self._has_verdict:
            with suppress(OSError):
                files.touch(self._verdict)


def _node_was_lost(record: dict[str, Any]) -> bool:
    """Whether the node of an earlier attempt was lost since that began; also if nothing is known about it."""
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

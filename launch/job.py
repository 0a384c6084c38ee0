"""Inside a Slurm job: what the submitted callable does, and what the attempt may ask of its job.

Slurm tells a job with signals that it has to go, and the same signal means different things: the real
state of the job decides. A job that exits by itself while Slurm still calls it running is over for good,
with status 0 as COMPLETED, so an attempt that was preempted must put itself back in the queue.
"""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from launch import rendezvous, scheduler

# The causes after which this job must put itself back: Slurm would let it end.
# "interrupted" is a SIGTERM to a running job without a preemption (a node that shuts down, say).
LEAVES_THE_QUEUE = {"preempted", "time limit", "interrupted", "node failure"}
# Slurm's reasons for ending a job whose node or batch script is gone; scancel leaves none.
LOST_REASONS = {"NodeDown", "JobLaunchFailure", "SystemFailure"}
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
LOOKS, LOOK_AGAIN_S = 4, 0.5  # at the state of a job that is asked to go and nothing says why
LAST_S = 5.0  # before a job is killed it is put back in the queue, whether or not its step and its save are done
RETRY_S = 5.0  # pause between two attempts to requeue
REFUSALS = 12  # by Slurm, where no end of the job is near that would stop the attempts


def start(run_dir: str, attempt: str, max_timeouts: int | None = None) -> NoReturn:
    """What is submitted: run one attempt in this job and exit with its status.

    Args:
        run_dir: the run's directory, where everything else is read from.
        attempt: `module:function`, called as `function(run_dir, job=job)`.
        max_timeouts: time limits in a row without a new checkpoint after which the run stops; None: they count
            like other attempts without progress.
    """
    job = SlurmJob(max_timeouts)
    job.catch_signals()
    module, _, name = attempt.partition(":")
    try:
        rendezvous.export()
        sys.exit(getattr(importlib.import_module(module), name)(Path(run_dir), job=job))
    finally:
        job.say_end()


def kills_file(folder: Path, job_id: str) -> Path:
    """Counts the times that a job was killed, since an attempt last began; the batch script writes it."""
    return folder / f"{job_id}.kills"


def said_file(folder: Path, job_id: str) -> Path:
    """Says that an attempt has ended by its own decision. A job that ends without it was killed.

    srun's status does not tell: it is 1 after a memory limit as well, and where srun could not start the tasks.
    """
    return folder / f"{job_id}.said"


class SlurmJob:
    """The job that this process runs in (what `runner.job.Job` asks for)."""

    auto_restarts = True

    def __init__(self, max_timeouts: int | None = None) -> None:
        self.max_timeouts = max_timeouts
        self.early_signal: int | None = None
        self.restart_count = rendezvous.restart_count()
        array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
        # A task of an array is requeued by this form of its id.
        self.job_id = f"{array}_{task}" if array else os.environ["SLURM_JOB_ID"]
        self._asked_back = False  # Slurm was told to put the job back, maybe before this attempt was done
        self._decides = True  # whether the end of this process is its own decision
        folder = Path(os.environ.get("SUBMITIT_FOLDER", os.devnull))
        self._kills = kills_file(folder, os.environ["SLURM_JOB_ID"])
        self._said = said_file(folder, os.environ["SLURM_JOB_ID"])
        self._was_killed = self._kills.exists()

    def begun(self) -> None:
        """From here on the attempts are counted and no longer the kills."""
        with suppress(OSError):
            self._kills.unlink()

    def defer(self) -> None:
        """How this job ends is for another rank to say, and not for the end of this process."""
        self._decides = False

    def say_end(self) -> None:
        """Tell the batch script that this process ended by its own decision, if it did."""
        if self._decides:
            with suppress(OSError):
                self._said.touch()

    def catch_signals(self) -> None:
        """Remember the first signal that asks this job to go, until the attempt has handlers of its own.

        Takes over from submitit, whose handlers ignore SIGTERM (every preemption) and leave in the middle
        of a step at SIGUSR2.
        """
        for signum in STOP_SIGNALS:
            signal.signal(signum, self._on_signal)
        signal.signal(signal.SIGCONT, signal.SIG_DFL)  # comes with every SIGTERM and says nothing

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.early_signal = self.early_signal or signum

    def identity(self) -> dict[str, Any]:
        """`job_id`, `restart_count`, `host`, `node` (Slurm's name of it)."""
        return {
            "job_id": self.job_id,
            "restart_count": self.restart_count,
            "host": socket.gethostname(),
            "node": os.environ.get("SLURMD_NODENAME"),
        }

    def lost(self, record: dict[str, Any]) -> str:
        """How an attempt of this run ended that left no word, given its `job_id` and `restart_count`.

        Slurm itself brings a job back without a warning when its node is lost.
        """
        restarted = record.get("job_id") == self.job_id and record.get("restart_count", 0) < self.restart_count
        return "node failure" if restarted and not self._was_killed else "killed"

    def cause(self, signum: int) -> str:
        """Why `signum` came, from the state of the job; only if Slurm is silent, from the signal itself."""
        if signum == signal.SIGINT:
            return "cancelled"
        for _ in range(LOOKS):
            state = self._state()
            cause = _decided(state, self.restart_count) or _asked(state, signum)
            if cause != "interrupted":
                break
            time.sleep(LOOK_AGAIN_S)  # the signal may be here before the state is changed
        if cause in LEAVES_THE_QUEUE:
            self._requeue_at_last(state)
        return cause

    def _state(self) -> dict[str, str]:
        """What Slurm says of this job; empty when it says nothing."""
        try:
            return scheduler.show_job(self.job_id)
        except scheduler.SchedulerError as error:
            _say(f"Slurm does not tell this job's state: {error}")
            return {}

    def _requeue_at_last(self, state: dict[str, str]) -> None:
        """A step, or a save, that takes longer than the notice must not be the end of the run."""
        left_s = _time_left_s(state)
        if left_s is not None:
            timer = threading.Timer(max(0.0, left_s - LAST_S), self._requeue_unfinished)
            timer.daemon = True  # the attempt leaves by itself in time, nearly always
            timer.start()

    def _requeue_unfinished(self) -> None:
        while _decided(state := self._state(), self.restart_count) not in ("requeued", "cancelled"):
            if state and self._requeue(state):
                _say(f"the notice is nearly over and this attempt is not done: job {self.job_id} was put back as it is")
                return
            time.sleep(LOOK_AGAIN_S)

    def leave(self, cause: str) -> str:
        """Put the job back in the queue after a preemption or a time limit, and only then return.

        A refusal is tried again until the job is killed: to return would end the job for good, while a
        preempted job that waits is put back by Slurm itself. Nothing is done while Slurm does not tell the
        job's state: it may have been cancelled while it saved, and then it must not come back. What cannot be
        done here (in a container without scontrol, say) is left to the batch script.
        """
        if cause not in LEAVES_THE_QUEUE:
            return cause
        refused = 0
        while shutil.which("scontrol") and (cause != "interrupted" or refused < REFUSALS):
            state = self._state()
            decided = _decided(state, self.restart_count)
            if decided == "cancelled":
                return decided
            if decided == "requeued":
                return cause if self._asked_back else decided
            if state and self._requeue(state):
                # Slurm leaves a job as it is that was cancelled since it told the state.
                if _decided(self._state(), self.restart_count) == "cancelled":
                    return "cancelled"
                _say(f"{cause}: job {self.job_id} is in the queue again")
                return cause
            refused += bool(state)
            time.sleep(RETRY_S)
        self._decides = False
        return cause

    def _requeue(self, state: dict[str, str]) -> bool:
        """Have Slurm put this job back, which was in `state`; whether it says that it did."""
        self._asked_back = True  # also where no answer comes
        try:
            scheduler.requeue(self.job_id, only_running=_is_running(state))
        except scheduler.SchedulerError as error:
            _say(f"cannot requeue job {self.job_id} yet: {error}")
            return False
        return True


def _is_running(state: dict[str, str]) -> bool:
    return state.get("JobState", "COMPLETING") not in scheduler.NOT_RUNNING


def _decided(state: dict[str, str], restart_count: int) -> str | None:
    """How Slurm has ended a job already; None while it runs, or while Slurm is silent."""
    if int(state.get("Restarts", "0")) > restart_count:  # it may even run again, elsewhere
        return "requeued"
    if not state or _is_running(state):
        return None
    reason = state.get("Reason", "")
    if "Time" in reason:
        return "time limit"
    if reason in LOST_REASONS:
        return "node failure"
    return "preempted" if _is_ended_by_preemption(state) else "cancelled"


def _is_ended_by_preemption(state: dict[str, str]) -> bool:
    """Whether Slurm cancelled a job to make room (PreemptMode=CANCEL), without a grace: at that very second.

    A job that is cancelled in its grace has a time of preemption as well, and ends later than that.
    """
    preempted = _time(state.get("PreemptTime"))
    return preempted is not None and preempted == _time(state.get("EndTime"))


def _asked(state: dict[str, str], signum: int) -> str:
    """Why a job that still runs is asked to go."""
    if _time(state.get("PreemptTime")):
        return "preempted"
    return "time limit" if signum in (signal.SIGUSR1, signal.SIGUSR2) else "interrupted"


def _time_left_s(state: dict[str, str]) -> float | None:
    """Seconds until Slurm ends the job by its time limit or the grace of its preemption; None: without end."""
    end = _time(state.get("EndTime"))
    return None if end is None else (end - datetime.now()).total_seconds()


def _time(text: str | None) -> datetime | None:
    """A time as Slurm prints it; None for its many words for none."""
    try:
        return datetime.fromisoformat(text or "")
    except ValueError:
        return None


def _say(text: str) -> None:
    print(f"[launch] {text}", file=sys.stderr, flush=True)

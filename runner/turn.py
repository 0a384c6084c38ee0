"""When an attempt may begin: it takes the lease of its run, and a job waits for it if another still holds it.

The job before may still be saving, after a scancel say, while the scheduler has started this one on another
node. Nothing here imports torch, numpy or hydra.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from runner.errors import LockedError, StoppedError
from runner.job import Job
from runner.lease import Lease
from runner.run_dir import RunDir
from runner.signals import STOP

JOB_WAIT_S = 300.0
"""A job that ends is over for good, one that waits holds a node: longer than a save and Slurm's KillWait, and
shorter than the other ranks wait for rank 0."""


def take(run: RunDir, job: Job, timeout_s: float, report: Callable[[str], None]) -> Lease:
    """The lease of `run`; call on rank 0.

    Raises:
        LockedError: somebody else holds it and lives (for a job: for JOB_WAIT_S longer).
        StoppedError: a signal came while the job waited; it has seen to its coming back.
        UserError: the run directory cannot be written.
    """
    holder = {**job.identity(), "pid": os.getpid()}
    if not job.auto_restarts:
        return Lease.acquire(run.lease, holder, timeout_s, report=report)
    try:
        return Lease.await_turn(run.lease, holder, timeout_s, JOB_WAIT_S, asked_to_stop=lambda: STOP, report=report)
    except LockedError as error:
        if STOP.signum is None:
            raise
        cause = job.leave(job.cause(STOP.signum))
        raise StoppedError(f"{str(error).partition(';')[0]}; {cause} ({STOP.name}) while waiting for it") from None

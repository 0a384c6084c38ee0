"""When an attempt may begin: it takes the lease of its run, and a job waits for it if another still holds it.

The job before may still be saving, after a scancel say, while the scheduler has started this one on another
node. Nothing here imports torch, numpy or hydra.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runner.errors import LockedError, StoppedError
from runner.job import Job, LocalJob
from runner.lease import Lease
from runner.run_dir import RunDir
from runner.signals import STOP

JOB_WAIT_S = 300.0
"""A job that ends is over for good, one that waits holds a node: longer than a save and Slurm's KillWait, and
shorter than the other ranks wait for rank 0."""


_reserved: dict[Path, Lease] = {}


@contextmanager
def reserved(run: RunDir, timeout_s: float, report: Callable[[str], None]) -> Iterator[None]:
    """Hold the lease of `run` for the attempt that this process is going to make inside the block.

    What a command finds in a run directory, and freezes there, must hold until its attempt begins.

    Raises:
        LockedError: somebody else holds it and lives.
        UserError: the run directory cannot be written.
    """
    lease = _reserved[run.lease] = Lease.acquire(run.lease, _holder(LocalJob()), timeout_s, report=report)
    try:
        yield
    finally:
        if _reserved.pop(run.lease, None) is not None:  # no attempt has taken it
            lease.release()


def _holder(job: Job) -> dict[str, Any]:
    return {**job.identity(), "pid": os.getpid()}


def take(run: RunDir, job: Job, timeout_s: float, report: Callable[[str], None]) -> Lease:
    """The lease of `run`; call on rank 0.

    Raises:
        LockedError: somebody else holds it and lives (for a job: for JOB_WAIT_S longer).
        StoppedError: a signal came while the job waited; it has seen to its coming back.
        UserError: the run directory cannot be written.
    """
    if (lease := _reserved.pop(run.lease, None)) is not None:
        return lease
    holder = _holder(job)
    if not job.auto_restarts:
        return Lease.acquire(run.lease, holder, timeout_s, report=report)
    try:
        return Lease.await_turn(run.lease, holder, timeout_s, JOB_WAIT_S, asked_to_stop=lambda: STOP, report=report)
    except LockedError as error:
        if STOP.signum is None:
            raise
        cause = job.leave(job.cause(STOP.signum))
        raise StoppedError(f"{str(error).partition(';')[0]}; {cause} ({STOP.name}) while waiting for it") from None

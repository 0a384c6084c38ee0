"""Removes the checkpoints of paused trials."""

from __future__ import annotations

from contextlib import suppress

from runner.checkpoint.files.directory import Directory
from runner.checkpoint.files.store import Fence
from runner.errors import UserError
from runner.rundir.lease import Lease
from runner.rundir.paths import RunDir
from runner.search.decide import best
from runner.search.directory import Record, SearchDir
from runner.search.journal import Journal


def prune(search: SearchDir, record: Record, journal: Journal) -> None:
    """Remove the checkpoints of the paused trials of a search that has ended, unless it keeps them; the best keeps its.

    A run that somebody trains or has removed is left alone.
    """
    found = best(record.rules, journal)
    for trial in journal.trials if record.prune else []:
        if trial.rung < len(journal.rungs) - 1 and (found is None or trial is not found.trial):
            for name in trial.runs.values():
                with suppress(UserError, OSError):
                    _remove_checkpoints(search.run(name))


def _remove_checkpoints(run: RunDir) -> None:
    if not run.newest_step():
        return
    with Lease.acquire(run.lease, {"job_id": None}, within=run.path) as lease:
        store = Directory(run.checkpoints, Fence(lease.fence, lease.check_fence))
        store.look_anew()
        pinned = store.pinned()
        for step in run.checkpoint_steps():
            if step not in pinned:
                store.delete(run.checkpoint(step).name)
        store.sweep()

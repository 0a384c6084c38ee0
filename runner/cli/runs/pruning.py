"""Delete the checkpoints of paused trials."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from runner.checkpoint.files.directory import Directory
from runner.checkpoint.files.store import Fence
from runner.errors import UserError
from runner.rundir.lease import Lease
from runner.rundir.paths import RunDir
from runner.rundir.state import look
from runner.search.decide import best, decide, gives_up
from runner.search.directory import Record, SearchDir, is_search, read_journal
from runner.search.journal import DONE, Journal
from runner.system import files


def prune(search: SearchDir, record: Record, journal: Journal) -> None:
    """Delete the checkpoints of paused trials after a search has ended, unless `search.prune` is false.

    The best trial keeps its checkpoints. So do runs that another search needs, and runs that changed since this search
    paused them, e.g. because another process trains them.
    """
    if not record.prune or gives_up(journal):  # the search continues once the cause is fixed
        return
    found, left = best(record.rules, journal), dict[RunDir, int]()
    for trial in journal.trials:
        if trial.rung < len(journal.rungs) - 1 and (found is None or trial is not found.trial):
            for repeat, name in trial.runs.items():
                result, run = trial.results.get((repeat, trial.rung)), search.run(name)
                with suppress(OSError):
                    if result is not None and run.newest_step() == result.step:
                        left[run] = result.step
    try:
        wanted = _wanted_by_others(search) if left else set[Path]()
    except (UserError, OSError):  # a search that cannot be read may need any of these runs
        return
    for run, step in left.items():
        with suppress(UserError, OSError, ValueError):
            if run.path not in wanted:
                _remove_checkpoints(run, step)


def _wanted_by_others(search: SearchDir) -> set[Path]:
    """Return the runs of other searches in the same directory that keep their checkpoints or have not ended.

    Raises:
        RunDirError: one of these searches is malformed.
        OSError: one of these searches cannot be read.
    """
    root, found = search.path.parent, set[Path]()
    for name in files.list_dir(root):
        if (other := SearchDir(root / name)) != search and is_search(other.path):
            record = Record.read(other)
            journal = read_journal(other, record.rules.repeats)
            if not record.prune or gives_up(journal) or decide(record.rules, journal).what != DONE:
                found |= {other.run(name).path for trial in journal.trials for name in trial.runs.values()}
    return found


def _remove_checkpoints(run: RunDir, step: int) -> None:
    """Delete the checkpoints of a run that is paused at `step`."""
    with Lease.acquire(run.lease, {"job_id": None}, within=run.path) as lease:
        if run.newest_step() != step or look(run).word != "paused":
            return
        store = Directory(run.checkpoints, Fence(lease.fence, lease.check_fence))
        store.look_anew()
        pinned = store.pinned()
        for each in run.checkpoint_steps():
            if each not in pinned:
                store.delete(run.checkpoint(each).name)
        store.sweep()

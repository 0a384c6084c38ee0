"""Faults in how whole runs are moved, packed, removed, forked and pruned; see `tests/simulation/custodies.py`."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest

from runner.checkpoint import directory as checkpoint_dir
from runner.checkpoint import pins
from runner.cli import archive, housekeeping, mv, rm, start
from runner.rundir import custody, lease, submitted_jobs
from runner.system import files, processes
from simulation import custodies
from simulation.brought_back.fault import Fault


def _held_by_nobody(patch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def taken(path: Path, report: object = None) -> Iterator[custody.Custody]:
        yield custody.Custody(custody.run_at(path), [])

    for module in (mv, rm, archive):
        patch.setattr(module, "custody", taken)


def _without_looking_again(patch: pytest.MonkeyPatch) -> None:
    """As it was: the run directory is made where it was moved from, and moved again, empty."""
    real = lease.Lease._take.__func__  # type: ignore[attr-defined]

    def take(cls: Any, *arguments: Any) -> Any:
        return real(cls, *arguments[:-1], None)

    patch.setattr(lease.Lease, "_take", classmethod(take))
    patch.setattr(custody, "is_run", lambda run: files.is_dir(run.path))


def _never_looked_at_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(custody.Custody, "check", lambda self: None)


def _in_place(patch: pytest.MonkeyPatch) -> None:
    def remove(held: custody.Custody, way: str = "removed") -> Path:
        files.remove_tree(held.run.path)
        return held.run.path

    patch.setattr(rm, "remove", remove)
    patch.setattr(archive, "remove", remove)


def _removed_first(patch: pytest.MonkeyPatch) -> None:
    real_name, real_remove, removing = archive._name, housekeeping.remove, WeakSet[Any]()

    def name(temporary: Path, target: Path) -> None:
        if threading.current_thread() not in removing:
            real_name(temporary, target)

    def remove(held: custody.Custody, way: str = "removed") -> Path:
        aside = real_remove(held, way)
        target = custodies.ARCHIVE
        real_name(target.with_name(f".{target.name}.tmp-{processes.tag()}"), target)
        return aside

    patch.setattr(archive, "refuse_waited_for", lambda run: removing.add(threading.current_thread()))
    patch.setattr(archive, "_name", name)
    patch.setattr(archive, "remove", remove)


def _unsynced_archive(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(archive, "files", _Other(files, fsync_fd=lambda fd: None))


def _unsynced_name(patch: pytest.MonkeyPatch) -> None:
    """As it was: a killed command has named the file, and the next one removes the run before that name is durable."""
    patch.setattr(archive, "_sync", lambda target: None)


class _Other:
    """A module with some other functions."""

    def __init__(self, module: Any, **others: Any) -> None:
        self._module, self._others = module, others

    def __getattr__(self, name: str) -> Any:
        return self._others.get(name) or getattr(self._module, name)


def _unpinned_fork(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(start, "reserve", lambda checkpoint: checkpoint.with_name("no pin"))


def _pins_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pins, "kept", lambda directory: set())
    patch.setattr(checkpoint_dir, "is_kept", lambda checkpoint: False)


def _pin_not_looked_for_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checkpoint_dir, "is_kept", lambda checkpoint: False)


def _taken_stays_away(patch: pytest.MonkeyPatch) -> None:
    def sweep(directory: Path, fence: checkpoint_dir.Fence) -> None:
        found = checkpoint_dir.leftovers(directory)
        fence.check()
        for path in found:
            checkpoint_dir.remove_tree(path)

    patch.setattr(checkpoint_dir, "sweep", sweep)


def _fence_not_checked(patch: pytest.MonkeyPatch) -> None:
    real = checkpoint_dir._take

    def take(path: Path, name: str, fence: checkpoint_dir.Fence) -> Path:
        return real(path, name, checkpoint_dir.Fence(fence.number))

    patch.setattr(checkpoint_dir, "_take", take)


def _no_submission(patch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def submitting(jobs: Sequence[Any], guards: dict[Path, files.Guard]) -> Iterator[None]:
        guards.update({job.run_dir: files.Guard("submission-00000000", lambda: None) for job in jobs})
        yield

    patch.setattr(start, "_submitting", submitting)


def _queue_not_asked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(custody, "_check_queue", lambda run: None)


def _evaluations_before(patch: pytest.MonkeyPatch) -> None:
    """As it was: an evaluation by other settings that begins meanwhile is overlooked."""
    patch.setattr("runner.training.evaluate.make_work", lambda *arguments: None)


def _as_listed_before(patch: pytest.MonkeyPatch) -> None:
    """As it was: job.json is looked at before it is opened, and no directory is looked at anew."""
    real = submitted_jobs.launcher_of
    patch.setattr(submitted_jobs, "launcher_of", lambda run: real(run) if files.exists(run.job) else None)
    for module in (custody, archive):
        patch.setattr(module, "files", _Other(files, look_anew=lambda directory: None))


def _waiting_branch(patch: pytest.MonkeyPatch) -> None:
    for module in (mv, rm, archive, housekeeping):
        patch.setattr(module, "refuse_waited_for", lambda run: None)


FAULTS = tuple(
    Fault(name, "custody", what, told_in, apply)
    for name, what, told_in, apply in (
        ("moved-without-custody", "`mv`, `rm` and `archive` hold no lease of the run", "`custody`", _held_by_nobody),
        (
            "moved-twice",
            "who has waited for the lease of a run that was moved makes an empty one in its place, and moves that",
            "`Lease.acquire`, `within`",
            _without_looking_again,
        ),
        (
            "custody-not-looked-at-again",
            "who was suspended moves, packs or removes a run that others have taken over",
            "`Custody.check`",
            _never_looked_at_again,
        ),
        ("removed-in-place", "`rm` deletes a run under its name", "`housekeeping.remove`", _in_place),
        (
            "removed-before-packed",
            "`archive --remove` removes before the file has its name",
            "docs/housekeeping.md",
            _removed_first,
        ),
        (
            "archive-not-synced",
            "an archive gets its name before it is on the disk",
            "`archive._pack`",
            _unsynced_archive,
        ),
        (
            "archive-name-not-synced",
            "`archive --remove` relies on the name that a killed one gave the file, which may not be on the disk",
            "`archive._sync`",
            _unsynced_name,
        ),
        ("fork-without-pin", "a branch that waits does not pin what it waits for", "docs/forks.md", _unpinned_fork),
        ("pins-ignored", "retention deletes what is pinned", "`pins`", _pins_ignored),
        ("pin-overlooked", "a deletion does not look for a pin again", "`directory.delete`", _pin_not_looked_for_again),
        ("taken-for-deleted", "a sweep does not put back what was pinned", "`directory.sweep`", _taken_stays_away),
        (
            "deletion-not-fenced",
            "a deletion does not look whether it was superseded",
            "`directory`",
            _fence_not_checked,
        ),
        (
            "submission-not-held",
            "a command that submits holds no lease",
            "`_submitting`",
            _no_submission,
        ),
        ("queue-not-asked", "a run with a job in the queue is moved", "docs/housekeeping.md", _queue_not_asked),
        (
            "evaluation-overlooked",
            "a run is moved while an evaluation by new settings begins",
            "`evaluations.make_work`",
            _evaluations_before,
        ),
        (
            "job-remembered-missing",
            "what another machine has just made in a run is overlooked",
            "`custody`, `launcher_of`",
            _as_listed_before,
        ),
        ("trunk-not-kept", "a trunk is removed that a branch waits for", "docs/housekeeping.md", _waiting_branch),
    )
)

"""Faults in how runs are moved, packed, removed, forked and pruned. See `tests/simulation/custodies.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runner.checkpoint.files import directory as checkpoint_dir
from runner.checkpoint.files import pins
from runner.checkpoint.files.commit import remove_tree
from runner.checkpoint.files.directory import Directory
from runner.checkpoint.files.store import Fence
from runner.cli.runs import archive, mv, rm
from runner.cli.start import start
from runner.rundir import custody, lease, submitted_jobs
from runner.rundir.paths import RunDir
from runner.system import files
from simulation.brought_back.fault import Fault


def _held_by_nobody(patch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def taken(run: RunDir, report: object = None) -> Iterator[custody.Custody]:
        free: Any = SimpleNamespace(fence=0, check_fence=lambda: None, moved=lambda path: None)
        yield custody.Custody(run, free, free)

    for module in (mv, rm, archive):
        patch.setattr(module, "custody", taken)


def _without_looking_again(patch: pytest.MonkeyPatch) -> None:
    """Recreate the moved run's directory where it was, and move it again, empty, as an earlier version did."""
    real = lease.Lease._take.__func__  # type: ignore[attr-defined]

    def take(cls: Any, *arguments: Any) -> Any:
        return real(cls, *arguments[:-1], None)

    patch.setattr(lease.Lease, "_take", classmethod(take))
    patch.setattr(custody, "is_run", lambda run: files.is_dir(run.path))


def _never_looked_at_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(custody.Custody, "check", lambda self: None)


def _in_place(patch: pytest.MonkeyPatch) -> None:
    def remove(held: custody.Custody) -> Path:
        files.remove_tree(held.run.path)
        return held.run.path

    patch.setattr(rm, "remove", remove)


def _unsynced_archive(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(archive, "files", _Other(files, fsync_fd=lambda fd: None))


class _Other:
    """A module with some functions replaced."""

    def __init__(self, module: Any, **others: Any) -> None:
        self._module, self._others = module, others

    def __getattr__(self, name: str) -> Any:
        return self._others.get(name) or getattr(self._module, name)


def _pins_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pins, "pinned", lambda directory: set())
    patch.setattr(checkpoint_dir, "is_pinned", lambda checkpoint: False)


def _pin_not_looked_for_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checkpoint_dir, "is_pinned", lambda checkpoint: False)


def _taken_stays_away(patch: pytest.MonkeyPatch) -> None:
    def sweep(self: Directory) -> None:
        found = checkpoint_dir.leftovers(self.path)
        self._fence.check()
        for path in found:
            remove_tree(path)

    patch.setattr(Directory, "sweep", sweep)


def _fence_not_checked(patch: pytest.MonkeyPatch) -> None:
    real = checkpoint_dir._take

    def take(path: Path, name: str, fence: Fence) -> Path:
        return real(path, name, Fence(fence.number))

    patch.setattr(checkpoint_dir, "_take", take)


def _no_submission(patch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def submitting(jobs: Sequence[Any], guards: dict[Path, files.Guard]) -> Iterator[None]:
        guards.update({job.run_dir: files.Guard("submission-00000000", lambda: None) for job in jobs})
        yield

    patch.setattr(start, "_submitting", submitting)


def _queue_not_asked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(custody, "_check_queue", lambda run: None)


def _as_listed_before(patch: pytest.MonkeyPatch) -> None:
    """Check job.json before opening it and trust old listings, as an earlier version did."""
    real = submitted_jobs.launcher_of
    patch.setattr(submitted_jobs, "launcher_of", lambda run: real(run) if files.exists(run.job) else None)
    for module in (custody, archive):
        patch.setattr(module, "files", _Other(files, look_anew=lambda directory: None))


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
            "archive-not-synced",
            "an archive gets its name before it is on the disk",
            "`archive._pack`",
            _unsynced_archive,
        ),
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
            "job-remembered-missing",
            "what another machine has just made in a run is overlooked",
            "`custody`, `launcher_of`",
            _as_listed_before,
        ),
    )
)

"""Faults of the lease and of writes under its guard."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.rundir import lease
from runner.rundir.lease import Lease
from runner.system import files, processes
from simulation.brought_back.fault import Fault


def _no_sweep(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(files, "sweep", lambda directory, lease, below: None)


def _no_check(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lease, "check_fence", lambda self: None)


def _check_first(patch: pytest.MonkeyPatch) -> None:
    real = files._replace

    def replace(path: Path, fill: Callable[[int], None], durable: bool, guard: files.Guard | None) -> int:
        if guard is not None:
            guard.check()
            guard = files.Guard(guard.tag, lambda: None)
        return real(path, fill, durable, guard)

    patch.setattr(files, "_replace", replace)


def _no_fsync_of_files(patch: pytest.MonkeyPatch) -> None:
    real = files._replace
    patch.setattr(files, "_replace", lambda path, fill, durable, guard: real(path, fill, False, guard))


def _no_fsync_of_directories(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(files, "fsync_dir", lambda path: None)


def _in_place(patch: pytest.MonkeyPatch) -> None:
    def replace(path: Path, fill: Callable[[int], None], durable: bool, guard: files.Guard | None) -> int:
        if guard is not None:
            guard.check()
        fd = files.open_fd(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        fill(fd)
        files.fsync_fd(fd)
        return fd

    patch.setattr(files, "_replace", replace)


def _not_exclusive(patch: pytest.MonkeyPatch) -> None:
    def create(path: Path, content: bytes) -> None:
        if files.exists(path):
            raise FileExistsError
        fd = files.open_fd(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        files.write_all(fd, content)
        files.fsync_fd(fd)
        files.fsync_dir(path.parent)
        files.close_fd(fd)

    patch.setattr(files, "create", create)


def _by_number_of_process(patch: pytest.MonkeyPatch) -> None:
    real = lease.liveness

    def liveness(holder: Any, own: Any) -> str:
        return real({**holder, "boot_id": own["boot_id"]} if "pid" in holder else holder, own)

    patch.setattr(processes, "is_over", lambda state, start_time: state is None)
    patch.setattr(lease, "liveness", liveness)


def _no_heartbeat(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lease, "_wait_until_gone", lambda *arguments: None)


def _tag_without_number(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lease, "guard", property(lambda self: files.Guard(self.directory.name, self.check_fence)))


def _keeps_temporary_files(patch: pytest.MonkeyPatch) -> None:
    real = files.remove

    def remove(path: Path) -> None:
        if ".tmp-" not in path.name:
            real(path)

    patch.setattr(files, "remove", remove)


FAULTS = [
    Fault("no-sweep", "lease", "a new holder leaves the temporary files of older ones", "`files.Guard`", _no_sweep),
    Fault("no-check", "lease", "a write does not ask whether the lease is still held", "`files.Guard`", _no_check),
    Fault(
        "check-first",
        "lease",
        "a write asks before its temporary file exists, not after",
        "`files.Guard`",
        _check_first,
    ),
    Fault(
        "no-fsync",
        "lease",
        "a replaced file is renamed before it is synced",
        "`files.write_atomic`",
        _no_fsync_of_files,
    ),
    Fault(
        "no-fsync-of-names",
        "lease",
        "directories are not synced after a rename",
        "`files.write_atomic`",
        _no_fsync_of_directories,
    ),
    Fault("in-place", "lease", "a file is overwritten instead of replaced", "`files.write_atomic`", _in_place),
    Fault(
        "not-exclusive",
        "lease",
        "a number is taken by a look and a write, not by an exclusive creation",
        "`files.create`",
        _not_exclusive,
    ),
    Fault(
        "process-number",
        "lease",
        "a holder is recognised by the number of its process alone, which comes again",
        "`lease.liveness`",
        _by_number_of_process,
    ),
    Fault("no-wait", "lease", "a newcomer takes over from a live holder", "`runner.rundir.lease`", _no_heartbeat),
    Fault(
        "tag-without-number",
        "lease",
        "temporary files do not name their holder's number",
        "`files.Guard`",
        _tag_without_number,
    ),
    Fault(
        "keeps-temporary",
        "lease",
        "a failed write leaves its temporary file",
        "`files.write_atomic`",
        _keeps_temporary_files,
    ),
]

"""Check that a run directory is intact, and that resuming it runs no other user's code.

A frozen config names classes that a resume imports and calls. Anybody who can write to it can therefore run code as the
user who resumes. Nothing here imports torch, hydra or numpy.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from runner.errors import RunDirError
from runner.rundir.paths import RunDir
from runner.system import accounts, files, processes

VARIABLE = "RUNNER_TRUST"
"""Directories, separated by colons, in which any run is resumed, whoever can write there. It is no setting, because a
run's settings are in the very file that is in doubt. Ranks and jobs inherit it with the environment."""

RECORDS = {
    name: stat.S_IFREG if Path(name).suffix else stat.S_IFDIR
    for name in sorted(
        getattr(RunDir(Path()), name).name
        for name, member in vars(RunDir).items()
        if isinstance(member, property) and getattr(RunDir(Path()), name).parent == Path()
    )
}
"""The kind of each record in a run directory, by name."""
KINDS = {stat.S_IFLNK: "a symbolic link", stat.S_IFDIR: "a directory", stat.S_IFREG: "a regular file"}


@contextmanager
def reading(run: RunDir) -> Iterator[None]:
    """Convert any error from reading a run's records within the block to a RunDirError that explains it.

    Raises:
        RunDirError: a record cannot be read, is not a regular file, or has values of unexpected types.
    """
    try:
        check_kinds(run)
        yield
    except OSError as error:
        reason = f"{error.filename or run.path} cannot be read ({error.strerror or error})"
        raise RunDirError(f"{reason}: restore it from a copy, or remove it if it is not the run's") from error
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError) as error:
        reason = f"the records in {run.path} are malformed ({type(error).__name__}: {error!s:.200})"
        raise RunDirError(f"{reason}: restore them from a copy") from error


def check_kinds(run: RunDir) -> None:
    """Check that each existing record of a run is a regular file, or a directory where a directory is expected.

    The run directory and its parents may be links, because the user chose the path. Links inside the run directory are
    refused, because they could lead to files outside it.

    Raises:
        RunDirError: an entry is neither; the message names the first one.
        OSError: the run directory cannot be read.
    """
    found = files.kinds(run.path)
    for name, expected in RECORDS.items():
        kind = found.get(name, expected)
        if kind != expected:
            what = f"{run.path / name} is {KINDS.get(kind, 'a special file')}, and not {KINDS[expected]}"
            raise RunDirError(
                f"{what}: remove it, or put the original back; only the run directory as a whole may be a link "
                "(run.dir)"
            )


def check_trusted(run: RunDir) -> None:
    """Check that this user or root owns the run directory and its config, and nobody else can write to them.

    If the run directory is a link, this user or root must own the link too. Otherwise other users could create a link
    with a predictable name that leads to a different run of this user. Group-writable is allowed if the group is the
    user's own (`accounts.is_private_group`) and there is no access list. Nothing is checked in directories listed in
    the environment variable RUNNER_TRUST.

    Raises:
        RunDirError: names the path, its owner and mode, and the remedy; or see `check_kinds`.
        OSError: the run directory cannot be read.
    """
    _check_link(run.path)
    check_kinds(run)
    for path in (run.path, run.config):
        with suppress(FileNotFoundError, NotADirectoryError):
            remedy = "read it, and copy the run to a directory of your own (cp -r)"
            check_private(path, run.path, "resuming it runs the classes that its config names", remedy)


def check_private(path: Path, trusted: Path, why: str, remedy: str) -> None:
    """Check that this user or root owns a path, and nobody else can write to it; see `check_trusted`.

    Args:
        path: a file or a directory.
        trusted: the directory that RUNNER_TRUST would have to list.
        why: why it matters, for the message.
        remedy: what to do if it is another user's.

    Raises:
        RunDirError: names the path, its owner and mode, and the remedy.
        OSError: it cannot be read.
    """
    found = files.stat(path)
    if (fault := _fault(path, found)) and not _is_named_trusted(trusted):
        owner, mode = accounts.user_name(found.st_uid), stat.filemode(found.st_mode)
        raise RunDirError(
            f"{path} {fault[0]} (owner {owner}, mode {mode}), and {why}: {fault[1] or remedy}, or set "
            f"{VARIABLE}={trusted} if everybody who can write there may run code as you"
        )


def _check_link(path: Path) -> None:
    """Refuse a run directory that is another user's link, unless the link's parent directory is trusted."""
    with suppress(FileNotFoundError, NotADirectoryError):
        found = files.lstat(path)
        if stat.S_ISLNK(found.st_mode) and not _is_ours(found) and not _is_named_trusted(path.parent):
            owner = accounts.user_name(found.st_uid)
            raise RunDirError(
                f"{path} is a link that belongs to another user (owner {owner}), who decides which run it leads to: "
                f"use the run directory itself, {files.resolve(path)}, or another name"
            )


def is_private(path: Path) -> bool:
    """Return whether this user or root owns a directory, and nobody else can write to it; see `check_trusted`.

    Raises:
        OSError: it cannot be read.
    """
    return _is_named_trusted(path) or _fault(path, files.stat(path)) is None


def _is_named_trusted(path: Path) -> bool:
    named = [files.resolve(text) for text in processes.environment.get(VARIABLE, "").split(os.pathsep) if text]
    return any(files.resolve(path).is_relative_to(directory) for directory in named)


def _is_ours(found: os.stat_result) -> bool:
    return found.st_uid in (processes.effective_user_id(), 0)


def _fault(path: Path, found: os.stat_result) -> tuple[str, str | None] | None:
    """Describe a problem with the owner or mode, and a remedy if there is one. Return None if there is no problem."""
    if not _is_ours(found):
        return "belongs to another user", None
    by_group = found.st_mode & stat.S_IWGRP
    if by_group and (files.has_access_list(path) or not accounts.is_private_group(found.st_gid)):
        return "can be written by its group", f"run `chmod g-w {path}`"
    if found.st_mode & stat.S_IWOTH:
        return "can be written by everybody", f"run `chmod go-w {path}`"
    return None

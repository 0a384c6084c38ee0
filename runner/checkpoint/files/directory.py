"""Store checkpoints in a directory: name them, set them aside, delete them, and remove leftovers.

    step_00000100                    committed; the step in its manifest must match its name
    step_00000100.tmp-<fence>-<pid>  being written, deleted or set aside, or left behind by a kill
    step_00000100.corrupt            set aside because it is corrupt; `.corrupt-2` etc. if that name exists
    step_00000100.misnamed           set aside because its manifest has a different step

All other entries of the directory are left unchanged. This module does not import torch.

A superseded process cannot change anything here, even if it was suspended and wakes up late. To write, delete or set
aside a checkpoint, a process creates a temporary directory with its fencing number in the name. It then checks the
fence, and renames an entry into or out of that directory. A newer lease holder first takes its fencing number, then
renames temporary directories with older numbers. So the older process either fails the check or finds its directory
gone.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from runner.checkpoint.files.commit import NewFiles, Transaction, remove_tree, temporary_name
from runner.checkpoint.files.pins import is_pinned, pinned
from runner.checkpoint.files.reading import patiently
from runner.checkpoint.files.store import SET_ASIDE, Fence, Store
from runner.errors import CheckpointError
from runner.rundir.evaluations import by_own_settings
from runner.rundir.paths import RunDir
from runner.system import files

_log = logging.getLogger(__name__)

_TEMPORARY = re.compile(
    r"step_\d+(?:\.(?:corrupt|misnamed)(?:-\d+)?)?\.tmp-(?P<fence>\d+)-\d+(?:-taken|-swept\d+|-again\d+)?"
)
_TAKEN = "taken"  # name of a checkpoint in a temporary directory while it is being deleted
NOBODY = Fence()  # for checkpoints that no other process can change
_COUNT = itertools.count()


@dataclass(frozen=True)
class Folder:
    """A checkpoint that is stored as a directory. Implements `Stored`."""

    path: Path

    def wrong_kind(self) -> str | None:
        mode = files.lstat(self.path).st_mode
        if stat.S_ISDIR(mode):
            return None
        return "a link" if stat.S_ISLNK(mode) else "a file"

    def names(self) -> list[str]:
        return files.list_dir(self.path)

    def size(self, name: str) -> int:
        return files.lstat(self.path / name).st_size

    def open(self, name: str) -> tuple[BinaryIO, int]:
        file = files.open_regular(self.path / name)
        try:
            return file, files.size_of(file.fileno())
        except BaseException:
            file.close()
            raise


class Directory:
    """A run's checkpoints, stored as subdirectories of one directory. Implements `Store`.

    Args:
        path: the directory. The first save creates it.
        fence: fence of the attempt that changes the checkpoints.
    """

    def __init__(self, path: Path, fence: Fence = NOBODY) -> None:
        self.path = path
        self._fence = fence
        self._prepared = False

    def look_anew(self) -> None:
        """Refresh the directory, so that the next listing is current.

        Without this, checkpoints that another machine committed may be missing from the listing; see `files.look_anew`.
        """
        with contextlib.suppress(OSError):  # the directory may not exist yet, or may belong to another user
            files.look_anew(self.path)

    def names(self) -> list[str]:
        try:
            return patiently(self.path, lambda: files.list_dir(self.path))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read ({error.strerror}); restore it and rerun") from error

    def results(self) -> dict[int, dict[str, Any]]:
        run = RunDir(self.path.parent)
        try:
            return patiently(run.evaluations, lambda: by_own_settings(run))
        except OSError as error:
            raise CheckpointError(
                f"{run.evaluations} cannot be read ({error.strerror}); restore it and rerun"
            ) from error

    def at(self, name: str) -> Folder:
        return Folder(self.path / name)

    def save(self, name: str) -> Transaction:
        return Transaction(self.path / name, self._fence, self.prepare)

    def writer(self, path: Path) -> NewFiles:
        return NewFiles(path)

    def set_aside(self, name: str, mark: str, why: str) -> None:
        path = self.path / name
        number, target = 1, path.with_name(f"{name}.{mark}")
        try:
            while files.is_taken(target):
                number += 1
                target = path.with_name(f"{name}.{mark}-{number}")
            container = _take(path, target.name, self._fence)
            files.rename(container / target.name, target)
            files.fsync_dir(self.path)
            remove_tree(container)
            _log.warning(f"checkpoint {name} is {mark} ({why}) and was set aside as {target.name}")
        except OSError as error:
            _log.warning(f"checkpoint {name} is {mark} ({why}) and cannot be set aside ({error.strerror})")

    def delete(self, name: str) -> None:
        """Delete a checkpoint atomically, unless it is pinned. No process sees a partly deleted checkpoint.

        Raises:
            SupersededError: a newer attempt holds the lease; nothing was changed.
            OSError: the file system returned an error.
        """
        path = self.path / name
        container = _take(path, _TAKEN, self._fence)
        if is_pinned(path):  # check again: a process that pins it later finds it gone
            files.rename(container / _TAKEN, path)
        else:
            files.rename(container / _TAKEN, container / "deleted")  # `sweep` does not restore this name
        files.fsync_dir(path.parent)
        remove_tree(container)

    def sweep(self) -> None:
        """Remove leftovers of killed saves and deletions. Call it only while this attempt has no save in flight.

        The directory is listed before the fence is checked. So the list cannot contain directories of a newer attempt,
        even if this process is suspended after the listing. Each leftover is renamed first, so that an older process
        can no longer rename anything into or out of it. If setting a checkpoint aside was interrupted, it is completed.
        If a checkpoint was pinned before its deletion, its name is restored.

        Raises:
            SupersededError: a newer attempt holds the lease.
            CheckpointError: the directory is not readable, or a leftover of an older attempt cannot be renamed.
        """
        found = leftovers(self.path)
        self._fence.check()
        for path in found:
            step, whole = path.with_name(path.name.partition(".")[0]), path.name.partition(".tmp-")[0]
            mine = temporary_name(step, self._fence, f"-swept{next(_COUNT)}")
            left = path
            try:
                _claim(path, mine, self._fence)
                left = mine
                for name in files.list_dir(mine):
                    if SET_ASIDE.fullmatch(name) and not files.is_taken(self.path / name):
                        files.rename(mine / name, self.path / name)
                    # The process was killed before it saw the pin, so restore the checkpoint. (Never restore a
                    # `.corrupt` checkpoint under the step's name.)
                    if name == _TAKEN and whole == step.name and is_pinned(step) and not files.is_taken(step):
                        files.rename(mine / name, step)
                files.fsync_dir(self.path)  # otherwise a power loss might restore a name without its content
                remove_tree(mine)
            except FileNotFoundError:  # removed by another process
                continue
            except OSError as error:
                _log.warning(f"{left}, left behind by a killed save, cannot be removed ({error}); remove it by hand")

    def pinned(self) -> set[int]:
        return pinned(self.path)

    def warning(self) -> str | None:
        return loose_modes(self.path)

    def prepare(self) -> None:
        """Create the directory and make it durable, even if another process has created it."""
        if self._prepared and files.is_dir(self.path):
            return
        self._fence.check()  # do not recreate the directory of a run that was moved or removed
        parent = self.path.parent
        if self._fence.number:  # the run directory existed; do not recreate it if it was moved
            with contextlib.suppress(OSError):  # a killed process may have created it without fsync
                files.fsync_dir(parent.parent)
        else:
            files.make_dirs(parent)
        with contextlib.suppress(FileExistsError):
            files.make_dir(self.path, files.OWNED)
        files.fsync_dir(parent)
        self._prepared = True


def store_of(run: RunDir, fence: Fence = NOBODY) -> Store:
    """Return the store of a run's checkpoints. To add a kind of store, change this and `make_manager`."""
    return Directory(run.checkpoints, fence)


def leftovers(directory: Path) -> list[Path]:
    """List temporary directories of saves and deletions that are in progress or were killed."""
    named = (directory / name for name in Directory(directory).names() if _TEMPORARY.fullmatch(name))
    # The runner gives these names only to directories, so files and links with such names are ignored.
    return sorted(path for path in named if files.is_dir(path) and not files.is_link(path))


def _take(path: Path, name: str, fence: Fence) -> Path:
    """Move a checkpoint into a new temporary directory of this attempt, as `name`. Return that directory."""
    container = temporary_name(path, fence, "-taken")
    fence.check()
    files.make_dir(container, files.OWNED)
    try:
        fence.check()
        files.rename(path, container / name)
    except BaseException:
        with contextlib.suppress(OSError):
            files.remove_dir(container)  # fails if the rename took place despite the error
        raise
    return container


def _claim(path: Path, mine: Path, fence: Fence) -> None:
    found = _TEMPORARY.fullmatch(path.name)
    if found is None or int(found["fence"]) >= fence.number:  # left by a failed save of this attempt
        files.rename(path, mine)
        return
    try:
        patiently(path, lambda: files.rename(path, mine))
    except CheckpointError as error:
        raise CheckpointError(
            f"{path} was left behind by a save that was killed and cannot be renamed ({error.__cause__}): should the "
            "process that wrote it still exist, it could commit it yet; remove it by hand and rerun"
        ) from error


def loose_modes(path: Path) -> str | None:
    """Return a warning if users other than the owner may write to `path`, or None."""
    try:
        mode = files.stat(path).st_mode
    except OSError as error:
        return None if error.errno == errno.ENOENT else f"{path}: {error.strerror}"
    others = [who for who, bit in (("its group", stat.S_IWGRP), ("everybody", stat.S_IWOTH)) if mode & bit]
    if not others:
        return None
    return f"{path} is writable by {' and '.join(others)}, who can change this run's weights: run chmod go-w on it"

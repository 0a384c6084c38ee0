"""Read from a file system with occasional errors: retry, and never treat a disk error as corruption.

Imports no torch.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from runner.errors import CheckpointError, UnreadableError
from runner.rundir.paths import RunDir
from runner.system import clock

T = TypeVar("T")

PAUSES_S = (0.05, 0.2, 0.75)
"""Pauses in seconds between tries, long enough for an interrupted call or a restarted server to recover."""

VERDICTS = frozenset((errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.EFBIG))
"""Errors about the file: missing, not a regular file, too large. Other errors tell nothing about its content."""


def patiently(path: Path, action: Callable[[], T]) -> T:
    """Return the result of `action`. Call it again after a file system error that may pass.

    Args:
        path: path that is read, for the message.
        action: opens and reads the file. Each call must open it again.

    Raises:
        UnreadableError: the error persists. The message names the file and the error.
        OSError: its errno is in VERDICTS.
    """
    for pause in PAUSES_S:
        try:
            return action()
        except OSError as error:
            if error.errno in VERDICTS:
                raise
        clock.sleep(pause)
    try:
        return action()
    except OSError as error:
        if error.errno in VERDICTS:
            raise
        raise unreadable(path, error) from error


def newest_step(run: RunDir) -> int:
    """Return the step of a run's newest committed checkpoint (`RunDir.newest_step`), or 0 if there is none.

    Raises:
        CheckpointError: the directory is still not readable after retries.
    """
    return patiently(run.checkpoints, run.newest_step)


def unreadable(path: Path, error: OSError) -> UnreadableError:
    """Build the error for a file that cannot be read. It makes no statement about the content."""
    code = errno.errorcode.get(error.errno or 0, "no errno")
    return UnreadableError(
        f"{path} cannot be read ({error.strerror or error}, {code}; tried {len(PAUSES_S) + 1} times): it is left as it "
        "is and no other checkpoint is used; restore the permission or the disk and rerun"
    )


@contextlib.contextmanager
def in_one_line(where: Path) -> Iterator[None]:
    """Convert a file system error in the block into a one-line message.

    Raises:
        CheckpointError: replaces an OSError.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or where}: {error.strerror or error}; fix the cause (disk, permissions) and rerun"
        ) from error

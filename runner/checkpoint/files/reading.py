"""Reading on a file system that fails now and then: read again, and never judge a checkpoint by an error of the disk.

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
"""Pauses between tries: an interrupted call or a restarted server is over by then, a broken disk is not."""

VERDICTS = frozenset((errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.EFBIG))
"""Errors that say what a file is: missing, not a regular file, too large. Any other says nothing about its content."""


def patiently(path: Path, action: Callable[[], T]) -> T:
    """What `action` returns; after an error of the file system that may pass, it is called again.

    Args:
        path: what is read, for the message.
        action: opens and reads it; after an error it is opened anew.

    Raises:
        UnreadableError: the error persists; names the file and the error.
        OSError: one of VERDICTS.
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
    """The step of the newest committed checkpoint of a run (`RunDir.newest_step`); 0 if there is none.

    Raises:
        CheckpointError: the disk refuses to tell, again and again.
    """
    return patiently(run.checkpoints, run.newest_step)


def unreadable(path: Path, error: OSError) -> UnreadableError:
    """The error to stop with when a file cannot be read, which says nothing about what is in it."""
    code = errno.errorcode.get(error.errno or 0, "no errno")
    return UnreadableError(
        f"{path} cannot be read ({error.strerror or error}, {code}; tried {len(PAUSES_S) + 1} times): it is left as it "
        "is and no other checkpoint is used; restore the permission or the disk and rerun"
    )


@contextlib.contextmanager
def in_one_line(where: Path) -> Iterator[None]:
    """An error of the file system in the block becomes a message of one line.

    Raises:
        CheckpointError: instead of the OSError.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or where}: {error.strerror or error}; fix the cause (disk, permissions) and rerun"
        ) from error

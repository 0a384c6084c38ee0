"""Read from file systems that fail occasionally: retry after errors, and never treat a disk error as corruption.

This module does not import torch.
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
"""Seconds to wait before each retry, long enough to recover from an interrupted call or a restarted server."""

VERDICTS = frozenset((errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.EFBIG))
"""Errors that concern the file itself: it is missing, not a regular file, or too large. Others may be transient."""


def patiently(path: Path, action: Callable[[], T]) -> T:
    """Return the result of `action`. Retry after file system errors that may be transient.

    Args:
        path: path that `action` reads, for the error message.
        action: function that opens and reads the file. Each call must open the file again.

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
    """Build the error for a file that cannot be read. The file may still be intact."""
    code = errno.errorcode.get(error.errno or 0, "no errno")
    return UnreadableError(
        f"{path} cannot be read ({error.strerror or error}, {code}; tried {len(PAUSES_S) + 1} times): it is left as it "
        "is and no other checkpoint is used; restore the permission or the disk and rerun"
    )


@contextlib.contextmanager
def in_one_line(where: Path) -> Iterator[None]:
    """Convert a file system error that the `with` block raises into a one-line error.

    Raises:
        CheckpointError: the block raised OSError.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or where}: {error.strerror or error}; fix the cause (disk, permissions) and rerun"
        ) from error

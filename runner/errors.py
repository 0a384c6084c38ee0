"""Exit statuses, and the errors that are shown to the user as one line. Imports no torch, hydra or numpy."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path

from exactdata import errors

UserError = errors.UserError
nearest = errors.nearest
_OWN = (Path(__file__).parent, Path(errors.__file__).parent)


class ExitStatus(IntEnum):
    """Exit statuses of `python -m runner`; scripts and schedulers may rely on them."""

    FINISHED = 0
    FAILED = 1  # the training itself failed (a non-finite loss, a bug in a model)
    USAGE = 2  # an error in the command, the config or the data, found before training
    CRASH_LOOP = 70  # restarted too often without progress
    LOCKED = 73  # another process works in this run directory
    SUPERSEDED = 74  # a newer attempt holds the lease; this one wrote nothing more
    INTERRUPTED = 75  # stopped by a signal, or it is not known whether a job was accepted: rerun the command


class TrainingError(UserError):
    """Training cannot continue, because of a non-finite loss for example; the last checkpoint is still valid."""

    status = ExitStatus.FAILED
    everywhere = True


class DivergedError(TrainingError):
    """The loss is nan or infinite."""


class UnsavedError(TrainingError):
    """The file system refused to take the last state of a run."""


class RunDirError(UserError):
    """A run directory is malformed, cannot be read, or is not to be trusted; other runs are not concerned."""


class CheckpointError(UserError):
    """No checkpoint can be used, or one does not fit this run."""

    status = ExitStatus.FAILED


class UnreadableError(CheckpointError):
    """The file system refused to let a checkpoint be read, again and again: nothing is known of what is in it."""


class MismatchError(CheckpointError):
    """A checkpoint is intact, and of another model, optimizer, precision or data than what is to be loaded from it."""


class CallbackError(UserError):
    """A callback raised, and the config asks to stop then."""

    status = ExitStatus.FAILED


class FileError(UserError):
    """A file cannot be read or written."""

    status = ExitStatus.FAILED


class LockedError(UserError):
    """Another process holds this run directory."""

    status = ExitStatus.LOCKED


class StoppedError(UserError):
    """A signal came before the attempt could begin; rerun the command."""

    status = ExitStatus.INTERRUPTED


class SupersededError(UserError):
    """A newer attempt holds the lease of the run directory; the older one must stop writing."""

    status = ExitStatus.SUPERSEDED


class PeerError(UserError):
    """Another rank of this job failed, ended, or does not answer: the cause is in that rank's output, not here."""

    status = ExitStatus.FAILED
    reported = False
    """Whether that rank failed by itself and reported why, so that the end of the job is decided."""


class CrashLoopError(UserError):
    """The run was restarted too often without progress."""

    status = ExitStatus.CRASH_LOOP


class TimeoutsError(UserError):
    """The run reached its time limit too often without progress."""

    status = ExitStatus.FAILED


@contextmanager
def unchained() -> Iterator[None]:
    """Show a user's mistake without the errors that led to it: its line says what is wrong.

    Raises:
        UserError: the one of the block, without a cause.
    """
    try:
        yield
    except UserError as error:
        raise error.with_traceback(None) from None


def refuse(errors: Iterable[str], kind: type[UserError] = UserError) -> None:
    """Raise one error with a line for each of `errors`, if there are any.

    Raises:
        UserError: or its subclass `kind`.
    """
    if lines := "\n".join(errors):
        raise kind(lines)


def line_of_user(error: BaseException) -> str:
    """Return ` (FILE, line N)`: the last line on the way to an error that is of no installed package; else nothing."""
    installed = (f"{os.sep}site-packages{os.sep}", f"{os.sep}lib{os.sep}python", "<frozen ")
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not any(own in Path(frame.filename).parents for own in _OWN)
        and not any(part in frame.filename for part in installed)
    ]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""

"""Define the exit statuses, and the errors that the user sees as one line. Imports neither torch, hydra nor numpy."""

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
    """Exit statuses of `python -m runner`. They are stable, so scripts and schedulers can use them.

    Example:
        >>> import subprocess, sys
        >>> from runner.errors import ExitStatus
        >>> command = [sys.executable, "-m", "runner", "experiment=smoke", "train.steps=20"]
        >>> status = ExitStatus(subprocess.run(command).returncode)
        >>> if status is ExitStatus.INTERRUPTED:  # it has saved: rerun the command
        ...     status = ExitStatus(subprocess.run(command).returncode)
        >>> status
        <ExitStatus.FINISHED: 0>
    """

    FINISHED = 0
    FAILED = 1  # the training itself failed, e.g. with a non-finite loss or a bug in the model
    USAGE = 2  # an error in the command, the config or the data, found before training
    CRASH_LOOP = 70  # restarted too many times without progress
    LOCKED = 73  # another process uses this run directory
    SUPERSEDED = 74  # a newer attempt holds the lease; this attempt stopped writing
    INTERRUPTED = 75  # stopped by a signal, or a job may not have been accepted: rerun the command


class TrainingError(UserError):
    """Training cannot continue, e.g. because of a non-finite loss. The last checkpoint is still valid.

    Example:
        You can raise it in your own task or callback. The run ends with status 1 and prints this message without a
        traceback.

        >>> import torch
        >>> from runner.errors import TrainingError
        >>> def check(logits: torch.Tensor) -> None:
        ...     if not bool(torch.isfinite(logits).all()):
        ...         raise TrainingError("logits are not finite: lower optimizer.lr")
    """

    status = ExitStatus.FAILED
    everywhere = True


class DivergedError(TrainingError):
    """The loss is nan or infinite."""


class UnsavedError(TrainingError):
    """The file system did not accept the final checkpoint of a run."""


class RunDirError(UserError):
    """A run directory is malformed, unreadable or not trusted. Other runs are not affected."""


class CheckpointError(UserError):
    """No usable checkpoint exists, or a checkpoint does not fit this run.

    Example:
        >>> import runner
        >>> from runner.errors import CheckpointError
        >>> try:
        ...     loaded = runner.load("outputs/base", step=20)
        ... except CheckpointError as error:  # corrupt, or of another model
        ...     print(error)
        ...     loaded = runner.load("outputs/base")  # the newest valid checkpoint
    """

    status = ExitStatus.FAILED


class UnreadableError(CheckpointError):
    """Every attempt to read a checkpoint failed with a file system error, so its content is unknown."""


class MismatchError(CheckpointError):
    """An intact checkpoint has a different model, optimizer, precision or data than the run that loads it."""


class CallbackError(UserError):
    """A callback raised an error, and the config says to stop in that case."""

    status = ExitStatus.FAILED


class FileError(UserError):
    """A file cannot be read or written."""

    status = ExitStatus.FAILED


class LockedError(UserError):
    """Another process holds this run directory.

    The command exits with status 73. The other process is not disturbed.

    Example:
        `runner.train` raises it as a `UserError` whose `status` is `ExitStatus.LOCKED`.

        >>> import runner
        >>> from runner.errors import ExitStatus, UserError
        >>> try:
        ...     run = runner.train("experiment=smoke", "run.dir=outputs/base")
        ... except UserError as error:
        ...     if error.status != ExitStatus.LOCKED:
        ...         raise
        ...     run = runner.Run("outputs/base")  # another process trains it: watch its step
    """

    status = ExitStatus.LOCKED


class StoppedError(UserError):
    """A signal arrived before the attempt could start. Rerun the command."""

    status = ExitStatus.INTERRUPTED


class SupersededError(UserError):
    """A newer attempt holds the lease of the run directory, so the older attempt must stop writing.

    Example:
        A custom launcher checks its guards before it writes. If it does not catch this error, the command exits with
        status 74.

        >>> from pathlib import Path
        >>> from runner.system.files import Guard
        >>> def record(run_dir: Path, job_id: str, guard: Guard) -> None:
        ...     guard.check()  # raises SupersededError if another command has taken over
        ...     (run_dir / "my_job.txt").write_text(job_id)
    """

    status = ExitStatus.SUPERSEDED


class PeerError(UserError):
    """Another rank of this job failed, ended, or does not respond. See that rank's output for the cause."""

    status = ExitStatus.FAILED
    reported = False
    """Whether the other rank has reported its own failure, which already decides how the job ends."""


class CrashLoopError(UserError):
    """The run was restarted too many times without progress."""

    status = ExitStatus.CRASH_LOOP


class TimeoutsError(UserError):
    """The run reached its time limit too many times without progress."""

    status = ExitStatus.FAILED


@contextmanager
def unchained() -> Iterator[None]:
    """Raise a user error without its chain of causes, because its message alone explains the problem.

    Raises:
        UserError: an error raised in the block, now without a cause.
    """
    try:
        yield
    except UserError as error:
        raise error.with_traceback(None) from None


def refuse(errors: Iterable[str], kind: type[UserError] = UserError) -> None:
    """Raise a single error that has one line for each of `errors`. Do nothing if `errors` is empty.

    Args:
        errors: the lines of the message.
        kind: the exception class to raise.

    Raises:
        UserError: `errors` is not empty. The error is an instance of `kind`.
    """
    if lines := "\n".join(errors):
        raise kind(lines)


def line_of_user(error: BaseException) -> str:
    """Return the last traceback line outside installed packages as ` (FILE, line N)`; empty if there is none."""
    installed = (f"{os.sep}site-packages{os.sep}", f"{os.sep}lib{os.sep}python", "<frozen ")
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not any(own in Path(frame.filename).parents for own in _OWN)
        and not any(part in frame.filename for part in installed)
    ]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""

"""Define the exit statuses, and the errors that are shown to the user as one line. Imports no torch, hydra or numpy."""

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
    """Exit statuses of `python -m runner`; scripts and schedulers may rely on them.

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
    FAILED = 1  # the training itself failed (a non-finite loss, a bug in a model)
    USAGE = 2  # an error in the command, the config or the data, found before training
    CRASH_LOOP = 70  # restarted too often without progress
    LOCKED = 73  # another process works in this run directory
    SUPERSEDED = 74  # a newer attempt holds the lease; this one wrote nothing more
    INTERRUPTED = 75  # stopped by a signal, or it is not known whether a job was accepted: rerun the command


class TrainingError(UserError):
    """Training cannot continue, for example because of a non-finite loss; the last checkpoint is still valid.

    Example:
        A task or a callback of your own may raise it. The run ends with status 1 and this line, without a traceback.

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
    """The file system refused to take the last state of a run."""


class RunDirError(UserError):
    """A run directory is malformed, unreadable or not trusted; other runs are not affected."""


class CheckpointError(UserError):
    """No checkpoint can be used, or a checkpoint does not fit this run.

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
    """The file system refused every attempt to read a checkpoint, so its content is unknown."""


class MismatchError(CheckpointError):
    """A checkpoint is intact, but its model, optimizer, precision or data are not those of the run that loads it."""


class CallbackError(UserError):
    """A callback raised, and the config asks to stop in that case."""

    status = ExitStatus.FAILED


class FileError(UserError):
    """A file cannot be read or written."""

    status = ExitStatus.FAILED


class LockedError(UserError):
    """Another process holds this run directory.

    The command ends with status 73, and the other process is not disturbed.

    Example:
        `runner.train` raises it as a UserError with its status.

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
    """A signal came before the attempt could begin; rerun the command."""

    status = ExitStatus.INTERRUPTED


class SupersededError(UserError):
    """A newer attempt holds the lease of the run directory; the older one must stop writing.

    Example:
        A launcher of your own checks its guards before it writes. It lets the error pass, and the command ends with
        status 74.

        >>> from pathlib import Path
        >>> from runner.system.files import Guard
        >>> def record(run_dir: Path, job_id: str, guard: Guard) -> None:
        ...     guard.check()  # raises SupersededError if another command has taken over
        ...     (run_dir / "my_job.txt").write_text(job_id)
    """

    status = ExitStatus.SUPERSEDED


class PeerError(UserError):
    """Another rank of this job failed, ended, or does not respond. The cause is in that rank's output, not here."""

    status = ExitStatus.FAILED
    reported = False
    """Whether that rank reported a failure of its own, which already decides how the job ends."""


class CrashLoopError(UserError):
    """The run was restarted too often without progress."""

    status = ExitStatus.CRASH_LOOP


class TimeoutsError(UserError):
    """The run reached its time limit too often without progress."""

    status = ExitStatus.FAILED


@contextmanager
def unchained() -> Iterator[None]:
    """Raise a user's mistake without the errors that led to it, because its message says what is wrong.

    Raises:
        UserError: the error raised in the block, without a cause.
    """
    try:
        yield
    except UserError as error:
        raise error.with_traceback(None) from None


def refuse(errors: Iterable[str], kind: type[UserError] = UserError) -> None:
    """Raise one error with a line for each of `errors`, if there are any.

    Args:
        errors: the lines.
        kind: the class of the error.

    Raises:
        UserError: there are errors; an instance of `kind`.
    """
    if lines := "\n".join(errors):
        raise kind(lines)


def line_of_user(error: BaseException) -> str:
    """Return ` (FILE, line N)`, the last traceback line outside installed packages, or an empty string."""
    installed = (f"{os.sep}site-packages{os.sep}", f"{os.sep}lib{os.sep}python", "<frozen ")
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not any(own in Path(frame.filename).parents for own in _OWN)
        and not any(part in frame.filename for part in installed)
    ]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""

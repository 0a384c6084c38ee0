"""What ends a run on purpose: mistakes of the user, and the exit statuses.

Nothing here imports torch, hydra or numpy.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import IntEnum


class ExitStatus(IntEnum):
    """Exit statuses of `python -m runner`; a script or a scheduler may rely on them."""

    FINISHED = 0
    FAILED = 1  # the training itself failed (a non-finite loss, a bug in a model)
    USAGE = 2  # a mistake in the command, the config or the data, found before training
    CRASH_LOOP = 70  # restarted too often without a step of progress
    LOCKED = 73  # another process works in this run directory
    SUPERSEDED = 74  # a newer incarnation of this run took over; this one wrote nothing more
    INTERRUPTED = 75  # asked to stop by a signal: saved and left, the same command goes on


class UserError(Exception):
    """A mistake that its user can mend: shown as one line, without a traceback.

    The message names the value, what is allowed and the remedy.
    """

    status = ExitStatus.USAGE
    everywhere = False
    """Whether every rank of the job raises this same error, so that one of them may speak for all."""


class TrainingError(UserError):
    """Training cannot go on (a non-finite loss, say); the last checkpoint is still good."""

    status = ExitStatus.FAILED
    everywhere = True


class CheckpointError(UserError):
    """No checkpoint can be used, or one does not fit this run."""

    status = ExitStatus.FAILED


class LockedError(UserError):
    """Another process holds this run directory."""

    status = ExitStatus.LOCKED


class StoppedError(UserError):
    """A signal came before the attempt could begin; the same command goes on."""

    status = ExitStatus.INTERRUPTED


class SupersededError(UserError):
    """A newer incarnation of this run holds the run directory; the older one must stop writing."""

    status = ExitStatus.SUPERSEDED


class CrashLoopError(UserError):
    """The run was restarted too often without progress."""

    status = ExitStatus.CRASH_LOOP


def nearest(name: str, valid: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the valid name nearest to `name`, or an empty string."""
    close = difflib.get_close_matches(name, list(valid), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""

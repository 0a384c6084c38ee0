"""Ask whether this process was asked to stop, in long work before training begins.

A program that handles SIGTERM with a flag sets `requested` to a function that reads it. By default, signals end the
process.
"""

from __future__ import annotations

from collections.abc import Callable


class StoppedError(Exception):
    """The process was asked to stop before the work was complete. The next call continues it."""


def _never() -> bool:
    return False


requested: Callable[[], bool] = _never

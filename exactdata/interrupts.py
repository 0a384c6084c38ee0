"""Whether this process was asked to stop, for work that takes long before training begins.

A program that handles SIGTERM by a flag sets `requested` to a function that reads it. By default signals end the
process.
"""

from __future__ import annotations

from collections.abc import Callable


class StoppedError(Exception):
    """The process was asked to stop, and the work is not done. It continues at the next call."""


def _never() -> bool:
    return False


requested: Callable[[], bool] = _never

"""Check for stop requests during long work before training, such as tokenizing.

If your program's SIGTERM handler sets a flag, set `requested` to a function that returns the flag. By default, signals
end the process.
"""

from __future__ import annotations

from collections.abc import Callable


class StoppedError(Exception):
    """The process was asked to stop before the work was complete. The next call resumes the work."""


def _never() -> bool:
    return False


requested: Callable[[], bool] = _never

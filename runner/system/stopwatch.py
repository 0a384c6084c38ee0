"""Measure how long a process spends on each of several activities, exactly one at any moment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from runner.system import clock


class Stopwatch:
    """Seconds by activity, by the monotonic clock of this process: together they are its whole life, with no gap.

    For the thread that trains; other threads may read: what they read is replaced as a whole.

    Args:
        doing: the first activity.
        since: when that began, on `clock.monotonic`; now by default.
    """

    def __init__(self, doing: str, since: float | None = None) -> None:
        # What it is doing, since when, and the seconds of each activity until then.
        self._state: tuple[str, float, dict[str, float]] = (doing, clock.monotonic() if since is None else since, {})

    @property
    def activity(self) -> str:
        """Return the current activity; any thread may ask."""
        return self._state[0]

    def switch(self, doing: str) -> str:
        """Switch to the activity `doing`; return the activity until now."""
        now, (before, _, _) = clock.monotonic(), self._state
        self._state = doing, now, self._at(now)
        return before

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Switch to the activity `what` within the block, and back afterwards."""
        before = self.switch(what)
        try:
            yield
        finally:
            self.switch(before)

    def of(self, what: str) -> float:
        """Return the seconds of one activity so far."""
        return self.seconds().get(what, 0.0)

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each activity so far."""
        return self._at(clock.monotonic())

    def _at(self, now: float) -> dict[str, float]:
        doing, since, seconds = self._state
        return {**seconds, doing: seconds.get(doing, 0.0) + max(now - since, 0.0)}

"""Measure how long a process spends on each of several activities, exactly one at any moment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from runner.system import clock


class Stopwatch:
    """Seconds by activity on the monotonic clock. Together they cover the whole life of this process, without gaps.

    Only the thread that trains may switch. Other threads may read, because the state is replaced at once.

    Args:
        doing: the first activity.
        since: start of that activity on `clock.monotonic`; now by default.
    """

    def __init__(self, doing: str, since: float | None = None) -> None:
        # The current activity, its start, and the seconds of each activity before that.
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

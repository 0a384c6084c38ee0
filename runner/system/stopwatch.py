"""Measure how long a process spends on each activity, with exactly one activity at any moment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from runner.system import clock


class Stopwatch:
    """Seconds by activity, on the monotonic clock. In total they cover the time since `since` without gaps.

    Only the thread that trains may switch. Other threads may read, because the state is replaced at once.

    Args:
        doing: the first activity.
        since: start of that activity on `clock.monotonic`; by default, now.
    """

    def __init__(self, doing: str, since: float | None = None) -> None:
        # The current activity, its start, and the seconds of each activity before that.
        self._state: tuple[str, float, dict[str, float]] = (doing, clock.monotonic() if since is None else since, {})

    @property
    def activity(self) -> str:
        """Return the current activity. Any thread may call this."""
        return self._state[0]

    def switch(self, doing: str) -> str:
        """Switch to the activity `doing`, and return the previous activity."""
        now, (before, _, _) = clock.monotonic(), self._state
        self._state = doing, now, self._at(now)
        return before

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Switch to the activity `what` for the block, and switch back afterwards."""
        before = self.switch(what)
        try:
            yield
        finally:
            self.switch(before)

    def of(self, what: str) -> float:
        """Return the seconds spent on one activity so far."""
        return self.seconds().get(what, 0.0)

    def seconds(self) -> dict[str, float]:
        """Return the seconds spent on each activity so far."""
        return self._at(clock.monotonic())

    def _at(self, now: float) -> dict[str, float]:
        doing, since, seconds = self._state
        return {**seconds, doing: seconds.get(doing, 0.0) + max(now - since, 0.0)}

"""Account for one attempt's time: seconds by activity, and how much of the training time a checkpoint preserves.

Seconds are measured with the monotonic clock on rank 0's machine, from the start of the process or job. While the
attempt runs, they are in status.json and in the lease's heartbeat. So the next attempt knows how a killed attempt spent
its time up to the last heartbeat.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeGuard

from runner.system.stopwatch import Stopwatch

ACTIVITIES = ("start", "restore", "steps", "data_wait", "save", "evaluation", "end")
"""Activities of an attempt: `start` of the process, `restore` of a checkpoint, `steps`, waiting for batches
(`data_wait`), stalls by a `save`, `evaluation`, and the `end`: it records its end and is requeued."""
MAX_SECONDS = 3e13
MAX_SAVES = 16  # saves to remember: a checkpoint may be committed several saves after it was begun, or be lost
MAX_LAPS = 100  # laps to remember


class Laps(NamedTuple):
    """The number of steps completed in an attempt, and the durations of the latest, except the first step."""

    steps: int = 0
    seconds: tuple[float, ...] = ()


class TimeAccount(Stopwatch):
    """The seconds of this process's attempt, by activity.

    Args:
        since: when the attempt began, on the monotonic clock; by default, now.
    """

    def __init__(self, since: float | None = None) -> None:
        super().__init__("start", since)
        self._saves = 0
        self._trained: dict[int, float] = {}  # step of a save -> seconds spent in steps until then
        self._lapped = 0.0
        self.laps = Laps()
        """The steps so far. Replaced as a whole, so that any thread may read it."""

    def stepped(self) -> None:
        """Count a completed step and its duration."""
        seconds = self.seconds()
        before, self._lapped = self._lapped, seconds.get("steps", 0.0) + seconds.get("data_wait", 0.0)
        steps, laps = self.laps
        # The first step compiles, starts workers and fills caches.
        self.laps = Laps(steps + 1, (*laps, self._lapped - before)[-MAX_LAPS:] if steps else ())

    def saving(self, step: int) -> None:
        """Record that the state after `step` is about to be saved, and the training time until now."""
        self._saves += 1
        # Replace the dict instead of changing it, because the heartbeat thread may be reading it.
        trained = {**self._trained, step: round(self.of("steps"), 3)}
        self._trained = {each: trained[each] for each in sorted(trained)[-MAX_SAVES:]}

    def state(self) -> dict[str, Any]:
        """Return the account for status.json and the heartbeat."""
        trained = {str(step): seconds for step, seconds in self._trained.items()}
        return {"seconds": _rounded(self.seconds()), "saves": self._saves, "trained": trained}


def latest(attempt: Any, *records: Mapping[str, Any]) -> Any:
    """Return the latest account state of an attempt from records that contain its number, or None if none does."""
    states = [record.get("time") for record in records if record.get("attempt") == attempt]
    return max(states, key=lambda state: sum(_durations(state, "seconds").values()), default=None)


def closed(state: Any, start_step: int, checkpoint_step: int, end_step: int | None = None) -> dict[str, Any]:
    """Compute an attempt's entries `seconds`, `kept_s`, `trained` and `saves` from its last state.

    Return {} if unusable.

    Args:
        state: result of `TimeAccount.state`, optionally read from a file.
        start_step: the step at which the attempt began.
        checkpoint_step: the newest checkpoint's step when the attempt ended. Later steps must be repeated.
        end_step: the last step, if the attempt ended between two steps; None if it may have begun a further step.
    """
    seconds, trained = (_durations(state, name) for name in ("seconds", "trained"))
    if not seconds:
        return {}
    steps = seconds.get("steps", 0.0)
    saved = {int(step): value for step, value in trained.items() if re.fullmatch("[0-9]{1,15}", step)}
    until = [saved[step] for step in sorted(saved) if step <= checkpoint_step]
    # The checkpoint is newer than the last known save, because it was committed after the state was written.
    saved_since = checkpoint_step > max(saved, default=start_step)
    all_saved = end_step is not None and checkpoint_step >= end_step
    kept = steps if saved_since or all_saved else until[-1] if until else 0.0
    saves = state.get("saves")
    counted = {"saves": saves} if is_duration(saves) else {}
    found = {"seconds": _rounded(seconds), "kept_s": round(min(kept, steps), 3), **counted}
    return {**found, "trained": {str(step): saved[step] for step in sorted(saved) if step <= checkpoint_step}}


def kept_up_to(attempt: Mapping[str, Any], step: int) -> float:
    """Return the seconds in steps that an attempt preserved if the next one resumed at `step`, an older checkpoint."""
    trained = _durations(attempt, "trained")
    return max((seconds for each, seconds in trained.items() if each.isdecimal() and int(each) <= step), default=0.0)


def _durations(state: Any, name: str) -> dict[str, float]:
    """Return the durations in the object `name` of a record, or {} if there is no such object."""
    found = state.get(name) if isinstance(state, Mapping) else None
    if not isinstance(found, Mapping):
        return {}
    return {key: float(value) for key, value in found.items() if is_duration(value)}


def lived_s(attempt: Mapping[str, Any]) -> float | None:
    """Return an attempt's duration in seconds, from its line in attempts.jsonl, or None if unknown.

    Without an account, use wall-clock times. For a killed attempt, they include the time until the next attempt began.
    """
    if seconds := _durations(attempt, "seconds"):
        return sum(seconds.values())
    started, ended = attempt.get("started"), attempt.get("ended")
    return max(ended - started, 0.0) if is_duration(started) and is_duration(ended) else None


def is_duration(value: Any) -> TypeGuard[float]:
    """Check whether a value from a record is a plausible number of seconds: less than a million years."""
    return type(value) in (int, float) and 0 <= value < MAX_SECONDS


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {activity: round(value, 3) for activity, value in seconds.items()}

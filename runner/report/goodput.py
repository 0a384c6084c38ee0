"""Sum up how allocated node time was spent, from the attempts of runs.

Only durations from the same clock are added. Attempts use the monotonic clock of their process, and queue times use the
scheduler's clock. The wall clock only decides in which week an attempt was. For a killed attempt, the time after its
last heartbeat is unknown and omitted: at most 0.4 % of its time (see `runner.rundir.lease`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from runner.rundir.time_account import ACTIVITIES, MAX_SECONDS, closed, is_duration, kept_up_to, lived_s

BUCKETS = {
    "queue": "waiting in the queue",
    "hold": "held back in the queue",
    "start": "starting, until the first step",
    "restore": "reading the checkpoint",
    "useful": "steps that count",
    "repeated": "steps that no checkpoint kept, and were made again",
    "save": "training stalled by saves",
    "data": "waiting for data",
    "evaluation": "evaluations",
    "end": "ending and requeueing",
}
WAITING = ("queue", "hold")
"""The buckets in which no node is allocated."""
_ACTIVITIES = {**{name: name for name in ACTIVITIES}, "data_wait": "data"}  # `steps` is split into useful and repeated
MAX_NODES, MAX_STEPS = 1_000_000, 10**15
DAY_S, WEEK_S = 86_400.0, 7 * 86_400.0
MAX_LENGTH_S = 520 * WEEK_S  # of an attempt; LAST_START_S is in the year 2286. Larger values are damage.
LAST_START_S = 1e10


def of_attempt(attempt: Mapping[str, Any]) -> dict[str, float]:
    """Return node seconds by bucket for a line of attempts.jsonl. All are 0 if it has no time account."""
    seconds: Mapping[str, Any] = attempt["seconds"] if has_account(attempt) else {}
    nodes = attempt.get("nodes")
    nodes = nodes if type(nodes) is int and 0 < nodes <= MAX_NODES else 1
    spent = {bucket: _number(seconds.get(name)) for name, bucket in _ACTIVITIES.items()}
    steps = spent.pop("steps", 0.0)
    kept = min(_number(attempt.get("kept_s")), steps)
    spent |= {"useful": kept, "repeated": steps - kept}
    spent |= {"queue": _number(attempt.get("queue_s")), "hold": _number(attempt.get("hold_s"))}
    return {bucket: spent.get(bucket, 0.0) * nodes for bucket in BUCKETS}


def has_account(attempt: Mapping[str, Any]) -> bool:
    """Return whether an attempt has a time account; attempts of older versions have none, for example."""
    return isinstance(attempt.get("seconds"), Mapping)


def under_way(current: Mapping[str, Any], time: Any, checkpoint_step: int) -> dict[str, Any]:
    """Return the line that an attempt without a recorded end would have in attempts.jsonl, if it ended now.

    Args:
        current: entry of the attempt in attempt.json.
        time: last known state of its time account.
        checkpoint_step: step of the newest checkpoint.
    """
    start_step = current.get("start_step")
    return {**current, **closed(time, start_step if isinstance(start_step, int) else 0, checkpoint_step)}


def resumed(attempts: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the attempts of a run. Steps repeated because of a corrupt checkpoint are counted only once as useful."""
    found: list[Mapping[str, Any]] = []
    least = MAX_STEPS
    for attempt in reversed(attempts):
        start, saved = attempt.get("start_step"), attempt.get("checkpoint_step")
        lost = isinstance(saved, int) and saved > least
        found.insert(0, {**attempt, "kept_s": kept_up_to(attempt, least)} if lost else attempt)
        least = min(least, start if isinstance(start, int) else least)
    return found


def all_kept(attempt: Mapping[str, Any]) -> dict[str, Any]:
    """Return the line of a running attempt with no step counted as repeated: its last steps may still be saved."""
    return {**attempt, "kept_s": MAX_SECONDS / 2}


def of_run(attempts: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Sum node seconds by bucket over attempts."""
    return total(of_attempt(attempt) for attempt in attempts)


def total(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Sum seconds by bucket."""
    found = dict.fromkeys(BUCKETS, 0.0)
    for part in parts:
        for bucket, seconds in part.items():
            found[bucket] += seconds
    return found


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the share (0 to 1) of each bucket in the allocated node time, which excludes the queue."""
    allocated = sum(value for bucket, value in seconds.items() if bucket not in WAITING)
    return {
        bucket: value / allocated if allocated else 0.0 for bucket, value in seconds.items() if bucket not in WAITING
    }


def by_week(attempts: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Sum node seconds by ISO week (`2026-W47`, UTC) and bucket.

    An attempt over several weeks is split by the time in each. Its waiting counts for the week in which it began. An
    attempt without a usable start time is skipped.
    """
    found: dict[str, list[dict[str, float]]] = {}
    for attempt in attempts:
        seconds, started = of_attempt(attempt), attempt.get("started")
        if not is_duration(started) or started > LAST_START_S:
            continue
        for number, (week, share) in enumerate(_weeks(float(started), _length(attempt))):
            part = {bucket: value * share for bucket, value in seconds.items()}
            if any(seconds.values()):
                found.setdefault(week, []).append(part | {name: 0.0 if number else seconds[name] for name in WAITING})
    return {week: total(parts) for week, parts in sorted(found.items())}


def _length(attempt: Mapping[str, Any]) -> float:
    """Return how long an attempt took on each of its nodes, in seconds; 0 if the value is impossible."""
    seconds = lived_s(attempt) if has_account(attempt) else None
    return seconds if seconds is not None and seconds < MAX_LENGTH_S else 0.0


def _weeks(started: float, length: float) -> Iterator[tuple[str, float]]:
    """Yield each week of the `length` seconds from `started` (seconds since 1970), with its share of them."""
    # Weeks begin on Mondays; 1970 began on a Thursday.
    at, end = started, started + length
    while True:
        next_week = ((at + 3 * DAY_S) // WEEK_S + 1) * WEEK_S - 3 * DAY_S
        year, week, _ = datetime.fromtimestamp(at, UTC).isocalendar()
        yield f"{year}-W{week:02d}", (min(next_week, end) - at) / length if length else 1.0
        if next_week >= end:
            return
        at = next_week


def _number(value: Any) -> float:
    return float(value) if is_duration(value) else 0.0

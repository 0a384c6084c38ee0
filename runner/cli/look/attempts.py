"""List the attempts of a run (`runner show RUN --attempts`): where each ran, its steps, and why it ended."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from runner.cli.base.console import console, say, table
from runner.rundir.attempt_log import ended_attempts
from runner.rundir.paths import RunDir
from runner.rundir.trust import reading
from runner.system import files
from runner.system.terminal import printable

_COLUMNS = ("attempt", "started", "host", "job", "ranks", "from step", "to step", "saved", "repeated", "cause")


def show_attempts(run: RunDir, as_json: bool) -> int:
    """Print one line per attempt of a run, including one in progress. Return the exit status."""
    with reading(run):
        attempts: list[dict[str, Any]] = ended_attempts(run)
        current = files.read_object(run.attempt)
    if current and current.get("attempt") not in [attempt["attempt"] for attempt in attempts]:
        attempts.append(current)
    if as_json:
        print(json.dumps(attempts))
        return 0
    if not attempts:
        say(f"{run.path}: no attempt has begun")
        return 0
    made = table(*_COLUMNS)
    for attempt in attempts:
        made.add_row(*(printable(cell) for cell in _cells(attempt)))
    console().print(made)
    return 0


def _cells(attempt: Mapping[str, Any]) -> list[str]:
    """Return the cells of an attempt's line. `repeated` counts the steps that the next attempt trained again."""
    started, first = attempt.get("started"), attempt.get("start_step")
    shown = {
        **attempt,
        "started": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(started)) if _is_time(started) else None,
        "host": attempt.get("node") or attempt.get("host"),
        "job": attempt.get("job_id"),
        "from step": first + 1 if isinstance(first, int) else None,
        "to step": attempt.get("end_step"),
        "saved": attempt.get("checkpoint_step"),
        "repeated": attempt.get("steps_lost") or None,
        "cause": attempt.get("cause") or "has no end yet",
    }
    return ["" if (value := shown.get(column)) is None else str(value) for column in _COLUMNS]


def _is_time(value: object) -> bool:
    """Return whether a recorded time can be formatted. The record may come from a different program."""
    return isinstance(value, (int, float)) and 0 <= value < 2**33

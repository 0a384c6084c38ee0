"""Lay out the table of `runner status`: one line per run, fitted to the window, with notes below it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from runner.cli.base.console import Lines
from runner.config.identity import as_text
from runner.config.labels import short_names
from runner.rundir.state import urgency
from runner.system.terminal import Fitting, printable

STYLES = {
    "running": "green",
    "finished": "bold green",
    "pending": "cyan",
    "requeued": "cyan",
    "ending": "cyan",
    "suspended": "yellow",
    "interrupted": "yellow",
    "paused": "cyan",
    "cancelled": "yellow",
    "withdrawn": "yellow",
    "killed": "red",
    "failed": "bold red",
    "crash loop": "bold red",
    "stuck": "bold red",
    "unreadable": "yellow",
}
MAX_NAMES = 3  # run names listed for a shared note
MAX_NOTES = 8  # lines of notes in a refreshed window
MAX_VALUE, MIN_NAME = 16, 24  # maximum length of a setting's value, minimum length of a name
IDLE_S = 300.0
"""The seconds without a step after which a run gets a note, because it may be hanging."""
LESS = ("node", "saved", "tokens/s", "lost", "attempts", "last cause", "ranks", "job", "samples/s")
"""The columns that are omitted if the window is narrow, in this order."""


@dataclass
class Row:
    """One run, with its current `state` and with the `cause` of its last attempt's end.

    `reason` explains the state, e.g. why the run failed or why its job waits. Times are in seconds since 1970.
    """

    run: str
    path: str
    state: str
    step: int | None = None
    total: int | None = None
    loss: float | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    attempts: int = 0
    ranks: int | None = None  # of the attempt in progress, or else of the last attempt
    steps_lost: int = 0
    cause: str | None = None
    reason: str | None = None
    job_id: str | None = None
    node: str | None = None
    checkpoint_step: int | None = None
    checkpoint_time: float | None = None  # from the clock of the file system
    updated: float | None = None  # from the clock of the machine that trains
    idle_s: float | None = None  # seconds since the last step, if the run is training
    warnings: list[str] | None = None
    tags: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # the notes in the config, then added notes
    waited_s: float | None = None  # seconds that the job has waited
    starts: float | None = None  # expected start of a waiting job
    gpu_hours: float | None = None  # total of all attempts with GPUs
    settings: dict[str, Any] = field(default_factory=dict)  # settings in the run's identity
    differs: dict[str, Any] = field(default_factory=dict)  # settings that differ between rows


def as_table(
    rows: Sequence[Row],
    messages: Sequence[str],
    others: Sequence[Row] = (),
    width: int | None = None,
    most_notes: int | None = None,
) -> Any:
    """Make a rich table of the rows. Columns without known values are omitted.

    Args:
        rows: the rows to show. A line above the table counts the runs by state.
        messages: lines to show below the table, after reasons and warnings.
        others: rows that are counted but not shown.
        width: the width of the window in characters. If it is too small, names are shortened first, then columns are
            omitted.
        most_notes: the maximum number of lines below the table. If None, all are shown.
    """
    from rich.console import Group
    from rich.text import Text

    everything = [*rows, *others]
    columns = _columns(rows)
    hidden = [] if width is None else _narrow(columns, width)
    styles = [STYLES.get(row.state, "") for row in rows]
    made = Lines(list(columns), list(zip(*columns.values(), strict=True)), list(columns).index("state"), styles)
    urgent = sorted(everything, key=lambda row: urgency(row.state))
    notes = ["\n  ".join(map(printable, note.splitlines())) for note in (*_notes(urgent), *messages)]
    if hidden:
        notes.append(f"not shown, as the window is narrow: {', '.join(hidden)}")
    if most_notes is not None and len(notes) > most_notes:
        notes[most_notes - 1 :] = [f"and {len(notes) - most_notes + 1} more notes, without --watch"]
    counted = [Text(_counts(everything))] if len(everything) > 1 else []
    more = [Text(f"and {len(others)} more: {_by_state(others)}")] if others else []
    return Group(*counted, made, *more, *(Text(line, style="yellow") for line in notes))


def _counts(rows: Sequence[Row]) -> str:
    """Count the runs by state, and sum their GPU hours."""
    hours = [row.gpu_hours for row in rows if row.gpu_hours is not None]
    return f"{len(rows)} runs: {_by_state(rows)}" + (f"; {sum(hours):,.1f} GPU-hours" if hours else "")


def _by_state(rows: Sequence[Row]) -> str:
    counts = Counter(row.state for row in rows)
    return ", ".join(f"{counts[state]} {state}" for state in sorted(counts, key=urgency))


def _columns(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return the cells of each column.

    Columns that are empty in all rows are omitted. Columns that distinguish runs come first.
    """
    several = any(row.ranks not in (None, 1) for row in rows)
    keys = list(dict.fromkeys(key for row in rows for key in row.differs))
    cells = {
        "state": [row.state for row in rows],
        "step": [f"{row.step or 0}/{row.total or '?'}" if row.step is not None or row.total else "" for row in rows],
        "loss": ["" if row.loss is None else f"{row.loss:.4f}" for row in rows],
        "samples/s": ["" if row.samples_per_s is None else f"{row.samples_per_s:,.0f}" for row in rows],
        "tokens/s": ["" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}" for row in rows],
        "attempts": [str(row.attempts or "") for row in rows],
        "ranks": [str(row.ranks or "") if several else "" for row in rows],
        "tags": [", ".join(row.tags) for row in rows],
        "lost": [str(row.steps_lost or "") for row in rows],
        "last cause": [row.cause or "" for row in rows],
        "waits": [_waiting(row) for row in rows],
        "GPU-hours": ["" if row.gpu_hours is None else f"{row.gpu_hours:,.1f}" for row in rows],
        "job": [_shortened(row.job_id or "", MAX_VALUE) for row in rows],
        "node": [row.node or "" for row in rows],
        "saved": [_time_of_day(row.checkpoint_time) for row in rows],
    }
    names = short_names(keys, {"run", *cells})
    told_apart = {names[key]: [_setting(row.differs.get(key)) for row in rows] for key in keys}
    known = {name: column for name, column in cells.items() if name == "state" or any(column)}
    return {"run": [row.run for row in rows], **told_apart, **known}


def _narrow(columns: dict[str, list[str]], width: int) -> list[str]:
    """Fit the columns to `width`, in place. Shorten names if settings distinguish the runs, then omit columns.

    Returns:
        The omitted columns.
    """

    def needed() -> int:
        return sum(max(map(len, (name, *column))) + 2 for name, column in columns.items()) - 2

    told_apart = next(iter(columns)) == "run" and list(columns)[1] != "state"
    longest = max(map(len, columns["run"]), default=0)
    if needed() > width and told_apart and longest > MIN_NAME:
        room = max(MIN_NAME, longest - (needed() - width))
        columns["run"] = [_shortened(name, room) for name in columns["run"]]
    return [name for name in LESS if needed() > width and columns.pop(name, None) is not None]


def _shortened(text: str, most: int) -> str:
    """Remove the middle of a long name, because the end identifies the run."""
    tail = most // 2
    return text if len(text) <= most else f"{text[: most - tail - 1]}…{text[-tail:]}"


def _setting(value: Any) -> str:
    return "" if value is None else _shortened(as_text(value), MAX_VALUE)


def _waiting(row: Row) -> str:
    """Describe how long a job has waited, and when it is expected to start."""
    waited = "" if row.waited_s is None else _duration(row.waited_s)
    return f"{waited}, until about {_time_of_day(row.starts)}" if row.starts is not None else waited


def _duration(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.0f} min" if minutes < 100 else f"{hours:.0f} h" if hours < 100 else f"{hours / 24:.0f} d"


def fitting(rows: Sequence[Row], messages: Sequence[str], width: int | None = None) -> Fitting:
    """Fit `as_table` to a window. If it has too few lines, show the runs that need attention and count the rest."""
    urgent = sorted(range(len(rows)), key=lambda number: urgency(rows[number].state))

    def made(count: int) -> Any:
        shown, others = sorted(urgent[:count]), urgent[count:]
        return as_table(
            [rows[number] for number in shown], messages, [rows[number] for number in others], width, MAX_NOTES
        )

    return Fitting(len(rows), made)


def _notes(rows: Sequence[Row]) -> Iterator[str]:
    """Yield notes about the rows. Rows with the same note share one line."""
    sharing: dict[str, list[str]] = {}
    for row in rows:
        idle = f"no step for {row.idle_s / 60:.0f} minutes" if row.idle_s is not None and row.idle_s >= IDLE_S else None
        said = [f"note: {text}" for text in row.notes]
        for text, count in Counter(note for note in (row.reason, idle, *(row.warnings or []), *said) if note).items():
            sharing.setdefault(text + (f" ({count} times)" if count > 1 else ""), []).append(row.run)
    for text, runs in sharing.items():
        more = f" and {len(runs) - MAX_NAMES} more" if len(runs) > MAX_NAMES else ""
        yield f"{', '.join(runs[:MAX_NAMES])}{more}: {text}"


def _time_of_day(time: float | None) -> str:
    """Format a time as `Mar 02 14:32` in local time.

    The age is not shown, because the clocks of the file system and of this machine may differ.
    """
    if time is None:
        return ""
    try:
        return datetime.fromtimestamp(time).strftime("%b %d %H:%M")
    except (ValueError, OverflowError, OSError):  # the time is out of range for the calendar
        return "?"

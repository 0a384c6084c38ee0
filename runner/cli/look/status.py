"""`python -m runner status [DIR]`: what each run in a directory is doing.

Reads the run directories and asks schedulers through the launchers that submitted the runs. The directories may be
shared and written by anybody: whatever one of them contains, the other runs are shown, and nothing it names is
imported. Clocks of different machines are never compared. Nothing here imports torch, numpy or hydra, so that the
answer comes at once.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from runner.cli.base.console import PROGRAM, Lines, Parser, check_interval, console, without_nan
from runner.config.labels import labels
from runner.contracts import JobInfo
from runner.errors import RunDirError, UserError
from runner.rundir import submitted_jobs
from runner.rundir.find import find_runs
from runner.rundir.lease import LeaseWatcher, heartbeat_file, read_holder
from runner.rundir.paths import RunDir
from runner.rundir.state import entry, look, modified, submitted_job, urgency
from runner.rundir.trust import reading
from runner.system import clock, files
from runner.system.terminal import Fitting, printable

STYLES = {
    "running": "green",
    "finished": "bold green",
    "pending": "cyan",
    "requeued": "cyan",
    "ending": "cyan",
    "suspended": "yellow",
    "interrupted": "yellow",
    "cancelled": "yellow",
    "killed": "red",
    "failed": "bold red",
    "crash loop": "bold red",
    "stuck": "bold red",
    "unreadable": "yellow",
}
MAX_NAMES = 3  # of runs that share a note
IDLE_S = 300.0
"""A running run that has made no step for this long is pointed out; it may be hanging."""


@dataclass
class Row:
    """One run. `state` is its state now; `cause` is why its last attempt ended. Times are seconds since 1970.

    `reason` explains the state: why it failed, or why its job waits.
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
    ranks: int | None = None  # of the attempt in progress, or of the last one
    steps_lost: int = 0
    cause: str | None = None
    reason: str | None = None
    job_id: str | None = None
    node: str | None = None
    checkpoint_step: int | None = None
    checkpoint_time: float | None = None  # by the clock of the file system
    updated: float | None = None  # by the clock of the machine that trains
    idle_s: float | None = None  # seconds since its last step, if it is running
    warnings: list[str] | None = None
    tags: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # that of the config first, then those that were added


def collect(root: Path, watcher: LeaseWatcher | None = None) -> tuple[list[Row], list[str]]:
    """A row for each run below `root`, and a message for each launcher that could not report its jobs.

    Takes some seconds if it depends on a heartbeat whether a run is alive, and the watcher has not seen it before.
    """
    watcher = watcher or LeaseWatcher()
    unreadable: list[OSError] = []
    runs = list(find_runs(root, unreadable.append))
    jobs, unanswered = submitted_jobs.jobs(runs)

    def rows() -> list[Row]:
        return [_row_or_reason(run, root, watcher, jobs.get(run.path), run.path in unanswered) for run in runs]

    found = rows()
    if watcher.wait():
        found = rows()
    messages = [*unanswered.values(), *(f"{error.filename} cannot be read ({error.strerror})" for error in unreadable)]
    return found, list(dict.fromkeys(messages))


def _row_or_reason(run: RunDir, root: Path, watcher: LeaseWatcher, job: JobInfo | None, unanswered: bool) -> Row:
    """The row of a run, `unreadable` if its directory holds anything unexpected: that must not hide the other runs."""
    try:
        with reading(run):
            if not files.is_taken(run.config):
                raise RunDirError(f"{run.config} is missing: rerun the command of the run, which writes it again")
            return _row(run, root, watcher, job, unanswered)
    except RunDirError as error:
        return Row(_name(run, root), str(run.path), "unreadable", reason=str(error))


def _name(run: RunDir, root: Path) -> str:
    return os.path.relpath(run.path, root) if run.path != root else run.path.name


def _row(run: RunDir, root: Path, watcher: LeaseWatcher, job: JobInfo | None, unanswered: bool) -> Row:
    """The row of one run.

    Args:
        run: the run directory.
        root: what the run's name is relative to.
        watcher: tells whether the process that holds the lease is alive.
        job: what the scheduler reports, None if it knows of no job.
        unanswered: the scheduler could not be asked, so there may be a job although `job` is None.

    Raises:
        OSError: a record cannot be read.
        ValueError: a record has a value of the wrong type.
    """
    state = look(run, job, unanswered, watcher)
    row = Row(_name(run, root), str(run.path), state.word, cause=state.cause, reason=state.reason)
    for name in ("step", "total", "attempts", "ranks", "steps_lost"):
        setattr(row, name, entry(state.status, name, int))
    for name in ("loss", "samples_per_s", "tokens_per_s", "updated"):
        setattr(row, name, entry(state.status, name, float))
    for name in ("job_id", "node"):
        setattr(row, name, entry(state.status, name, str))
    row.warnings = [str(message) for message in entry(state.status, "warnings", list) or []]
    row.attempts, row.steps_lost = row.attempts or 0, row.steps_lost or 0
    if row.state == "finished":
        row.step = row.total = state.finish.steps or row.step
    # The status is refreshed every few seconds, by a step: a long one may be under way since, or the run was killed.
    newest = state.newest
    if newest and (entry(newest, "step", int) > (row.step or 0) or row.loss is None):
        row.step, row.loss = newest["step"], entry(newest, "loss", float)
    if row.state == "running":
        row.idle_s = _idle_s(run)
    if state.job is not None:
        row.job_id, row.node = state.job.job_id, state.job.node
    elif row.job_id is None:
        row.job_id = submitted_job(run)
    row.checkpoint_step, row.checkpoint_time = run.newest_checkpoint() or (None, None)
    row.tags, row.notes = labels(run)
    return row


def having(rows: Sequence[Row], tags: Sequence[str]) -> list[Row]:
    """Choose the rows that have all of these tags."""
    return [row for row in rows if set(tags) <= set(row.tags)]


def _idle_s(run: RunDir) -> float | None:
    """Seconds since the last step, or since the start of the attempt; None if that is not known.

    Until the last heartbeat, by the times of the files: one clock, that of the file system, set all of them.
    """
    held = read_holder(run.lease)
    beat = modified(heartbeat_file(run.lease, held[0])) if held else None
    last = max((time for path in (run.metrics, run.attempt) if (time := modified(path)) is not None), default=None)
    return None if beat is None or last is None else max(0.0, beat - last)


def as_table(rows: Sequence[Row], messages: Sequence[str], others: Sequence[Row] = ()) -> Any:
    """Make a table of the rows for rich, without columns of which nothing is known.

    Below it are how many others there are, reasons, warnings and `messages`.
    """
    from rich.console import Group
    from rich.text import Text

    several = any(row.ranks not in (None, 1) for row in rows)
    columns = [
        *("run", "state", "step", "loss", "samples/s", "tokens/s", "attempts"),
        *(["ranks"] if several else []),
        *("tags", "lost", "last cause", "job", "node", "saved"),
    ]
    cells = [
        (
            row.run,
            row.state,
            f"{row.step or 0}/{row.total or '?'}" if row.step is not None or row.total else "",
            "" if row.loss is None else f"{row.loss:.4f}",
            "" if row.samples_per_s is None else f"{row.samples_per_s:,.0f}",
            "" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}",
            str(row.attempts or ""),
            *([str(row.ranks or "")] if several else []),
            ", ".join(row.tags),
            str(row.steps_lost or ""),
            row.cause or "",
            row.job_id or "",
            row.node or "",
            _time_of_day(row.checkpoint_time),
        )
        for row in rows
    ]
    known = [number for number, name in enumerate(columns) if name in ("run", "state") or any(c[number] for c in cells)]
    columns, cells = [columns[number] for number in known], [tuple(c[number] for number in known) for c in cells]
    made = Lines(columns, cells, columns.index("state"), [STYLES.get(row.state, "") for row in rows])
    urgent = sorted([*rows, *others], key=lambda row: urgency(row.state))
    notes = ["\n  ".join(map(printable, note.splitlines())) for note in (*_notes(urgent), *messages)]
    counts = ", ".join(f"{count} {state}" for state, count in Counter(row.state for row in others).items())
    more = [Text(f"and {len(others)} more: {counts}")] if others else []
    return Group(made, *more, *(Text(line, style="yellow") for line in notes))


def fitting(rows: Sequence[Row], messages: Sequence[str]) -> Fitting:
    """Fit `as_table` to a window: if it has too few lines, show the runs that need attention and count the others."""
    urgent = sorted(range(len(rows)), key=lambda number: urgency(rows[number].state))

    def made(count: int) -> Any:
        shown, others = sorted(urgent[:count]), urgent[count:]
        return as_table([rows[number] for number in shown], messages, [rows[number] for number in others])

    return Fitting(len(rows), made)


def _notes(rows: Sequence[Row]) -> Iterator[str]:
    """What there is to say about the rows besides their cells; what several have in common is said once."""
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
    """`Mar 02 14:32` in local time: no age, since the clock of the file system may differ from this machine's."""
    if time is None:
        return ""
    try:
        return datetime.fromtimestamp(time).strftime("%b %d %H:%M")
    except (ValueError, OverflowError, OSError):  # a time outside the calendar
        return "?"


def main(arguments: Sequence[str]) -> int:
    """Run the command; its exit status.

    Raises:
        UserError: an argument is wrong.
    """
    parser = Parser(f"{PROGRAM} status", description="Show what each run in a directory is doing.")
    parser.add_argument(
        "root", nargs="?", type=Path, default="outputs", metavar="DIR", help="the directory (default: outputs)"
    )
    parser.add_argument(
        "--watch", nargs="?", type=float, const=5.0, metavar="SECONDS", help="refresh until Ctrl-C (default: every 5 s)"
    )
    parser.add_argument("--tag", action="append", default=[], help="only runs that have this one of run.tags")
    parser.add_argument("--json", action="store_true", help="print a list of objects, for programs")
    options = parser.parse_args(arguments)
    root: Path = options.root
    if not files.is_dir(root):
        raise UserError(f"{root} is not a directory: name the one that contains the runs (run.root)")
    check_interval(options.watch)
    if options.json:
        print(json.dumps([without_nan(vars(row)) for row in having(collect(root)[0], options.tag)], indent=2))
    elif options.watch is not None:
        _watch(root, options.watch, options.tag)
    else:
        rows, messages = collect(root)
        if rows := having(rows, options.tag):
            console().print(as_table(rows, messages))
        else:
            tagged = f" with the tags {', '.join(options.tag)}" if options.tag else ""
            print("\n".join(printable(line) for line in (*messages, f"no runs in {root}{tagged}")))
    return 0


def _watch(root: Path, interval_s: float, tags: Sequence[str]) -> None:
    from rich.live import Live

    watcher = LeaseWatcher()

    def look_again() -> Fitting:
        rows, messages = collect(root, watcher)
        return fitting(having(rows, tags), messages)

    with suppress(KeyboardInterrupt), Live(look_again(), console=console(), auto_refresh=False) as live:
        while True:
            clock.sleep(interval_s)
            live.update(look_again(), refresh=True)

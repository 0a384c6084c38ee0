"""Show the state of each run in a directory: `python -m runner status [DIR]`.

The command reads the run directories, and queries schedulers through the launchers that submitted the runs. Other users
may be able to write to shared directories. Therefore invalid content in one run does not hide the other runs, and
classes named in a run are not imported. Clocks of different machines are never compared. For speed, nothing here
imports torch, numpy or hydra.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from runner.cli.base.console import PROGRAM, Parser, check_interval, console, without_nan
from runner.cli.look.status_table import Row, as_table, fitting
from runner.config.identity import flatten, kind_of
from runner.config.labels import labels, telling
from runner.config.plain_yaml import read_plain
from runner.contracts import JobInfo
from runner.errors import RunDirError, UserError
from runner.rundir import submitted_jobs
from runner.rundir.find import base_of, find_runs
from runner.rundir.lease import LeaseWatcher, heartbeat_file, read_holder
from runner.rundir.paths import RunDir
from runner.rundir.state import State, entry, look, modified, submitted_job
from runner.rundir.time_account import lived_s
from runner.rundir.trust import reading
from runner.system import clock, files
from runner.system.terminal import printable

SHOWN = ("train.steps", "train.epochs")  # settings that the column with the steps already shows


def collect(root: Path, watcher: LeaseWatcher | None = None) -> tuple[list[Row], list[str]]:
    """Return a row for each run below `root`, and a message for each launcher that could not report its jobs.

    This takes some seconds if a run's heartbeat is the only sign of life and `watcher` has not seen it before.
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
    """Return the row of a run. If its directory has invalid content, the state is `unreadable`.

    An unreadable run must not hide the other runs.
    """
    try:
        with reading(run):
            if not files.is_taken(run.config):
                raise RunDirError(f"{run.config} is missing: rerun the command of the run, which writes it again")
            return _row(run, root, watcher, job, unanswered)
    except RunDirError as error:
        return Row(_name(run, root), str(run.path), "unreadable", reason=str(error))


def _name(run: RunDir, root: Path) -> str:
    return os.path.relpath(run.path, base_of(root)) if run.path != root else run.path.name


def _row(run: RunDir, root: Path, watcher: LeaseWatcher, job: JobInfo | None, unanswered: bool) -> Row:
    """Return the row of one run.

    Args:
        run: the run directory.
        root: the directory; run names are relative to it.
        watcher: detects whether the process that holds the lease is alive.
        job: the scheduler's report on the job, or None if it knows no job.
        unanswered: whether the scheduler did not respond. If so, there may be a job although `job` is None.

    Raises:
        OSError: a record of the run cannot be read.
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
        row.step = state.finish.steps or row.step
        row.total = row.total if state.finish.early is not None else row.step
    # Each step refreshes the status after at most a few seconds. If the status is old, either a long step is in
    # progress, or the run was killed.
    newest = state.newest
    if newest and (entry(newest, "step", int) > (row.step or 0) or row.loss is None):
        row.step, row.loss = newest["step"], entry(newest, "loss", float)
    if row.state == "running":
        row.idle_s = _idle_s(run)
    if state.job is not None:
        row.job_id, row.node = state.job.job_id, state.job.node
        row.waited_s, row.starts = state.job.waited_s, state.job.starts
    elif row.job_id is None:
        row.job_id = submitted_job(run)
    row.checkpoint_step, row.checkpoint_time = run.newest_checkpoint() or (None, None)
    row.tags, row.notes = labels(run)
    with suppress(ValueError, TypeError, LookupError):  # as in `labels`, an error here does not hide the rest
        settings = flatten(read_plain(run.config))
        row.settings = {key: value for key, value in settings.items() if kind_of(key) != "free" and key not in SHOWN}
    row.gpu_hours = _gpu_hours(run, state)
    return row


def _gpu_hours(run: RunDir, state: State) -> float | None:
    """Return the GPU hours of all attempts, including one in progress. Return None if no GPUs were used."""
    current = files.read_object(run.attempt)
    if current.get("attempt") == state.status.get("attempt"):
        current = {**current, **(entry(state.status, "time", dict) or {})}
    under_way = [current] if current.get("attempt") not in [each.get("attempt") for each in state.attempts] else []
    had = [each for each in (*state.attempts, *under_way) if type(each.get("gpus")) is int]
    return sum((lived_s(each) or 0.0) * each["gpus"] / 3600 for each in had) if had else None


def having(rows: Sequence[Row], tags: Sequence[str]) -> list[Row]:
    """Select the rows that have all of these tags, and set `differs` in each row."""
    chosen = [row for row in rows if set(tags) <= set(row.tags)]
    keys = telling([row.settings for row in chosen])
    for row in chosen:
        row.differs = {key: row.settings[key] for key in keys if key in row.settings}
    return chosen


def _idle_s(run: RunDir) -> float | None:
    """Return the seconds since the last step, or since the start of the attempt. Return None if not known.

    The time ends at the last heartbeat. All times are file times, which come from the clock of the file system.
    """
    held = read_holder(run.lease)
    beat = modified(heartbeat_file(run.lease, held[0])) if held else None
    last = max((time for path in (run.metrics, run.attempt) if (time := modified(path)) is not None), default=None)
    return None if beat is None or last is None else max(0.0, beat - last)


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status.

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
        rows = having(collect(root)[0], options.tag)
        print(json.dumps([without_nan(_plain(row)) for row in rows], indent=2))
    elif options.watch is not None:
        _watch(root, options.watch, options.tag)
    else:
        rows, messages = collect(root)
        if rows := having(rows, options.tag):
            made = console()
            made.print(as_table(rows, messages, width=made.width))
        else:
            tagged = f" with the tags {', '.join(options.tag)}" if options.tag else ""
            print("\n".join(printable(line) for line in (*messages, f"no runs in {root}{tagged}")))
    return 0


def _plain(row: Row) -> dict[str, Any]:
    """Return a row for JSON. Of its settings, only those that differ between rows are included."""
    return {name: value for name, value in vars(row).items() if name != "settings"}


def _watch(root: Path, interval_s: float, tags: Sequence[str]) -> None:
    from rich.live import Live

    watcher, shown = LeaseWatcher(), console()

    def look_again() -> Any:
        rows, messages = collect(root, watcher)
        return fitting(having(rows, tags), messages, shown.width)

    with suppress(KeyboardInterrupt), Live(look_again(), console=shown, auto_refresh=False) as live:
        while True:
            clock.sleep(interval_s)
            live.update(look_again(), refresh=True)

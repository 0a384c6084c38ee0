"""Show tables of runs on a terminal."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Column, Table

from runner.contracts import JobInfo
from runner.rundir.paths import RunDir
from runner.rundir.state import IN_QUEUE, look, urgency
from runner.system import clock, files
from runner.system.terminal import Fitting

REFRESH_S = 2.0


def console() -> Console:
    """Return a console as wide as the terminal. Without a terminal, make it wide enough for complete names."""
    return Console() if sys.stdout.isatty() else Console(width=1000)


def show_submitted(rows: list[tuple[Path, str]], console: Console) -> None:
    """Print each run's name, job id and directory, and the commands to follow, read and cancel the runs."""
    table = Table("run", "job", Column("folder", overflow="fold"), box=None, pad_edge=False)
    for run_dir, job_id in rows:
        table.add_row(run_dir.name, job_id, str(run_dir))
    console.print(table)
    first = rows[0][0]
    if not files.exists(RunDir(first).code):
        return  # an evaluation of a run
    root, run = (shlex.quote(os.path.relpath(path)) for path in (first.parent, first))
    commands = {"status": root, "logs": f"-f {run}", "cancel": run + (" --sweep" if len(rows) > 1 else "")}
    for name, arguments in commands.items():
        console.print(f"{name + ':':8}python -m runner {name} {arguments}", soft_wrap=True, highlight=False)


def follow(
    run_dirs: list[Path],
    states: Callable[[], dict[Path, str]],
    console: Console,
    every_s: float = REFRESH_S,
    transient: bool = False,
) -> None:
    """Show the state of each run, as returned by `states`, until all have ended (see `is_over`).

    On a terminal, refresh a table in place, and remove it at the end if `transient`. Without a terminal, print a line
    for each change and the table at the end.
    """
    if not console.is_terminal:
        _follow_in_lines(run_dirs, states, console, every_s)
        return
    with Live(console=console, refresh_per_second=4, transient=transient) as live:
        while True:
            now = states()
            live.update(_fitting(run_dirs, now))
            if all(is_over(now[run_dir]) for run_dir in run_dirs):
                break
            clock.sleep(every_s)


def _follow_in_lines(
    run_dirs: list[Path], states: Callable[[], dict[Path, str]], console: Console, every_s: float
) -> None:
    before: dict[Path, str] = {}
    while True:
        now = states()
        for run_dir in run_dirs:
            if now[run_dir] not in (before.get(run_dir), "waiting"):
                over = sum(map(is_over, now.values()))
                print(f"{run_dir.name}: {now[run_dir]} ({over} of {len(run_dirs)} are over)", flush=True)
        before = now
        if all(map(is_over, now.values())):
            break
        clock.sleep(every_s)
    console.print(_table(run_dirs, now, 0))


def is_over(state: str) -> bool:
    """Return whether a run in `state` has stopped and only a command would start it again."""
    return state not in ("waiting", "running", *IN_QUEUE)


def state_of(run_dir: Path, job: JobInfo | None) -> str:
    """Return the state of a run, or `waiting` while the file system does not answer."""
    try:
        return look(RunDir(run_dir), job).word
    except (OSError, ValueError):
        return "waiting"


def read_status(run_dir: Path) -> dict[str, Any]:
    """Return the run's last recorded status, or {} if it cannot be read at the moment."""
    try:
        return files.read_object(RunDir(run_dir).status)
    except OSError:
        return {}


def _fitting(run_dirs: list[Path], states: dict[Path, str]) -> Fitting:
    urgent = sorted(run_dirs, key=lambda run_dir: urgency(states[run_dir]))
    return Fitting(len(urgent), lambda count: _table(urgent[:count], states, len(urgent) - count))


def _table(run_dirs: list[Path], states: dict[Path, str], others: int) -> Table:
    caption = f"and {others} more" if others else None
    table = Table(
        Column("run", overflow="fold"),
        *("state", "step", "loss"),
        caption=caption,
        caption_justify="left",
        box=None,
        pad_edge=False,
    )
    for run_dir in run_dirs:
        status = read_status(run_dir)
        step, loss = status.get("step"), status.get("loss")
        steps = "" if step is None else f"{step}/{status.get('total', '?')}"
        name = f"{run_dir.name}: {doing}" if isinstance(doing := status.get("doing"), str) else run_dir.name
        table.add_row(name, states[run_dir], steps, "" if loss is None else f"{loss:.4f}")
    return table

"""Tables of runs on a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Column, Table

from launch import STATUS_FILE, JobInfo, read_object

REFRESH_S = 2.0


def submitted(rows: list[tuple[Path, str]], console: Console) -> None:
    """One line a run: its name, its job, its folder."""
    table = Table("run", "job", Column("folder", overflow="fold"), box=None, pad_edge=False)
    for run_dir, job_id in rows:
        table.add_row(run_dir.name, job_id, str(run_dir))
    console.print(table)


def follow(
    run_dirs: list[Path],
    states: Callable[[], dict[Path, str]],
    console: Console,
    every_s: float = REFRESH_S,
) -> None:
    """Show what each run does until every state that `states` gives is an end (see `is_over`)."""
    with Live(console=console, refresh_per_second=4, transient=False) as live:
        while True:
            now = states()
            live.update(_table(run_dirs, now))
            if all(is_over(now[run_dir]) for run_dir in run_dirs):
                return
            time.sleep(every_s)


def is_over(state: str) -> bool:
    """Whether a run in `state` does nothing more by itself."""
    return state not in ("waiting", "pending", "running", "requeued", "ending")


def state_of(run_dir: Path, job: JobInfo | None) -> str:
    """The scheduler's word for a run with a live job, else how its last attempt ended."""
    if job is not None and job.live:
        return job.state
    said = str(read_object(run_dir / STATUS_FILE).get("state", "not started"))
    if said not in ("running", "requeued", "not started"):
        return said
    # Nobody works on it any more, so what it said last is old.
    if job is not None and job.state != "completed":
        return job.state
    return said if said == "not started" else "killed"


def _table(run_dirs: list[Path], states: dict[Path, str]) -> Table:
    table = Table("run", "state", "step", "loss", box=None, pad_edge=False)
    for run_dir in run_dirs:
        status = read_object(run_dir / STATUS_FILE)
        step, loss = status.get("step"), status.get("loss")
        steps = "" if step is None else f"{step}/{status.get('total', '?')}"
        table.add_row(run_dir.name, states[run_dir], steps, "" if loss is None else f"{loss:.4f}")
    return table

"""What every run is doing: `python -m runner.status outputs [--watch] [--json]`.

Reads the run directories and asks the scheduler through each run's launcher, where there is one. Nothing
here imports torch, numpy or hydra, so that it answers at once.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runner import lease, queue
from runner.attempts import finished_at, last_record, status_of
from runner.errors import ExitStatus
from runner.files import read_object
from runner.run_dir import RunDir

# A beat that is older than this, seen from another machine, belongs to a run that is gone.
SILENCE_S = 60.0
STYLES = {
    "running": "green",
    "finished": "bold green",
    "pending": "cyan",
    "requeued": "cyan",
    "ending": "cyan",
    "interrupted": "yellow",
    "cancelled": "yellow",
    "killed": "red",
    "failed": "bold red",
    "crash loop": "bold red",
    "unreadable": "yellow",
}


@dataclass
class Row:
    """One run. `state` is what holds now; `cause` is why the last attempt ended."""

    run: str
    path: str
    state: str
    step: int | None = None
    total: int | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    attempts: int = 0
    steps_lost: int = 0
    cause: str | None = None
    reason: str | None = None
    job_id: str | None = None
    node: str | None = None
    checkpoint_step: int | None = None
    checkpoint_age_s: float | None = None
    updated: float | None = None
    faults: list[str] | None = None


def find_runs(root: Path) -> Iterator[RunDir]:
    """The run directories at and below `root`, in the order of their paths."""
    for directory, children, files in os.walk(root):
        if "config.yaml" in files:
            children.clear()
            yield RunDir(Path(directory))
        children[:] = sorted(child for child in children if not child.startswith("."))


def collect(root: Path) -> tuple[list[Row], list[str]]:
    """A row for each run below `root`, and what could not be found out."""
    runs = list(find_runs(root))
    jobs, remarks = queue.jobs(runs)
    return [_row_or_reason(run, root, jobs.get(run.path), bool(remarks)) for run in runs], remarks


def _row_or_reason(run: RunDir, root: Path, job: Any | None, silent: bool) -> Row:
    """One run that cannot be read, another user's say, hides no other."""
    try:
        return row_of(run, root, job, silent)
    except OSError as error:
        reason = f"{error.filename or run.path} cannot be read ({error.strerror or error})"
        return Row(_name(run, root), str(run.path), "unreadable", reason=reason)


def _name(run: RunDir, root: Path) -> str:
    return os.path.relpath(run.path, root) if run.path != root else run.path.name


def row_of(run: RunDir, root: Path, job: Any | None = None, silent: bool = False) -> Row:
    """The row of one run.

    Args:
        run: the run directory.
        root: what the run's name is relative to.
        job: the scheduler's word (`job_id`, `state`, `live`, `node`), None where it knows of no job.
        silent: the scheduler could not be asked, so that no job does not mean that there is none.
    """
    status = status_of(run)
    if job is not None and not job.live and not _says_more(job, run, status):
        job = None
    row = Row(_name(run, root), str(run.path), "")
    for name in (
        "step",
        "total",
        "loss",
        "tokens_per_s",
        "cause",
        "reason",
        "job_id",
        "node",
        "updated",
        "faults",
    ):
        setattr(row, name, status.get(name))
    row.attempts, row.steps_lost = int(status.get("attempts") or 0), int(status.get("steps_lost") or 0)
    row.state = _state(run, status, job, silent)
    if row.state == "finished":
        row.step = row.total = finished_at(run) or row.step
    # It was killed and could not say how far it came.
    if row.state in ("killed", "cancelled") and status.get("state") == "running" and (newest := last_record(run)):
        row.step, row.loss = newest["step"], newest["loss"]
    if status and row.total is None:
        row.total = queue.frozen(run, "train", "steps")
    if row.state in ("killed", "failed", "cancelled") and not status:
        row.cause = "ended before it could begin: see its logs" if _has_log(run) else "left the queue"
    if job is not None:
        row.job_id, row.node = job.job_id, job.node
        if row.state == "failed":
            row.reason = f"job {job.job_id} ended before it could say why: see its logs"
    elif row.job_id is None:
        row.job_id = read_object(run.job).get("job_id")
    _add_checkpoint(row, run)
    return row


def _says_more(job: Any, run: RunDir, status: dict[str, Any]) -> bool:
    """Whether the scheduler knows the end of a job that is over better than the run, which could not say it."""
    if job.state == "completed":
        return False
    said = status.get("state")
    if said == "running":  # killed: by whom it cannot know
        return bool(job.state == "cancelled" and job.job_id == status.get("job_id"))
    unheard = (read_object(run.job).get("submitted") or 0) > (status.get("updated") or 0)
    return said in (None, "requeued") or unheard


def _state(run: RunDir, status: dict[str, Any], job: Any | None, silent: bool) -> str:
    said = str(status.get("state") or "")
    if job is not None and job.state != "ending":
        return str(job.state)
    if said == "running" and is_alive(run):
        return "running"
    if job is not None:  # it gives its node back: what the run said last of its coming back holds
        return said if said not in ("", "running") else "ending"
    if said == "running":
        return "killed"
    if said == "requeued" and not silent:
        return "cancelled"  # it waited to come back, and is in no queue any more
    return said or _state_before_the_start(run, silent)


def _state_before_the_start(run: RunDir, silent: bool) -> str:
    """The state of a run that no attempt has written about, and that no queue holds."""
    if not run.job.exists():
        return "not started"
    if silent:
        return "pending"
    return "failed" if _has_log(run) else "cancelled"


def _has_log(run: RunDir) -> bool:
    """Whether the submitted job ever wrote a word."""
    job_id = read_object(run.job).get("job_id")
    return any(log.exists() for log in run.logs.glob(f"{job_id}_*_log.out")) if run.logs.is_dir() else False


def is_alive(run: RunDir) -> bool:
    """Whether the holder of the run directory still works on it, as far as can be told at once."""
    found = lease.current(run.lease)
    if found is None:
        return False
    fence, holder = found
    verdict = lease.judge(holder, lease.this_process()) if "pid" in holder else "unknown"
    if verdict != "unknown":
        return verdict == "alive"
    try:
        return time.time() - (run.lease / f"{fence:08d}.beat").stat().st_mtime < SILENCE_S
    except OSError:
        return False


def _add_checkpoint(row: Row, run: RunDir) -> None:
    if newest := run.newest_checkpoint():
        row.checkpoint_step = newest[0]
        row.checkpoint_age_s = max(0.0, time.time() - newest[1])


def table(rows: list[Row], remarks: list[str]) -> Any:
    """The rows as a table for rich."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    columns = (
        "run",
        "state",
        "step",
        "loss",
        "tokens/s",
        "attempts",
        "lost",
        "last cause",
        "job",
        "node",
        "saved",
    )
    made = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        made.add_row(
            row.run,
            Text(row.state, style=STYLES.get(row.state, "")),
            f"{row.step or 0}/{row.total or '?'}" if row.step is not None or row.total else "",
            "" if row.loss is None else f"{row.loss:.4f}",
            "" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}",
            str(row.attempts or ""),
            str(row.steps_lost or ""),
            row.cause or "",
            row.job_id or "",
            row.node or "",
            "" if row.checkpoint_age_s is None else f"{duration(row.checkpoint_age_s)} ago",
        )
    notes = [
        f"{row.run}: {text}" + (f" ({count} times)" if count > 1 else "")
        for row in rows
        for text, count in Counter([*([row.reason] if row.reason else []), *(row.faults or [])]).items()
    ]
    return Group(made, *(Text(note, style="yellow") for note in (*notes, *remarks)))


def duration(seconds: float) -> str:
    """`42 s`, `7 min`, `3 h`, `2 d`."""
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def main(arguments: list[str] | None = None) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser("python -m runner.status", description="What every run is doing.")
    parser.add_argument("root", nargs="?", default="outputs", help="where run directories are (default: outputs)")
    parser.add_argument("--watch", nargs="?", type=float, const=5.0, metavar="SECONDS", help="refresh until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="a list of objects, for programs")
    options = parser.parse_args(arguments)
    root = Path(options.root)
    if not root.is_dir():
        print(f"error: {root} is not a directory: give the one that holds the runs (run.root)", file=sys.stderr)
        return int(ExitStatus.USAGE)
    if options.watch is not None and not options.watch > 0:
        print(f"error: --watch {options.watch:g}: give more than 0 seconds", file=sys.stderr)
        return int(ExitStatus.USAGE)
    if options.json:
        print(json.dumps([asdict(row) for row in collect(root)[0]], indent=2))
        return 0
    _show(root, options.watch)
    return 0


def _show(root: Path, every_s: float | None) -> None:
    from rich.console import Console
    from rich.live import Live

    if every_s is None:
        rows, remarks = collect(root)
        # Whole names: as wide as the terminal there, as wide as it takes where nobody looks.
        console = Console(soft_wrap=True) if sys.stdout.isatty() else Console(soft_wrap=True, width=1000)
        console.print(table(rows, remarks) if rows else f"no runs in {root}")
        return
    try:
        with Live(table(*collect(root)), screen=False, auto_refresh=False) as live:
            while True:
                time.sleep(every_s)
                live.update(table(*collect(root)), refresh=True)
    except KeyboardInterrupt:
        return


if __name__ == "__main__":
    sys.exit(main())

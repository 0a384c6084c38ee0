"""metrics.jsonl as a table with one row per step, for CSV and for plots."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from runner.errors import RunDirError
from runner.metrics.external import scalars
from runner.rundir.paths import RunDir
from runner.system import files


def rows(run: RunDir) -> list[dict[str, Any]]:
    """One dict per step in order, `step` first; nested numbers as `a/b`, an evaluation in the row of its step.

    Raises:
        RunDirError: a line is not the record of a step.
        OSError: the file cannot be read.
    """
    table: dict[int, dict[str, Any]] = {}
    invalid: list[int] = []
    for record in files.read_lines(run.metrics, invalid=invalid):
        step = record.get("step") if isinstance(record, dict) else None
        if type(step) is not int or step < 0:
            raise RunDirError(_malformed(run, f"{record!s:.60} is not the record of a step"))
        row = table.setdefault(step, {"step": step})
        row |= scalars(record) | {key: value for key, value in record.items() if isinstance(value, str)}
    if invalid:
        raise RunDirError(_malformed(run, f"line {invalid[0]} is not JSON"))
    return [table[step] for step in sorted(table)]


def _malformed(run: RunDir, what: str) -> str:
    return f"{run.metrics} is malformed ({what}): restore it from a copy, or remove that line"


def losses(table: list[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    """(step, value) of each row that has a number of that name."""
    return [(row["step"], row[name]) for row in table if isinstance(row.get(name), float)]


def export_csv(run: RunDir, path: Path | None = None) -> Path:
    """Write the metrics of `run` atomically to `path` (None: metrics.csv in the run directory).

    Columns are in order of first appearance; missing values are empty.

    Returns:
        The file.

    Raises:
        RunDirError: a line of the metrics is not the record of a step.
        OSError: the file cannot be written.
    """
    table = rows(run)
    columns = list(dict.fromkeys(key for row in table for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _plain(value) for key, value in row.items()} for row in table)
    target = path or run.csv
    files.write_atomic(target, text.getvalue().encode(errors="backslashreplace"))
    return target


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value

"""metrics.jsonl as a table with one row per step, for CSV and for plots."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from runner.metrics.external import scalars
from runner.rundir.paths import RunDir
from runner.system import files


def rows(run: RunDir) -> list[dict[str, Any]]:
    """One dict per step in order, `step` first; nested numbers as `a/b`, an evaluation in the row of its step."""
    table: dict[int, dict[str, Any]] = {}
    for record in files.read_lines(run.metrics):
        if isinstance(record, dict) and "step" in record:
            step = int(record["step"])
            row = table.setdefault(step, {"step": step})
            row |= scalars(record) | {key: value for key, value in record.items() if isinstance(value, str)}
    return [table[step] for step in sorted(table)]


def export_csv(run: RunDir, path: Path | None = None) -> Path:
    """Write the metrics of `run` atomically to `path` (None: metrics.csv in the run directory).

    Columns are in order of first appearance; missing values are empty.

    Returns:
        The file.

    Raises:
        OSError: it cannot be written.
    """
    table = rows(run)
    columns = list(dict.fromkeys(key for row in table for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _plain(value) for key, value in row.items()} for row in table)
    target = path or run.csv
    files.write_atomic(target, text.getvalue())
    return target


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value

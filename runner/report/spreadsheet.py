"""Write the tables of a report as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

from runner.config.identity import as_text
from runner.metrics.external import scalars
from runner.metrics.records import read_records
from runner.report.compare import differing
from runner.report.runs import RunResults
from runner.rundir.paths import RunDir


def of_runs(runs: Sequence[RunResults]) -> str:
    """Return one row per run: the settings that differ; last value, best value and best step of each metric."""
    keys = differing(runs)
    names = list(dict.fromkeys(name for run in runs for name in run.metrics))
    columns = ["run", "path", "state", "steps", *keys]
    columns += [f"{name}{what}" for name in names for what in ("", " best", " best step")]
    rows = []
    for run in runs:
        row: dict[str, Any] = {"run": run.name, "path": str(run.path), "state": run.state, "steps": run.steps}
        row |= {key: as_text(run.settings[key]) for key in keys if key in run.settings}
        for name, one in run.metrics.items():
            row |= {name: one.last, f"{name} best": one.best, f"{name} best step": one.best_step}
        rows.append(row)
    return _as_csv(columns, rows)


def of_steps(runs: Sequence[RunResults]) -> str:
    """Return one row per run and step: the numbers of its record (nested as `a/b`) and of its evaluation."""
    rows: list[dict[str, Any]] = []
    for run in runs:
        if run.state == "unreadable":
            continue
        table: dict[int, dict[str, Any]] = {}
        for record in read_records(RunDir(run.path).metrics):
            row = table.setdefault(record["step"], {"run": run.name, "step": record["step"]})
            row |= {name: _without_fraction(value) for name, value in scalars(record).items()}
            row |= {name: value for name, value in record.items() if isinstance(value, str)}
        rows += [table[step] for step in sorted(table)]
    return _as_csv(list(dict.fromkeys(["run", "step", *(name for row in rows for name in row)])), rows)


def _without_fraction(value: float) -> Any:
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _as_csv(columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode(errors="backslashreplace").decode()

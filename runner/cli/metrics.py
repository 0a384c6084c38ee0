"""`runner metrics RUN...`: what runs have measured, as a summary, a CSV file or a plot."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner.cli.console import PROGRAM, Parser, say
from runner.errors import FileError, UserError
from runner.metrics.tables import export_csv, losses, rows
from runner.rundir.paths import RunDir
from runner.rundir.trust import reading


def main(arguments: Sequence[str]) -> int:
    """The command; its exit status: 0 if every RUN could be read. One that cannot be is reported, and the others shown.

    Raises:
        UserError: an argument is wrong, a RUN cannot be read, or a file cannot be written.
    """
    parser = Parser(prog=f"{PROGRAM} metrics", description="Summarize, export or plot the metrics of runs.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("--csv", action="store_true", help="write metrics.csv into each run directory")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot the losses of all RUNs (.png, .svg, .pdf)")
    options = parser.parse_args(arguments)
    readable, errors = [], []
    for path in options.runs:
        try:
            text = _described(_run(path), options.csv, options.plot is not None)
            readable.append(RunDir(path))
            if text:
                say(text)
        except UserError as error:
            errors.append(error)
    if options.plot and readable:
        _plot(readable, options.plot)
    if errors:
        raise type(errors[0])("\n".join(map(str, errors)))
    return 0


def _described(run: RunDir, as_csv: bool, plotted: bool) -> str:
    """What to print about a run: its summary, or the file that is written."""
    with reading(run):
        table = rows(run)
    if not as_csv:
        return "" if plotted else summary(run.path, table)
    try:
        return str(export_csv(run))
    except OSError as error:
        raise FileError(f"{run.csv} cannot be written ({error.strerror or error})") from error


def _plot(runs: list[RunDir], path: Path) -> None:
    from runner.metrics.plot import plot_losses

    try:
        plot_losses(runs, path)
    except OSError as error:
        raise FileError(f"{error.filename or path} cannot be written ({error.strerror or error})") from error
    say(str(path))


def _run(path: Path) -> RunDir:
    run = RunDir(path)
    if not os.path.lexists(run.metrics):
        raise UserError(f"{path} has no metrics.jsonl: pass a run directory, for example outputs/NAME")
    return run


def summary(path: Path, table: list[dict[str, Any]]) -> str:
    """One line: the last step and its loss, the last and the best evaluation."""
    trained, evaluations = losses(table, "loss"), losses(table, "eval_loss")
    parts = [f"{path}:"]
    parts.append(f"step {trained[-1][0]}, loss {trained[-1][1]:.4f}" if trained else "no step yet")
    if evaluations:
        step, best = min(evaluations, key=lambda evaluation: evaluation[1])
        parts.append(f"held-out loss {evaluations[-1][1]:.4f}, best {best:.4f} at step {step}")
    return "  ".join(parts)

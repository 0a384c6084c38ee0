"""`runner metrics RUN...`: what runs have measured, as a summary, a CSV file or a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runner.cli.console import PROGRAM, Parser
from runner.errors import FileError, UserError
from runner.metrics.tables import export_csv, rows
from runner.rundir.paths import RunDir


def main(arguments: Sequence[str]) -> int:
    """The command; its exit status.

    Raises:
        UserError: an argument is wrong, or a file cannot be read or written.
    """
    parser = Parser(prog=f"{PROGRAM} metrics", description="Summarize, export or plot the metrics of runs.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("--csv", action="store_true", help="write metrics.csv into each run directory")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot the losses of all RUNs (.png, .svg, .pdf)")
    options = parser.parse_args(arguments)
    try:
        _carry_out([_run(path) for path in options.runs], options.csv, options.plot)
    except OSError as error:
        where = error.filename or options.plot or options.runs[0]
        raise FileError(f"{where} cannot be read or written ({error.strerror or error})") from error
    return 0


def _carry_out(runs: list[RunDir], as_csv: bool, plot: Path | None) -> None:
    if as_csv:
        for run in runs:
            print(export_csv(run))
    if plot:
        from runner.metrics.plot import plot_losses

        plot_losses(runs, plot)
        print(plot)
    if not as_csv and not plot:
        for run in runs:
            print(summary(run))


def _run(path: Path) -> RunDir:
    run = RunDir(path)
    if not run.metrics.is_file():
        raise UserError(f"{path} has no metrics.jsonl: pass a run directory, for example outputs/NAME")
    return run


def summary(run: RunDir) -> str:
    """One line: the last step and its loss, the last and the best evaluation."""
    table = rows(run)
    losses = [(row["step"], row["loss"]) for row in table if "loss" in row]
    evaluations = [(row["eval_loss"], row["step"]) for row in table if "eval_loss" in row]
    parts = [f"{run.path}:"]
    parts.append(f"step {losses[-1][0]}, loss {losses[-1][1]:.4f}" if losses else "no step yet")
    if evaluations:
        best, step = min(evaluations)
        parts.append(f"held-out loss {evaluations[-1][0]:.4f}, best {best:.4f} at step {step}")
    return "  ".join(parts)

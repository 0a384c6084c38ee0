"""`python -m runner.metrics RUN...`: what runs have measured, as a summary, a CSV file or a picture."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from runner.errors import ExitStatus, UserError
from runner.metrics.tables import export_csv, rows
from runner.run_dir import RunDir


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit status. Mistakes are printed as one line."""
    parser = argparse.ArgumentParser(prog="python -m runner.metrics", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("--csv", action="store_true", help="write metrics.csv into each run directory")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the loss curves of all RUNs (.png, .svg, .pdf)")
    options = parser.parse_args(arguments)
    try:
        runs = [_run(path) for path in options.runs]
        if options.csv:
            for run in runs:
                print(export_csv(run))
        if options.plot:
            from runner.metrics.plot import plot_losses

            plot_losses(runs, options.plot)
            print(options.plot)
        if not options.csv and not options.plot:
            for run in runs:
                print(summary(run))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.status)
    except OSError as error:
        where = error.filename or options.plot or options.runs[0]
        print(f"error: {where} cannot be read or written ({error.strerror or error})", file=sys.stderr)
        return int(ExitStatus.FAILED)
    return 0


def _run(path: Path) -> RunDir:
    run = RunDir(path)
    if not run.metrics.is_file():
        raise UserError(f"{path}: no metrics.jsonl in it: give the directory of a run, for example outputs/NAME")
    return run


def summary(run: RunDir) -> str:
    """One line: how far, the last loss, the last and the best evaluation."""
    table = rows(run)
    losses = [(row["step"], row["loss"]) for row in table if "loss" in row]
    evaluations = [(row["eval_loss"], row["step"]) for row in table if "eval_loss" in row]
    parts = [f"{run.path}:"]
    parts.append(f"step {losses[-1][0]}, loss {losses[-1][1]:.4f}" if losses else "no step yet")
    if evaluations:
        best, step = min(evaluations)
        parts.append(f"held-out loss {evaluations[-1][0]:.4f}, best {best:.4f} at step {step}")
    return "  ".join(parts)


if __name__ == "__main__":
    sys.exit(main())

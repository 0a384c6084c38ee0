"""Plots the losses of one or several runs. Imports matplotlib (the extra `plot`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner.errors import UserError
from runner.metrics.tables import losses, rows
from runner.rundir.paths import RunDir
from runner.rundir.trust import reading
from runner.system import files
from runner.system.terminal import printable

SMOOTH_STEPS = 20


def plot_losses(runs: Sequence[RunDir], path: Path) -> None:
    """Plot training losses (faint, with their moving average), evaluations (dots) and resumes (dotted lines).

    Args:
        runs: runs with a metrics.jsonl, all in one plot.
        path: the file; its suffix (.png, .svg, .pdf) decides on the format.

    Raises:
        UserError: matplotlib is not installed, a run has no steps or malformed ones, or the suffix is unknown.
        OSError: the file cannot be written.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("--plot needs the package 'matplotlib', which is not installed: pip install matplotlib")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for number, run in enumerate(runs):
        with reading(run):
            _draw(axes, run, f"C{number}")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    known = figure.canvas.get_supported_filetypes()
    if path.suffix.lstrip(".") not in known:
        raise UserError(f"--plot {path}: unknown format: the name must end in one of .{', .'.join(sorted(known))}")
    figure.savefig(path, dpi=120)


def _draw(axes: Any, run: RunDir, color: str) -> None:
    table = rows(run)
    trained = losses(table, "loss")
    if not trained:
        raise UserError(f"{run.path} has no step to plot: pass a run that has completed one")
    steps, values = zip(*trained, strict=True)
    window = max(1, min(SMOOTH_STEPS, len(values) // 20))  # a wide one would lag in a short run
    axes.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
    axes.plot(steps, smooth(values, window), color=color, label=printable(run.path.name))
    evaluations = losses(table, "eval_loss")
    if evaluations:
        axes.plot(
            *zip(*evaluations, strict=True),
            "o",
            color=color,
            markersize=4,
            label=printable(f"{run.path.name}, held out"),
        )
    for number, step in enumerate(resumes(run)):
        label = printable(f"{run.path.name}, resumed") if number == 0 else None
        axes.axvline(step, color=color, linestyle=":", linewidth=0.8, label=label)


def resumes(run: RunDir) -> list[int]:
    """The steps at which attempts resumed, without step 0."""
    starts = [record.get("start_step") for record in files.read_lines(run.attempts) if isinstance(record, dict)]
    return sorted({start for start in starts if isinstance(start, int) and start > 0})


def smooth(values: Sequence[float], window: int) -> list[float]:
    """For each value, the mean of the last `window` values up to it."""
    means: list[float] = []
    for end in range(1, len(values) + 1):
        part = values[max(0, end - window) : end]
        means.append(sum(part) / len(part))
    return means

"""A plot of one metric of several runs, as PNG, SVG or PDF. Imports matplotlib (the extra `plot`)."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from runner.config.identity import as_text
from runner.errors import UserError
from runner.report.compare import grouped, is_lower_better, ranked
from runner.report.runs import FINISHED, RunResults
from runner.report.series import Series
from runner.system.terminal import printable

# Okabe and Ito's colors, which people with any color vision tell apart; without their yellow, too pale on white.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
DASHES = ("-", "--", ":", "-.")
PALE = "#b5bcc4"
MOST_COLORED = 8
MARKED_CAUSES = ("finished",)  # ends of attempts that need no mark


def is_possible() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(runs: Sequence[RunResults], metric: str, by: Sequence[str] = (), suffix: str = "png") -> bytes:
    """The picture: a curve per run, or per group of runs a mean with a band of one standard deviation.

    The best runs have colors and the others are gray. Ends of attempts before the end of their run are marked below.

    Args:
        runs: one or more.
        metric: what to plot.
        by: settings to group by.
        suffix: of the file, which decides on its format.

    Raises:
        UserError: matplotlib is not installed, the format is unknown, or no run has the metric.
    """
    if not is_possible():
        raise UserError("a plot needs the package 'matplotlib', which is not installed: pip install matplotlib")
    from matplotlib.figure import Figure

    having = [run for run in runs if metric in run.series]
    if not having:
        raise UserError(f"no run has {metric}, so there is nothing to plot")
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    known = figure.canvas.get_supported_filetypes()
    if suffix not in known:
        raise UserError(f"unknown format .{suffix}: the name must end in one of .{', .'.join(sorted(known))}")
    axes = figure.subplots()
    if by:
        _draw_groups(axes, having, metric, by)
    else:
        _draw_runs(axes, having, metric)
    _mark_ends(axes, having)
    axes.set_xlabel("step")
    axes.set_ylabel(printable(metric))
    axes.grid(alpha=0.3)
    _, labels = axes.get_legend_handles_labels()
    if labels:
        axes.legend(fontsize=8, loc="upper right" if is_lower_better(runs, metric) else "lower right")
    picture = io.BytesIO()
    figure.savefig(picture, format=suffix, dpi=120)
    return picture.getvalue()


def _draw_runs(axes: Any, runs: Sequence[RunResults], metric: str) -> None:
    order = ranked(runs, metric)
    for place, run in reversed(list(enumerate(order))):
        series = run.series[metric]
        marker = "." if len(series) < 25 else None
        if place < MOST_COLORED:
            style = {"color": COLORS[place % len(COLORS)], "linestyle": DASHES[place // len(COLORS)]}
            # Where curves are equal, each is seen: the better ones are wider and lie below.
            width = 1.5 if len(order) > 2 else 4.0 - 2.8 * (len(order) - 1 - place)
            axes.plot(
                series.steps,
                series.values,
                marker=marker,
                linewidth=width,
                label=printable(run.name if run.state == FINISHED else f"{run.name} ({run.state})"),
                **style,
                alpha=1.0 if width < 2 else 0.4,
                zorder=3,
            )
        else:
            axes.plot(series.steps, series.values, color=PALE, linewidth=0.8, zorder=2)
    if len(order) > MOST_COLORED:
        axes.plot([], [], color=PALE, label=f"{len(order) - MOST_COLORED} others")


def _draw_groups(axes: Any, runs: Sequence[RunResults], metric: str, by: Sequence[str]) -> None:
    sound = [run for run in runs if run.state == FINISHED] or runs  # as in the table of groups
    for number, group in enumerate(grouped(sound, by)):
        color, dash = COLORS[number % len(COLORS)], DASHES[number // len(COLORS) % len(DASHES)]
        steps, mean, spread = band([run.series[metric] for run in group.runs])
        text = ", ".join(f"{key.rpartition('.')[2]}={as_text(value)}" for key, value in group.by.items())
        axes.plot(steps, mean, color=color, linestyle=dash, label=printable(f"{text} ({len(group.runs)})"))
        axes.fill_between(steps, mean - spread, mean + spread, color=color, alpha=0.2, linewidth=0)


def band(curves: Sequence[Series]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps, mean and sample standard deviation of several curves; arrays of one shape (N,).

    They end with the shortest: a mean over fewer curves from there on would compare different lengths.
    """
    longest = max(curves, key=lambda curve: int(curve.steps[-1]))
    end = min(int(curve.steps[-1]) for curve in curves)
    steps = np.union1d(longest.steps[longest.steps <= end], [end])
    values = np.stack([np.interp(steps, one.steps, one.values, left=np.nan, right=np.nan) for one in curves])
    count = np.isfinite(values).sum(axis=0)
    mean = np.nansum(values, axis=0) / np.maximum(count, 1)
    squares = np.nansum((values - mean) ** 2, axis=0)
    return steps, np.where(count > 0, mean, np.nan), np.sqrt(squares / np.maximum(count - 1, 1))


def _mark_ends(axes: Any, runs: Sequence[RunResults]) -> None:
    steps = [
        attempt["end_step"]
        for run in runs
        for attempt in run.attempts
        if attempt.get("cause") not in MARKED_CAUSES and isinstance(attempt.get("end_step"), int)
    ]
    if steps:
        from matplotlib.transforms import blended_transform_factory

        where = blended_transform_factory(axes.transData, axes.transAxes)
        label = "an attempt was killed or stopped"
        axes.plot(steps, [0.015] * len(steps), "x", color="#444", markersize=4, transform=where, label=label)

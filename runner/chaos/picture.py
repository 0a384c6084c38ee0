"""Plots the loss with and without faults, and where faults were injected. Needs matplotlib (the extra `plot`)."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Sequence
from typing import Any

from runner.chaos.plan import Outcome
from runner.metrics.tables import rows
from runner.rundir.paths import RunDir


def draw_png(reference: RunDir, killed: Sequence[RunDir], outcomes: Sequence[Outcome]) -> bytes | None:
    """The plots as PNG; None if matplotlib is not installed or there is nothing to plot.

    The reference is a broad pale line, each run under faults a thin dark one on top: where they are equal, the thin
    line is in the middle of the broad one. Above them, a row of markers for each kind of fault.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return None
    from matplotlib.figure import Figure

    losses = _losses(reference)
    if not losses[0]:
        return None
    figure = Figure(figsize=(10, 6), layout="constrained")
    marks, axes = figure.subplots(2, 1, sharex=True, height_ratios=(1, 3))
    axes.plot(*losses, color="C0", alpha=0.3, linewidth=6, solid_capstyle="round", label="without faults")
    for number, run in enumerate(killed):
        axes.plot(*_losses(run), color=f"C{number + 1}", linewidth=1, label=f"under faults ({run.path.name})")
    _mark(marks, axes, killed, outcomes)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    return picture.getvalue()


def _losses(run: RunDir) -> tuple[list[int], list[float]]:
    table = [row for row in rows(run) if "loss" in row]
    return [row["step"] for row in table], [row["loss"] for row in table]


def _mark(marks: Any, axes: Any, killed: Sequence[RunDir], outcomes: Sequence[Outcome]) -> None:
    """A marker for each fault, in the row of its kind; a dotted line at its step."""
    kinds = sorted({outcome.kind for outcome in outcomes}, reverse=True)
    colors = {run.path.name: f"C{number + 1}" for number, run in enumerate(killed)}
    for outcome in outcomes:
        color = colors.get(outcome.run, "C1")
        marker = "v" if outcome.answered else "X"
        marks.plot(outcome.step, kinds.index(outcome.kind), marker, color=color if outcome.answered else "red")
        axes.axvline(outcome.step, color=color, linestyle=":", linewidth=0.7)
    marks.set_yticks(range(len(kinds)), kinds, fontsize=8)
    marks.set_ylim(-0.6, max(len(kinds), 1) - 0.4)
    marks.grid(alpha=0.3, axis="y")
    marks.set_title("faults", fontsize=9, loc="left")

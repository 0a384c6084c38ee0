"""Summarize the model of a config: its modules, and the memory needed to train it."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from runner.cli.base.console import table
from runner.metrics.progress import size

if TYPE_CHECKING:
    from runner.config.schema import Config
    from runner.training.model.footprint import Footprint


def held_by(config: Config) -> tuple[Footprint | None, str]:
    """Measure the model without allocating its memory. If that is not possible, return None and the reason."""
    from runner.training.model.footprint import footprint

    try:
        return footprint(config), ""
    except Exception as error:  # noqa: BLE001 the model is the user's own code
        return None, shorten(str(error).partition(". ")[0], 120, placeholder=" …") or type(error).__name__


def listing(held: Footprint, config: Config, ranks: int) -> Iterator[Any]:
    """Yield a table of the modules, and a line with the memory and the number of samples per step."""
    from runner.training.model.footprint import planned_step

    made = table("module", "parameters", "trainable", "weights")
    for column in made.columns[1:]:
        column.justify = "right"
    for part in (*held.parts, held.total):
        made.add_row(part.name, f"{part.parameters:,}", f"{part.trainable:,}", size(part.weights))
    yield made
    yield f"model: {held}{planned_step(config, ranks)}"

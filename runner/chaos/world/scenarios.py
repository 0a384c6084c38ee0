"""The scenarios by name. Each is imported when it is used: some need torch, some the launchers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

from runner.chaos.world.schedule import Schedule
from runner.chaos.world.schedule import schedule as drawn
from runner.errors import UserError, nearest

if TYPE_CHECKING:
    from runner.chaos.world.scenario import Scenario

SCENARIOS = {
    "lease": ("leases", "Leases"),
    "training": ("training", "Training"),
    "jobs": ("jobs", "Jobs"),
    "custody": ("custodies", "Custodies"),
}
"""name: (module of this package, class)."""


def find(name: str) -> type[Scenario]:
    """The scenario of this name.

    Raises:
        UserError: there is none, or greenlet is not installed.
    """
    if name not in SCENARIOS:
        raise UserError(f"no such scenario: {name!r}{nearest(name, SCENARIOS)}; choose from {', '.join(SCENARIOS)}")
    module, kind = SCENARIOS[name]
    try:
        found: type[Scenario] = getattr(import_module(f"{__package__}.{module}"), kind)
    except ModuleNotFoundError as error:
        if error.name != "greenlet":
            raise
        raise UserError(
            "the simulation needs the package 'greenlet', which is not installed: "
            "pip install 'preemptible-runner[simulation]'"
        ) from error
    return found


def schedule(kind: type[Scenario], text: str, without: Sequence[int] = (), switching: float | None = None) -> Schedule:
    """The schedule of this name for a scenario, see `runner.chaos.world.schedule`.

    Raises:
        UserError: it is no such text, or it has no such strikes to leave out.
    """
    made = replace(drawn(text, tuple(kind.kinds), kind.horizon, without), switching=switching)
    for number in without:
        if not 0 <= number < len(made.strikes):
            strikes = f"0 to {len(made.strikes) - 1}" if made.strikes else "none"
            raise UserError(f"strike {number} of seed {text}: there is no such strike to leave out; it has {strikes}")
    return made

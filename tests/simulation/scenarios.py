"""List the scenarios by name. Each is imported on use, because some need torch and Hydra, which take seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from runner.errors import UserError, nearest
from simulation.scenario import Scenario
from simulation.schedule import Schedule
from simulation.schedule import schedule as drawn

SCENARIOS = {
    "lease": "processes of several machines that want to work on one run directory",
    "training": "one run that is trained, killed and resumed until it is finished",
    "jobs": "jobs of a Slurm cluster that are submitted, preempted, requeued and cancelled",
    "search": "slots of a search that decide, train and record",
    "custody": "commands that move, remove and pack runs while others work on them",
}
"""Name -> description of the scenario."""


def find(name: str) -> type[Scenario]:
    """Return the scenario of this name.

    Raises:
        UserError: there is none.
    """
    if name == "lease":
        from simulation.leases import Leases

        return Leases
    if name == "training":
        from simulation.training import Training

        return Training
    if name == "jobs":
        from simulation.jobs import Jobs

        return Jobs
    if name == "search":
        from simulation.searches import Searches

        return Searches
    if name == "custody":
        from simulation.custodies import Custodies

        return Custodies
    raise UserError(f"no such scenario: {name!r}{nearest(name, SCENARIOS)}; choose from {', '.join(SCENARIOS)}")


def schedule(kind: type[Scenario], text: str, without: Sequence[int] = (), switching: float | None = None) -> Schedule:
    """Return the schedule of this name for a scenario, see `simulation.schedule`.

    Raises:
        UserError: the text is malformed, or it does not have the strikes to leave out.
    """
    made = replace(drawn(text, tuple(kind.kinds), kind.horizon, without), switching=switching)
    for number in without:
        if not 0 <= number < len(made.strikes):
            strikes = f"0 to {len(made.strikes) - 1}" if made.strikes else "none"
            raise UserError(f"strike {number} of seed {text}: there is no such strike to leave out; it has {strikes}")
    return made

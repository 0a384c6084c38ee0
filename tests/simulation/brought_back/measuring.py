"""How long the simulation takes to find one fault, and the shortest story of it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import pytest

from simulation.brought_back import FAULTS
from simulation.scenario import Story, play
from simulation.scenarios import find, schedule
from simulation.search import search
from simulation.shrink import shrink
from simulation.story import arguments, lines

SCHEDULES = 3000


@dataclass(frozen=True)
class Measured:
    """What became of a fault.

    Attributes:
        found: whether a story broke a promise.
        schedules: how many were played until then.
        seconds: how long that took.
        lines: how many the shortest story has that are told, not counting single calls.
        text: that story.
    """

    found: bool
    schedules: int
    seconds: float
    lines: int = 0
    text: str = ""


def measure(name: str, seed: int = 0, schedules: int = SCHEDULES) -> Measured:
    """Bring the fault of this name back, search, and shrink what is found.

    Raises:
        RuntimeError: the shortest story breaks a promise without the fault as well.
    """
    fault = FAULTS[name]
    kind = find(fault.scenario)
    with pytest.MonkeyPatch.context() as patch:
        fault.apply(patch)
        patch.setattr("simulation.search.SHIFT", schedules)  # in this process: others do not have the fault
        found = search(fault.scenario, seed, schedules=schedules)
        if not found.failures:
            return Measured(False, found.schedules, found.seconds)
        (failure,) = found.failures.values()
        story = shrink(kind, play(kind, schedule(kind, failure.seed)))
    # In another process: modules that were imported meanwhile may have kept the fault.
    again = [sys.executable, "-m", "simulation", *arguments(fault.scenario, story.schedule).split()]
    done = subprocess.run(again, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"without {name} this fails, too: {' '.join(again)}\n{done.stdout}{done.stderr}")
    return Measured(True, found.schedules, found.seconds, told(story), "\n".join(lines(fault.scenario, story)))


def told(story: Story) -> int:
    """How many lines of a story are told, not counting single calls."""
    return sum(event.shown for event in story.events)

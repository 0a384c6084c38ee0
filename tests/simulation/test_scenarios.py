"""Check that every promise holds in every story, and that faults which this code could have break one."""

from __future__ import annotations

import re

import pytest
from new_seeds import new_seed

from simulation.brought_back import FAULTS, RARE
from simulation.playing import command
from simulation.scenarios import SCENARIOS

PROMISES = {
    "lease": (600, "{} simulated schedules of the lease: one writer, and nothing is lost"),
    "training": (120, "{} simulated schedules of attempts: the run ends bit for bit the same"),
    "jobs": (300, "{} simulated schedules of Slurm jobs: every run is finished, and once"),
    "search": (60, "{} simulated schedules of a search: no trial is lost, and every decision comes out again"),
    "custody": (300, "{} simulated schedules of mv, rm, archive, fork: no run is lost"),
}
"""Number of schedules played every time, and the promise that they show."""


@pytest.mark.parametrize(
    ("name", "schedules"),
    [
        pytest.param(name, count, marks=pytest.mark.promise(shown.format(count)), id=name)
        for name, (count, shown) in PROMISES.items()
    ],
)
def test_every_promise_holds_under_the_same_schedules(name: str, schedules: int) -> None:
    assert _holds(name, 0, "--schedules", str(schedules)) == schedules


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_promise_holds_under_new_schedules(name: str) -> None:
    """Play schedules from a new seed. pytest prints it at the top and in the message of a failure."""
    assert _holds(name, new_seed(), "--minutes", "0.5") > 0


def _holds(name: str, start: int, *limit: str) -> int:
    """Check that every promise holds, and return the number of schedules played."""
    options = ["--scenario", name, "--seed", str(start), "--workers", "1", *limit]
    done = command("simulation", *options)
    assert done.returncode == 0, f"{options}\n{done.stdout}\n{done.stderr}"
    (count,) = re.findall(r"^\w+: ([\d,]+) schedules in ", done.stdout, re.MULTILINE)
    return int(count.replace(",", ""))


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_seed_is_the_same_story_in_every_process(name: str) -> None:
    """Compare processes with different orders of sets, which could change a command."""
    words = ("simulation", "--scenario", name, "--seed", "17.3", "--calls")
    told = [command(*words, PYTHONHASHSEED=seed) for seed in ("1", "2")]
    assert [done.returncode for done in told] == [0, 0], told[0].stdout + told[0].stderr
    assert told[0].stdout == told[1].stdout
    assert told[0].stdout.endswith("every promise holds\n")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_fault_that_is_not_rare_is_found_again(scenario: str) -> None:
    """Use the schedule that found the fault before, or a search. Without the fault that story keeps all promises."""
    names = [fault.name for fault in FAULTS.values() if fault.scenario == scenario and fault.name not in RARE]
    done = command("simulation.brought_back", "--workers", "1", *names, timeout=3600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(rf" \| {scenario} \| .* \| [\d,]+ \| \d+ \|", done.stdout)) == len(names) > 3, done.stdout

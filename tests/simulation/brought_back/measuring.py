"""Measure how long the simulation takes to find a fault, and find the fault's shortest story."""

from __future__ import annotations

import json
import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

import pytest

from simulation.brought_back import FAULTS
from simulation.scenario import Story, play
from simulation.scenarios import find, schedule
from simulation.schedule import Schedule
from simulation.search import search
from simulation.shrink import shrink
from simulation.story import arguments, lines
from simulation.training import undisturbed

SCHEDULES = 3000
WARM_UP = 5
FOUND = Path(__file__).with_name("found.json")
"""The schedule that found each fault the last time. It may find none after changes of the code."""


@dataclass(frozen=True)
class Measured:
    """The result of the search for a fault.

    Attributes:
        schedules: number of schedules played until it was found, or in vain.
        seconds: time spent.
        seed: the schedule that broke a promise; None if there was none.
        lines: lines of the shortest story without single calls; None if the search was not asked for it.
        text: the shortest story.
    """

    schedules: int
    seconds: float
    seed: str | None = None
    lines: int | None = None
    text: str = ""


def known() -> dict[str, str]:
    """Return the schedules that found faults, by the faults' names."""
    found: dict[str, str] = json.loads(FOUND.read_text())
    return found


def record(found: dict[str, str]) -> None:
    """Record the schedules that found faults."""
    FOUND.write_text(json.dumps(dict(sorted((known() | found).items())), indent=1) + "\n")


def measure_all(
    names: Iterable[str],
    *,
    near: dict[str, str],
    seed: int = 0,
    schedules: int = SCHEDULES,
    workers: int = 1,
    shortest: bool = False,
) -> Iterator[tuple[str, Measured]]:
    """Bring faults back one at a time, and search for each.

    Args:
        names: names of the faults.
        near: schedules to play first, by fault; the search mutates them.
        seed: the first seed.
        schedules: maximum number to play.
        workers: number of faults to search at the same time.
        shortest: whether to shrink the stories found.

    Raises:
        RuntimeError: a story breaks a promise without the fault as well.
    """
    for scenario in dict.fromkeys(FAULTS[name].scenario for name in names):  # import all before a fault
        for number in range(WARM_UP):
            play(find(scenario), schedule(find(scenario), str(number)))

    def measured(name: str) -> Measured:
        # In another process, because this one checks whether the story breaks a promise without the fault as well.
        ((_, (found, told)),) = _in_children(
            lambda name: _measure(name, [near[name]] if name in near else [], seed, schedules, shortest), [name], 1
        )
        if told is not None:
            kind = find(FAULTS[name].scenario)
            again = play(kind, told)
            if again.broken is not None:
                raise RuntimeError(f"without {name}, too: {arguments(kind.name, told)}: {again.broken}")
        return cast(Measured, found)

    yield from _in_children(measured, list(names), workers)


def _measure(
    name: str, near: Sequence[str], seed: int, schedules: int, shortest: bool
) -> tuple[Measured, Schedule | None]:
    fault = FAULTS[name]
    kind = find(fault.scenario)
    with pytest.MonkeyPatch.context() as patch:
        fault.apply(patch)
        undisturbed.cache_clear()  # the result of an undisturbed run with this fault
        patch.setattr("simulation.search.SHIFT", schedules)  # stay in this process, which has the fault
        found = search(fault.scenario, seed, schedules=schedules, near=near)
        if not found.failures:
            return Measured(found.schedules, found.seconds), None
        (failure,) = found.failures.values()
        if not shortest:
            return Measured(found.schedules, found.seconds, failure.seed), schedule(kind, failure.seed)
        story = shrink(kind, play(kind, schedule(kind, failure.seed)))
    text = "\n".join(lines(fault.scenario, story))
    return Measured(found.schedules, found.seconds, failure.seed, told(story), text), story.schedule


def _in_children(function: Callable[[str], Any], names: Sequence[str], workers: int) -> Iterator[tuple[str, Any]]:
    """Call a function for each name in a separate fork of this process. Yield the results as they arrive."""
    context = multiprocessing.get_context("fork")
    waiting, running = deque(names), dict[Connection, tuple[str, Any]]()

    def call(pipe: Connection, name: str) -> None:
        pipe.send(function(name))

    while waiting or running:
        while waiting and len(running) < workers:
            name = waiting.popleft()
            pipe, far_end = context.Pipe(duplex=False)
            child = context.Process(target=call, args=(far_end, name))
            child.start()
            far_end.close()
            running[pipe] = name, child
        for pipe in cast(list[Connection], wait(list(running))):
            name, child = running.pop(pipe)
            try:
                result = pipe.recv()
            except EOFError:
                raise RuntimeError(f"the process that played {name} has died: its error is above") from None
            finally:
                child.join()
            yield name, result


def told(story: Story) -> int:
    """Return the number of lines shown of a story, without single calls."""
    return sum(event.shown for event in story.events)

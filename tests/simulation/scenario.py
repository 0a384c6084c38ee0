"""Define a scenario by its processes, possible strikes and promises, and play one story of it from a schedule."""

from __future__ import annotations

import errno
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, ClassVar

from simulation.disk import Disk
from simulation.doors import installed
from simulation.engine import BrokenPromiseError, Event, Host, Process, World
from simulation.schedule import Schedule

ERRORS = (errno.EIO, errno.ENOSPC, errno.ESTALE, errno.EDQUOT)
ERROR_CALLS = (
    frozenset({"create", "write", "append", "mkdir", "link", "truncate"}),
    frozenset({"fsync", "close"}),
    frozenset({"rename", "unlink", "rmdir"}),
    frozenset({"listdir", "open", "read", "stat", "utime"}),
)
FULL_S = (1.0, 30.0)
FROZEN_S = (0.5, 3.0, 20.0, 90.0, 400.0)
"""How long a process is frozen, in seconds: shorter and longer than other processes wait for it."""

COMMON = {
    "kill": "a process is killed",
    "freeze": "a process is frozen, and continues later",
    "error": "a call fails with EIO, ENOSPC, ESTALE or EDQUOT",
    "full": "the disk is full for a while",
    "power": "a machine loses power",
    "suspend": "a machine is suspended, and wakes up later",
}
"""Strikes that any process may get."""


class Scenario:
    """The base class of scenarios. Subclasses start processes in `begin` and check promises in `finish`.

    Args:
        world: the world of the story.
        schedule: the strikes of the story.
    """

    name: ClassVar[str] = ""
    kinds: ClassVar[Mapping[str, str]] = COMMON
    horizon: ClassVar[int] = 400
    """Approximate number of steps of a story without strikes."""
    network: ClassVar[bool | None] = None
    """Whether the files are on a network file system. None: in every other story."""
    host_names: ClassVar[tuple[str, ...]] = ("node1", "node2")

    def __init__(self, world: World, seed: str) -> None:
        self.world = world
        self.random = Random(f"scenario {seed}")
        network = self.random.random() < 0.5 if self.network is None else self.network
        self.disk = Disk(world, network)
        names = self.host_names if network else self.host_names[:1]
        self.hosts = [
            Host(name, self.random.uniform(-500.0, 500.0), self.random.uniform(-0.01, 0.01)) for name in names
        ]

    def run(self, *command: Any, **options: Any) -> Any:
        """Run a command such as scontrol (see `subprocess.run`)."""
        raise FileNotFoundError(errno.ENOENT, "there are no commands in this world")

    def around(self) -> AbstractContextManager[None]:
        """Return a context manager for the story. It restores the scenario's changes of the interpreter at the end."""
        return nullcontext()

    def begin(self) -> None:
        """Start the first processes of the story."""
        raise NotImplementedError

    def finish(self) -> None:
        """Check the promises once nothing is left to happen.

        Raises:
            BrokenPromiseError: a promise is broken.
        """
        raise NotImplementedError

    def spawn(self, host: Host, name: str, function: Callable[[], object], **environment: str) -> Process:
        """Start a process."""
        process = self.world.spawn(host, name, function, environment)
        process.on_end.append(self.disk.close_all)
        process.on_end.append(self.on_end)
        return process

    def on_end(self, process: Process) -> None:
        """Check the end of a process."""

    def choose(self, choice: float) -> Process | None:
        """Return the process that gets a strike."""
        alive = [process for process in self.world.processes if process.alive]
        return alive[int(choice * len(alive))] if alive else None

    def strike(self, kind: str, choice: float) -> None:
        """Let a strike happen."""
        process, world = self.choose(choice), self.world
        rest = Random(f"strike {choice}")
        if kind == "full":
            if not self.disk.full:
                self.disk.full = True
                world.tell("is full", "disk")
                world.at(rest.uniform(*FULL_S), self._free)
        elif process is None:
            return
        elif kind == "kill":
            world.kill(process)
        elif kind == "freeze":
            world.freeze(process)
            world.at(rest.choice(FROZEN_S) * rest.uniform(0.5, 1.5), partial(world.thaw, process))
        elif kind == "error":
            number = rest.choice(ERRORS)
            process.fails += [(rest.choice(ERROR_CALLS), number)] * rest.choice((1, 1, 1, 2, 5))
        elif kind == "suspend":
            world.suspend(process.host, rest.choice(FROZEN_S) * rest.uniform(0.5, 1.5))
        elif kind == "power":
            self.power_loss(process.host)
        else:
            raise AssertionError(f"no such strike: {kind}")

    def power_loss(self, host: Host) -> None:
        """Cut the power of a machine and start it again."""
        self.world.power_loss(host)
        self.disk.power_loss(host)

    def _free(self) -> None:
        self.disk.full = False
        self.world.tell("has room again", "disk")

    def must(self, holds: object, text: str) -> None:
        """Check a condition.

        Raises:
            BrokenPromiseError: it does not hold.
        """
        if not holds:
            error = BrokenPromiseError(text)
            self.world.broken = self.world.broken or error  # the real code may catch the error that is raised in it
            raise error


@dataclass(frozen=True)
class Story:
    """The result of a schedule.

    Attributes:
        schedule: the schedule of the story.
        broken: the broken promise, or None.
        events: the events of the story.
        features: the kinds of things that happened.
        steps: number of calls of the real code.
        seconds: real time that the story took.
    """

    schedule: Schedule
    broken: str | None
    events: list[Event]
    features: frozenset[Any]
    steps: int
    seconds: float


def play(kind: type[Scenario], schedule: Schedule) -> Story:
    """Play one story."""
    began = time.perf_counter()
    world = World(f"{kind.name} {schedule.seed}", schedule.switching)
    scenario = kind(world, schedule.seed)
    broken = None
    with installed(world, scenario.disk, scenario.run), scenario.around():
        try:
            for strike in schedule.carried_out:
                world.strike_at(strike.at, partial(scenario.strike, strike.kind, strike.choice))
            scenario.begin()
            world.run()
            scenario.finish()
            _check_end(world)
        except BrokenPromiseError as error:
            broken = str(error)
        except Exception:  # noqa: BLE001 the search has to name the schedule of any error
            broken = f"the simulation itself failed:\n{traceback.format_exc()}"
    return Story(schedule, broken, world.events, frozenset(world.features), world.steps, time.perf_counter() - began)


def _check_end(world: World) -> None:
    """Check that all processes have ended. Otherwise a live one waits for something that never comes."""
    waiting = [process.name for process in world.processes if process.alive]
    if waiting:
        raise BrokenPromiseError(f"the story does not end: these wait for ever: {', '.join(waiting)}")

"""Play many schedules of a scenario in search of a story that breaks a promise.

Seeds are played in order. The search remembers each story with an event of a new kind, and every other schedule is a
mutation of such a story: rare events are found close to rare events.

Memory does not grow with the number of stories: it holds numbers for the kinds of events, of which there are some
thousands, and a bounded list of schedule names.
"""

from __future__ import annotations

import gc
import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from random import Random
from typing import Any, cast

from runner.system import clock
from simulation.scenario import Scenario, Story, play
from simulation.scenarios import find, schedule
from simulation.shrink import promise

REMEMBERED = 500
"""Maximum number of schedules remembered for mutation."""
MUTATED = 0.5
"""The share of mutations among the schedules."""
DEPTH = 10
"""Maximum number of successive mutations."""
REPORT_S = 0.5
COLLECT = 50
"""Stories between garbage collections: a story's threads and closures refer to each other in circles."""
SHIFT = 2000
"""Stories until a new process takes over, because thousands of threads fragment the memory of a process."""
LEAVE_S = 5.0


@dataclass(frozen=True)
class Failure:
    """A story that broke a promise.

    Attributes:
        scenario: its name.
        seed: name of the schedule.
        broken: the broken promise.
    """

    scenario: str
    seed: str
    broken: str


@dataclass
class Found:
    """The findings of a search so far.

    Attributes:
        schedules: number of schedules played.
        seconds: time spent.
        features: number of kinds of events, see `Story.features`.
        broken: number of stories that broke a promise.
        failures: one such story for each promise, by the promise's first words.
    """

    schedules: int = 0
    seconds: float = 0.0
    features: int = 0
    broken: int = 0
    failures: dict[str, Failure] = field(default_factory=dict)

    @property
    def per_second(self) -> float:
        """Return schedules per second."""
        return self.schedules / self.seconds if self.seconds else 0.0


class Explorer:
    """Choose schedules and play them in this process. The same arguments play the same schedules.

    Args:
        kind: the scenario.
        start: the first seed.
        stride: difference between fresh seeds, so that several explorers share them.
        near: schedules to play first, and to mutate later.
    """

    def __init__(self, kind: type[Scenario], start: int, stride: int = 1, near: Sequence[str] = ()) -> None:
        self.kind = kind
        self._seed, self._stride = start, stride
        self._random = Random(f"search {kind.name} {start} {stride}")
        self._features: set[int] = set()
        self._near = deque(near)
        self._remembered: deque[str] = deque(maxlen=REMEMBERED)
        self.played = 0

    def play(self) -> tuple[Story, list[Any]]:
        """Play the next story. Return it and the kinds of events that are new."""
        self.played += 1
        text = self._choose()
        story = play(self.kind, schedule(self.kind, text))
        new = [feature for feature in story.features if hash(feature) not in self._features]
        if new:
            self._features.update(map(hash, new))
            if story.broken is None and text.count(".") < DEPTH:
                self._remembered.append(text)
        return story, new

    def _choose(self) -> str:
        if self._near:
            return self._near.popleft()
        if self._remembered and self._random.random() < MUTATED:
            return f"{self._random.choice(self._remembered)}.{self._random.randrange(1, 10**6)}"
        seed, self._seed = self._seed, self._seed + self._stride
        return str(seed)


def search(
    name: str,
    start: int,
    *,
    schedules: int | None = None,
    seconds: float | None = None,
    workers: int = 1,
    keep_going: bool = False,
    near: Sequence[str] = (),
    tell: Callable[[Found], object] = lambda found: None,
) -> Found:
    """Play schedules of a scenario until one breaks a promise.

    Args:
        name: name of the scenario.
        start: the first seed.
        schedules: maximum number to play.
        seconds: maximum time. One schedule is played in any case.
        workers: number of processes; 1: only this process.
        keep_going: do not stop at the first story that breaks a promise.
        near: schedules to play first, and to mutate later.
        tell: called at intervals with the findings so far.

    Raises:
        UserError: there is no such scenario.
        RuntimeError: one of the processes has died.
    """
    found, features = Found(), set[int]()
    quotas = [None if schedules is None else len(range(number, schedules, workers)) for number in range(workers)]
    explorers = [Explorer(find(name), start + number, workers, near) for number in range(workers)]
    began = clock.monotonic()
    deadline = None if seconds is None else began + seconds
    if workers == 1 and schedules is not None and schedules <= SHIFT:
        reports = _reports(explorers[0], schedules, deadline)
    else:
        reports = _from_workers(explorers, quotas, deadline)
    try:
        for report in reports:
            found.schedules += report.schedules
            found.broken += len(report.failures)
            for failure in report.failures:
                found.failures.setdefault(promise(failure.broken), failure)
            features.update(map(hash, report.features))
            found.features = len(features)
            found.seconds = clock.monotonic() - began
            tell(found)
            if found.broken and not keep_going:
                break
    finally:
        reports.close()
    return found


@dataclass
class _Report:
    """The work of an explorer since its last report."""

    schedules: int = 0
    features: list[Any] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


def _reports(explorer: Explorer, until: int | None, deadline: float | None) -> Generator[_Report]:
    told = clock.monotonic()
    report = _Report()
    while until is None or explorer.played < until:
        story, new = explorer.play()
        if explorer.played % COLLECT == 0:
            gc.collect()
            if not gc.get_freeze_count():
                gc.freeze()  # imported modules stay, so the collector need not look at them
        report.schedules += 1
        report.features += new
        if story.broken is not None:
            report.failures.append(Failure(explorer.kind.name, story.schedule.text, story.broken))
        if report.failures or clock.monotonic() - told >= REPORT_S:
            yield report
            report, told = _Report(), clock.monotonic()
        if deadline is not None and clock.monotonic() >= deadline:
            break
    yield report


def _work(pipe: Connection, explorer: Explorer, until: int, seconds: float | None) -> None:
    """Play and report in a worker process, then return the explorer to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends the workers
    try:
        for report in _reports(explorer, until, None if seconds is None else clock.monotonic() + seconds):
            pipe.send(report)
        pipe.send(explorer)
    except BrokenPipeError:  # the parent is gone
        pass


def _from_workers(explorers: list[Explorer], quotas: list[int | None], deadline: float | None) -> Generator[_Report]:
    context = multiprocessing.get_context("spawn")
    at_work: dict[Connection, tuple[multiprocessing.process.BaseProcess, int | None]] = {}

    def begin(explorer: Explorer, until: int | None) -> None:
        left = None if deadline is None else deadline - clock.monotonic()
        if (until is not None and explorer.played >= until) or (left is not None and left <= 0 < explorer.played):
            return
        shift = explorer.played + SHIFT
        pipe, far_end = context.Pipe(duplex=False)
        arguments = (far_end, explorer, shift if until is None else min(shift, until), left)
        worker = context.Process(target=_work, args=arguments, daemon=True)
        worker.start()
        far_end.close()
        at_work[pipe] = worker, until

    try:
        for explorer, until in zip(explorers, quotas, strict=True):
            begin(explorer, until)
        while at_work:
            for pipe in cast(list[Connection], wait(list(at_work))):
                worker, until = at_work[pipe]
                try:
                    message = pipe.recv()
                except EOFError:
                    raise RuntimeError(
                        f"a process that played schedules of {explorers[0].kind.name} has died"
                    ) from None
                if isinstance(message, Explorer):
                    del at_work[pipe]
                    worker.join(LEAVE_S)
                    begin(message, until)
                else:
                    yield message
    finally:
        for worker, _ in at_work.values():
            worker.terminate()
        for worker, _ in at_work.values():
            worker.join(LEAVE_S)

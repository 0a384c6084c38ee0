"""Simulated machines, processes and threads under one virtual clock. One seed decides which of them runs next.

A thread is a greenlet that runs the real code until that calls something of the system layer: each such call is one
step, takes a moment of virtual time, and may be where another thread continues. Nothing here happens at once or in
parallel, so the same seed gives the same story, to the last step.
"""

from __future__ import annotations

import heapq
import signal
import traceback
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

from greenlet import greenlet

from runner.system.signals import STOP, STOP_SIGNALS

FATAL = set(STOP_SIGNALS)
"""Signals that end a process that has no handler for them."""
MAX_STEPS = 60_000
"""After so many steps a story counts as one that does not end."""
NO_DIGITS = {ord(digit): None for digit in "0123456789"}
STEP_S = 0.002
"""The longest that a call takes, in seconds of virtual time, unless the world is slow."""


class Gone(BaseException):
    """Thrown into what a process was doing when it ended; its calls change nothing any more."""


class BrokenPromiseError(AssertionError):
    """Something that must hold in every story did not."""


class Event(NamedTuple):
    """One line of a story."""

    time: float
    who: str
    call: str
    detail: object
    shown: bool
    """Whether it belongs to the story that a person reads; the others are single calls."""

    @property
    def what(self) -> str:
        """What happened. Put together when somebody reads it: of most stories nobody reads the calls."""
        return self.call if self.shown else f"{self.call} {self.detail}"


@dataclass(eq=False)
class Host:
    """A machine with a clock of its own.

    Attributes:
        name: of the machine; clones share it.
        offset_s: how much its wall clock is ahead.
        drift: by how much its clocks run too fast (0.01: 1 %).
        boot: counts its starts.
        booted: when it was started last, in virtual seconds.
        cut_off: it cannot be reached from elsewhere, but runs.
        clone_of: the machine from whose image it was made: both have the same name, and number their processes alike.
    """

    name: str
    offset_s: float = 0.0
    drift: float = 0.0
    boot: int = 1
    booted: float = -1000.0
    cut_off: bool = False
    clone_of: str | None = None
    started: int = 0  # processes since its boot
    asleep: bool = False
    slept_s: float = 0.0  # since its boot: its clocks for intervals stand still meanwhile
    seen: dict[Any, Any] = field(default_factory=dict, repr=False)
    """What it remembers of a network file system: see `disk`."""

    @property
    def boot_id(self) -> str:
        """What tells this boot of this machine from others."""
        return f"boot-{self.clone_of or self.name}-{self.boot}{'-clone' if self.clone_of else ''}"


class Task:
    """A thread of a simulated process."""

    def __init__(self, process: Process, name: str, function: Callable[[], object]) -> None:
        self.process = process
        self.name = name
        self.ident = 1000 + len(process.tasks)  # as on other machines
        self.token = 0  # counts its waits, so that an outdated alarm is not taken for a new one
        self.timed_out = False
        self.over = False
        self.waiters: list[Task] = []
        self._function = function
        self.greenlet = greenlet(self._run, process.world.hub)

    def _run(self) -> None:
        process = self.process
        try:
            if not process.dead:
                self._function()
                if self is process.main:
                    process.status = 0
                    while process.at_exit:
                        process.at_exit.pop()()
        except Gone:
            pass
        except SystemExit as error:
            if self is process.main:
                code = error.code
                process.status = code if isinstance(code, int) else 0 if code is None else 1
        except BrokenPromiseError as error:
            process.world.broken = process.world.broken or error
        except Exception as error:  # noqa: BLE001 what the real code raised: the scenario judges it
            process.errors.append("".join(traceback.format_exception(error)))
            if self is process.main:
                process.status = 1
        finally:
            self.over = True
            process.world.task_ended(self)


class Process:
    """A simulated process: its threads, its environment, its open files."""

    def __init__(self, world: World, host: Host, name: str, environment: Mapping[str, str]) -> None:
        self.world = world
        self.host = host
        self.name = name
        self.role = name.partition(" ")[0]
        host.started += 1
        self.pid = 100 + host.started
        self.start_time = str(int((world.now - host.booted) * 100))
        self.environment = dict(environment)
        self.tasks: list[Task] = []
        self.main: Task | None = None
        self.dead = False
        self.just_thawed = False  # it was frozen in the call that it is in
        self.freezes = 0
        self.stopped = False
        self.status: int | None = None
        self.killed_by: str | None = None
        self.errors: list[str] = []
        self.output: list[str] = []
        self.handlers: dict[int, Any] = {}
        self.pending: deque[int] = deque()
        self.stop_flag: dict[str, Any] = {**STOP.__dict__, "signum": None, "_interrupts": 0, "_thread": None}
        self.listeners: tuple[Callable[[int], object], Callable[[int], object]] | None = None
        """Of the first stop signal, and of later ones."""
        self.listening: list[Task] = []
        self.umask = 0o022
        self.fails: deque[tuple[frozenset[str], int]] = deque()
        """Errors that the next calls of some kinds will raise: see `disk`."""
        self.held: list[Task] = []
        self.on_end: list[Callable[[Process], object]] = []
        self.at_exit: list[Callable[[], object]] = []

    def __repr__(self) -> str:
        return self.name

    @property
    def alive(self) -> bool:
        """Whether it has not ended; it may be stopped."""
        return not self.dead


class World:
    """Everything there is in one story.

    Args:
        seed: decides everything.
        switching: how likely another thread continues after a step.
    """

    def __init__(self, seed: str, switching: float | None = None) -> None:
        self.random = Random(f"world {seed}")
        self.hub = greenlet.getcurrent()
        self.now = 1_800_000_000.0  # the true time, in seconds since 1970
        self.steps = 0
        self.events: list[Event] = []
        self.current: Task | None = None
        self.processes: list[Process] = []
        self.broken: BrokenPromiseError | None = None
        self.features: set[Any] = set()
        """What has happened in this story, for the search to tell stories apart."""
        self.checks: list[Callable[[], None]] = []
        """Called now and then; raise BrokenPromiseError if something does not hold."""
        self.switched: Callable[[Task], object] = lambda task: None
        """Called with the thread that continues now: what the interpreter has only once can be exchanged there."""
        self._numbers = 0
        self._ready: list[Task] = []
        self._alarms: list[tuple[float, int, Task | None, Any]] = []
        self._strikes: deque[tuple[int, Callable[[], object]]] = deque()
        self._urgent: deque[Callable[[], object]] = deque()
        self._stop_flag = STOP.__dict__
        self._switching = self.random.choice((0.02, 0.1, 0.3, 0.6)) if switching is None else switching
        self._until_switch = 1
        self._last = ("", "")
        self._last_process: Process | None = None
        self.step_s = STEP_S
        self.max_steps = MAX_STEPS

    def number(self) -> int:
        """1, 2, 3 and so on."""
        self._numbers += 1
        return self._numbers

    # ---- what the real code does

    def step(self, what: str, detail: object = "") -> None:
        """One call of the real code: time passes, and another thread may continue; nothing if looked at from outside.

        Raises:
            Gone: the process has ended.
        """
        task = self.current
        if task is None:
            return
        process = task.process
        if process.dead:
            raise Gone
        process.just_thawed = False
        self.steps += 1
        self.now += self.random.random() * self.step_s
        self.events.append(Event(self.now, process.name, what, detail, False))
        if process is not self._last_process:
            self._last_process = process
            self.features.add((self._last, process.role, what))
        self._last = (process.role, what)
        self._until_switch -= 1
        if self._until_switch <= 0 or (self._strikes and self._strikes[0][0] <= self.steps):
            self._until_switch = self._draw_switch()
            self._ready.append(task)
            self._to_hub(task)
        if process.pending and task is process.main:
            self._handle_signals(process)

    def look(self) -> None:
        """A call that takes no time.

        Raises:
            Gone: the process has ended.
        """
        if self.current is not None and self.current.process.dead:
            raise Gone

    def leave(self) -> None:
        """The current thread goes no further: its process has ended.

        Raises:
            Gone: always.
        """
        raise Gone

    def _draw_switch(self) -> int:
        count = 1
        while count < 200 and self.random.random() > self._switching:
            count += 1
        return count

    def _to_hub(self, task: Task) -> None:
        self.hub.switch()
        if task.process.dead:
            raise Gone

    def sleep(self, seconds: float) -> None:
        """The current thread waits for a time of its machine's clock."""
        task = self.current
        if task is None:
            return
        self.look()
        self._alarm(task, max(seconds, 0.0))
        self._to_hub(task)
        self._handle_signals(task.process, task)

    def wait(self, waiters: list[Task], timeout: float | None) -> bool:
        """The current thread waits until `wake` is called with `waiters`; False if the time was up first."""
        task = self.current
        assert task is not None, "nobody waits outside of a story"
        self.look()
        task.token += 1
        task.timed_out = False
        waiters.append(task)
        if timeout is not None:
            self._alarm(task, max(timeout, 0.0), new_token=False)
        self._to_hub(task)
        if task in waiters:
            waiters.remove(task)
        self._handle_signals(task.process, task)
        return not task.timed_out

    def join(self, task: Task, timeout: float | None = None) -> None:
        """The current thread waits until another one has ended, or the time is up."""
        if not task.over:
            self.wait(task.waiters, timeout)

    def wake(self, waiters: list[Task]) -> None:
        """Let everybody continue who waits in `waiters`."""
        for task in waiters:
            task.token += 1
            self._make_ready(task)
        waiters.clear()

    def _alarm(self, task: Task, seconds: float, new_token: bool = True) -> None:
        if new_token:
            task.token += 1
        due = self.now + seconds / (1 + task.process.host.drift)
        heapq.heappush(self._alarms, (due, self.number(), task, task.token))

    def at(self, seconds: float, action: Callable[[], object]) -> None:
        """Call `action` from outside after a true time."""
        heapq.heappush(self._alarms, (self.now + seconds, self.number(), None, action))

    def strike_at(self, step: int, action: Callable[[], object]) -> None:
        """Call `action` from outside before a step."""
        insort(self._strikes, (step, action), key=lambda strike: strike[0])

    def thread(self, name: str, function: Callable[[], object], process: Process | None = None) -> Task:
        """Start a thread of the current process, or of another one."""
        owner = process or (self.current.process if self.current else None)
        assert owner is not None
        task = Task(owner, name, function)
        owner.tasks.append(task)
        self._make_ready(task)
        return task

    def _make_ready(self, task: Task) -> None:
        if task.process.dead or task.over:
            return
        (task.process.held if task.process.stopped else self._ready).append(task)

    def task_ended(self, task: Task) -> None:
        """A thread has ended; with the main one ends its process, unless that has ended already."""
        self.wake(task.waiters)
        process = task.process
        if task is process.main and not process.dead:
            if self.broken is None:
                self.tell(f"ends with status {process.status}", process.name)
            self._end(process)

    # ---- processes

    def spawn(
        self, host: Host, name: str, function: Callable[[], object], environment: Mapping[str, str] | None = None
    ) -> Process:
        """Start a process on a machine."""
        process = Process(self, host, name, environment or {})
        process.main = Task(process, "main", function)
        process.tasks.append(process.main)
        self.processes.append(process)
        self._make_ready(process.main)
        self.tell(f"begins on {host.name} (process {process.pid})", name)
        return process

    def kill(self, process: Process, why: str = "is killed") -> None:
        """End a process at once (SIGKILL)."""
        if process.dead:
            return
        process.killed_by = why
        process.status = -int(signal.SIGKILL)
        self.tell(why, process.name)
        self._end(process)

    def exit(self, process: Process, status: int) -> None:
        """The process ends itself at once (`_exit`)."""
        if not process.dead:
            process.status = status
            self.tell(f"exits with status {status}", process.name)
            self._end(process)

    def _end(self, process: Process) -> None:
        process.dead = True
        self._ready = [task for task in self._ready if task.process is not process]
        process.held.clear()
        self._urgent.append(lambda: self._unwind(process))
        if greenlet.getcurrent() is self.hub:
            self._do_urgent()

    def _unwind(self, process: Process) -> None:
        """Throw Gone into every thread of a process that has ended; only the hub may, to which they return."""
        for task in process.tasks:
            if not task.over and task.greenlet:
                self.current = task
                STOP.__dict__ = process.stop_flag
                self.switched(task)
                task.greenlet.throw(Gone)
        self.current = None
        process.tasks.clear()
        for action in process.on_end:
            action(process)

    def _do_urgent(self) -> None:
        before = self.current
        while self._urgent:
            self._urgent.popleft()()
        self.current = before

    def close(self) -> None:
        """End whatever still runs, when nobody wants to know how the story continues."""
        for process in self.processes:
            process.dead = True
            process.on_end.clear()
            self._unwind(process)
        self._urgent.clear()
        STOP.__dict__ = self._stop_flag

    def freeze(self, process: Process) -> None:
        """Freeze a process (SIGSTOP, a suspended job)."""
        if not process.dead and not process.stopped:
            process.stopped = True
            process.freezes += 1
            process.held += [task for task in self._ready if task.process is process]
            self._ready = [task for task in self._ready if task.process is not process]
            self.tell("is frozen", process.name)

    def thaw(self, process: Process) -> None:
        """Let a frozen process continue."""
        if not process.dead and process.stopped:
            process.stopped, process.just_thawed = False, True
            self._ready += process.held
            process.held.clear()
            self.tell("continues", process.name)

    def suspend(self, host: Host, seconds: float) -> None:
        """A machine sleeps for a while (a laptop is shut): its clocks for intervals stand still, its wall clock not."""
        if host.asleep:
            return
        host.asleep = True
        self.tell("is suspended", host.name)
        asleep = [each for each in self.processes if each.host is host and each.alive and not each.stopped]
        for process in asleep:
            self.freeze(process)
        boot = host.boot

        def wake() -> None:
            if host.boot == boot:
                host.asleep = False
                host.slept_s += seconds
                self.tell("wakes up", host.name)
                for process in asleep:
                    self.thaw(process)

        self.at(seconds, wake)

    def signal(self, process: Process, signum: int) -> None:
        """Send a signal to a process."""
        if process.dead:
            return
        self.tell(f"is sent {signal.Signals(signum).name}", process.name)
        if signum == signal.SIGKILL:
            self.kill(process)
        elif signum == signal.SIGSTOP:
            self.freeze(process)
        elif signum == signal.SIGCONT:
            self.thaw(process)
        elif signum not in process.handlers:
            if signum in FATAL:
                self.kill(process, f"is ended by {signal.Signals(signum).name}")
                process.status = -int(signum)
        elif process.handlers[signum] is not signal.SIG_IGN:
            process.pending.append(signum)
            if process.listeners is not None:
                self.listen(process, signum)

    def listen(self, process: Process, signum: int) -> None:
        """Call the listener of a signal, after those of the signals before it."""
        assert process.listeners is not None
        before = process.listening[-1:]
        listener = process.listeners[bool(before)]

        def call() -> None:
            for task in before:
                self.join(task)
            listener(signum)

        process.listening.append(self.thread("signals", call, process))

    def _handle_signals(self, process: Process, task: Task | None = None) -> None:
        if task is not None and task is not process.main:
            return
        while process.pending:
            signum = process.pending.popleft()
            handler = process.handlers.get(signum)
            if callable(handler):
                handler(signum, None)

    def power_loss(self, host: Host) -> list[Process]:
        """All processes of a machine end, and it starts anew."""
        self.tell("loses power", host.name)
        ended = [process for process in self.processes if process.host is host and process.alive]
        for process in ended:
            self.kill(process, "ends with its machine")
        host.boot += 1
        host.booted = self.now
        host.started, host.slept_s, host.asleep = 0, 0.0, False
        host.seen.clear()
        return ended

    # ---- the loop

    def run(self) -> None:
        """Let everything happen until nothing is left to happen.

        Raises:
            BrokenPromiseError: something did not hold, or the story does not end.
        """
        while self.broken is None:
            self._do_urgent()
            if self.steps > self.max_steps:
                alive = ", ".join(process.name for process in self.processes if process.alive)
                raise BrokenPromiseError(f"the story does not end: after {self.steps} steps these still run: {alive}")
            if self._strikes and self._strikes[0][0] <= self.steps:
                _, action = self._strikes.popleft()
                action()
                self._check()
            elif self._ready:
                index = int(self.random.random() * len(self._ready))
                task = self._ready.pop(index)
                self._resume(task)
            elif self._alarms:
                self._ring()
            elif self._strikes:
                _, action = self._strikes.popleft()
                action()
                self._check()
            else:
                return
            while self._alarms and self._alarms[0][0] <= self.now:
                self._ring()
        raise self.broken

    def _check(self) -> None:
        for check in self.checks:
            check()

    def _ring(self) -> None:
        due, _, task, what = heapq.heappop(self._alarms)
        self.now = max(self.now, due)
        if task is None:
            what()
            self._check()
        elif task.token == what and not task.over:
            task.timed_out = True
            task.token += 1
            self._make_ready(task)

    def _resume(self, task: Task) -> None:
        if task.process.dead or task.over:
            return
        self.current = task
        STOP.__dict__ = task.process.stop_flag
        self.switched(task)
        task.greenlet.switch()
        self.current = None
        self._do_urgent()

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Calls in the block are looks from outside: no steps, no errors."""
        before, self.current = self.current, None
        try:
            yield
        finally:
            self.current = before

    # ---- the story

    def tell(self, what: str, who: str = "") -> None:
        """Add a line to the story."""
        self.events.append(Event(self.now, who, what, "", True))
        self.features.add((who.partition(" ")[0], what[:40].translate(NO_DIGITS), self._last))

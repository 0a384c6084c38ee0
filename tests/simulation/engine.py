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
"""Signals that end a process without a handler for them."""
MAX_STEPS = 60_000
"""Number of steps after which a story counts as endless."""
NO_DIGITS = {ord(digit): None for digit in "0123456789"}
STEP_S = 0.002
"""Maximum duration of a call in seconds of virtual time, unless the world is slow."""


class Gone(BaseException):
    """Raised in the threads of an ended process, whose calls change nothing any more."""


class BrokenPromiseError(AssertionError):
    """Raised when a promise that holds in every story is broken."""


class Event(NamedTuple):
    """One line of a story."""

    time: float
    who: str
    call: str
    detail: object
    shown: bool
    """Whether it belongs to the story for a person. Other events are single calls."""

    @property
    def what(self) -> str:
        """Return the text of the event. It is formatted on access, because the calls of most stories are never read."""
        return self.call if self.shown else f"{self.call} {self.detail}"


@dataclass(eq=False)
class Host:
    """A machine with a clock of its own.

    Attributes:
        name: name of the machine, which clones share.
        offset_s: how much the wall clock is ahead, in seconds.
        drift: how much the clocks run too fast (0.01: 1 %).
        boot: number of starts.
        booted: time of the last start, in virtual seconds.
        cut_off: whether it runs but cannot be reached from elsewhere.
        clone_of: the machine whose image it has: both share a name and number their processes alike.
    """

    name: str
    offset_s: float = 0.0
    drift: float = 0.0
    boot: int = 1
    booted: float = -1000.0
    cut_off: bool = False
    clone_of: str | None = None
    started: int = 0  # processes since the boot
    asleep: bool = False
    slept_s: float = 0.0  # since the boot; the clocks for intervals do not count this time
    seen: dict[Any, Any] = field(default_factory=dict, repr=False)
    """Cached names of a network file system: see `disk`."""

    @property
    def boot_id(self) -> str:
        """Return the id of this boot of this machine."""
        return f"boot-{self.clone_of or self.name}-{self.boot}{'-clone' if self.clone_of else ''}"


class Task:
    """A thread of a simulated process."""

    def __init__(self, process: Process, name: str, function: Callable[[], object]) -> None:
        self.process = process
        self.name = name
        self.ident = 1000 + len(process.tasks)  # as on other machines
        self.token = 0  # counts waits, so that an outdated alarm is not taken for a new one
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
        except Exception as error:  # noqa: BLE001 the scenario judges what the real code raised
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
        self.just_thawed = False  # it was frozen in its current call
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
        """Callbacks for the first stop signal and for later ones."""
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
        """Return whether the process has not ended. It may be stopped."""
        return not self.dead


class World:
    """The state of one story: machines, processes, threads and the clock.

    Args:
        seed: determines the story.
        switching: probability that another thread continues after a step.
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
        """Kinds of things that have happened in this story, by which the search distinguishes stories."""
        self.checks: list[Callable[[], None]] = []
        """Functions called at intervals. They raise BrokenPromiseError if a promise is broken."""
        self.switched: Callable[[Task], object] = lambda task: None
        """Functions called with the thread that continues, to exchange state that the interpreter has only once."""
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
        """Return 1, 2, 3 and so on."""
        self._numbers += 1
        return self._numbers

    # ---- calls of the real code

    def step(self, what: str, detail: object = "") -> None:
        """Make one call of the real code. Time passes, and another thread may continue.

        Do nothing in looks from outside.

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
        """Make a call that takes no time.

        Raises:
            Gone: the process has ended.
        """
        if self.current is not None and self.current.process.dead:
            raise Gone

    def leave(self) -> None:
        """Leave the current thread, whose process has ended.

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
        """Let the current thread sleep for `seconds` of its machine's clock."""
        task = self.current
        if task is None:
            return
        self.look()
        self._alarm(task, max(seconds, 0.0))
        self._to_hub(task)
        self._handle_signals(task.process, task)

    def wait(self, waiters: list[Task], timeout: float | None) -> bool:
        """Let the current thread wait until `wake` is called with `waiters`. Return False after the timeout."""
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
        """Let the current thread wait until another one has ended, or until the timeout."""
        if not task.over:
            self.wait(task.waiters, timeout)

    def wake(self, waiters: list[Task]) -> None:
        """Wake all threads that wait in `waiters`."""
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
        """Call `action` from outside after `seconds` of true time."""
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
        """Note the end of a thread. The end of the main thread ends the process, unless it has ended already."""
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
        """End the current process at once (`_exit`)."""
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
        """Throw Gone into every thread of an ended process. Only the hub may do this, because they return to it."""
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
        """End all running processes, when the rest of the story is not needed."""
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
        """Suspend a machine for a while, like a closed laptop.

        Its clocks for intervals stand still, its wall clock does not.
        """
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
        """Call the listener of a signal, after the listeners of earlier signals."""
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
        """End all processes of a machine and start it again."""
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
        """Run until nothing is left to happen.

        Raises:
            BrokenPromiseError: a promise is broken, or the story does not end.
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
        """Make the calls in the block looks from outside: no steps, no errors."""
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

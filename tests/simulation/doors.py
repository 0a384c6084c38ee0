"""Replace the system layer by a world, and restore it when the world ends.

The primitives of `runner.system` are plain names of its modules, which are replaced. In place of the modules
`threading`, `queue` and `signal`, each module of the project finds one that knows the world.
"""

from __future__ import annotations

import builtins
import logging
import queue as real_queue
import signal as real_signal
import sys
import threading as real_threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from runner.system import clock, files, processes, signals
from simulation.disk import Disk
from simulation.engine import Process, Task, World

Run = Callable[..., Any]
"""A function that runs a command to its end, like `subprocess.run`."""


def replace(restored: ExitStack, owner: Any, **names: Any) -> None:
    """Set attributes of a module or class until `restored` is closed."""
    for name, value in names.items():
        restored.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)


@contextmanager
def installed(world: World, disk: Disk, run: Run | None = None) -> Iterator[None]:
    """Replace the system layer by `world` within the block.

    Args:
        world: the world to install.
        disk: the files of the world.
        run: runs commands such as scontrol. By default, no commands exist.
    """
    with ExitStack() as restored:
        put = partial(replace, restored)
        put(files, **{name: getattr(disk, name) for name in DISK})
        put(files, set_umask=_umask(world), resolve=lambda path: Path(disk.resolve(path)), this_thread=_thread(world))
        put(clock, **_clock(world))
        put(processes, **_this_process(world), **_processes(world, run))
        _replace_modules(restored, _stand_ins(world))
        put(signals.StopFlag, **_stop_flag(world))
        put(sys, stdout=_Output(world, sys.stdout), stderr=_Output(world, sys.stderr))
        logging.disable(logging.CRITICAL)
        restored.callback(logging.disable, logging.NOTSET)
        restored.callback(world.close)
        yield


DISK = """
    open_fd write_fd read_at write_at copy_range fsync_fd begin_writeback truncate_fd close_fd stat_fd as_file
    append_from_now_on make_dir rename unlink remove_dir list_dir scan walk remove_tree make_link make_symlink
    read_link_raw disk_usage stat lstat set_times has_access_list open_file
""".split()
"""Primitives of `runner.system.files` that a disk provides under the same names."""


PROJECT = ("runner.", "launch.", "simulation.")


def _replace_modules(restored: ExitStack, stand_ins: Mapping[ModuleType, Any]) -> None:
    """Replace some Python modules in the modules of the project until `restored` is closed.

    This includes modules imported later, because the runner imports some when it needs them.
    """
    by_name = {module.__name__: stand_in for module, stand_in in stand_ins.items()}
    for name, module in list(sys.modules.items()):
        if name.startswith(PROJECT) and name != __name__:
            found = vars(module)
            for each, stand_in in by_name.items():
                if each in found:
                    replace(restored, module, **{each: stand_in})
    load = builtins.__import__

    def importing(name: str, names: Any = None, *rest: Any, **more: Any) -> Any:
        loaded = load(name, names, *rest, **more)
        if name not in by_name or not str((names or {}).get("__name__")).startswith(PROJECT):
            return loaded
        restored.callback(names.__setitem__, name, loaded)
        return by_name[name]

    replace(restored, builtins, __import__=importing)


class _StandIn:
    """A Python module with some names replaced."""

    def __init__(self, module: ModuleType, names: dict[str, Any]) -> None:
        self.__dict__.update(vars(module) | names)


def _umask(world: World) -> Callable[[int], int]:
    def set_umask(mask: int) -> int:
        task = world.current
        if task is None:
            return 0o022
        before, task.process.umask = task.process.umask, mask
        return before

    return set_umask


def _thread(world: World) -> Callable[[], str]:
    def this_thread() -> str:
        task = world.current
        return f"{task.process.pid}-{task.ident}" if task else "1-0"

    return this_thread


def _clock(world: World) -> dict[str, Any]:
    def monotonic() -> float:
        task = world.current
        if task is None:
            return world.now
        world.look()
        host = task.process.host
        return (world.now - host.booted - host.slept_s) * (1 + host.drift)

    def wall() -> float:
        task = world.current
        if task is None:
            return world.now
        world.look()
        host = task.process.host
        return world.now + host.offset_s + (world.now - 1_800_000_000.0) * host.drift

    def call_later(seconds: float, function: Callable[[], None]) -> Task:
        due = world.now + seconds

        def wait() -> None:
            world.sleep(due - world.now)
            function()

        return world.thread("timer", wait)

    return {
        "monotonic": monotonic,
        "perf_counter": monotonic,
        "wall": wall,
        "sleep": world.sleep,
        "call_later": call_later,
    }


def _own(world: World) -> Process | None:
    return world.current.process if world.current is not None else None


def _this_process(world: World) -> dict[str, Any]:
    """Return the replacements for functions about the calling process and its machine."""

    def boot_id() -> str | None:
        here = _own(world)
        return here.host.boot_id if here else None

    def host_name() -> str:
        here = _own(world)
        return (here.host.clone_of or here.host.name) if here else "outside"

    def this_process() -> dict[str, Any]:
        here = _own(world)
        assert here is not None
        return {
            "host": host_name(),
            "pid": here.pid,
            "start_time": here.start_time,
            "boot_id": here.host.boot_id,
            "machine_id": host_name(),
            "pid_namespace": None,
        }

    def end_now(status: int) -> None:
        here = _own(world)
        assert here is not None
        world.exit(here, status)
        world.leave()

    def began() -> float:
        here = _own(world)
        if here is None:
            return 0.0
        return float(here.start_time) / 100 * (1 + here.host.drift)

    return {
        "environment": _Environment(world),
        "own_pid": lambda: here.pid if (here := _own(world)) else 1,
        "host_name": host_name,
        "boot_id": boot_id,
        "this_process": this_process,
        "end_now": end_now,
        "end_after": lambda seconds, status: None,
        "began": began,
        "uptime": lambda seconds: seconds,
        "at_exit": lambda function: here.at_exit.append(function) if (here := _own(world)) else None,
        "cores": lambda: 2,
        "peak_memory": lambda: 1 << 20,
    }


def _processes(world: World, run: Run | None) -> dict[str, Any]:
    """Return the replacements for functions about other processes of the same machine."""

    def find(pid: int) -> Process | None:
        here = _own(world)
        for process in world.processes:
            if process.pid == pid and process.alive and (here is None or process.host is here.host):
                return process
        return None

    def state_of(pid: int) -> tuple[str, str] | None:
        world.step("look at process", pid)
        process = find(pid)
        if process is None:
            return None
        return ("T" if process.stopped else "S"), process.start_time

    def send_signal(pid: int, signum: int) -> None:
        process = find(pid)
        if process is None:
            raise ProcessLookupError(3, "No such process")
        world.signal(process, signum)

    def no_command(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError(2, "there are no commands in this world")

    return {
        "state_of": state_of,
        "send_signal": send_signal,
        "find_command": lambda name: f"/usr/bin/{name}" if run is not None else None,
        "run": run or no_command,
        "run_shielded": run or no_command,
        "start": no_command,
    }


class _Environment(MutableMapping[str, str]):
    """The environment variables of the current process."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._outside: dict[str, str] = {}

    @property
    def _own(self) -> dict[str, str]:
        task = self._world.current
        return task.process.environment if task is not None else self._outside

    def __getitem__(self, name: str) -> str:
        return self._own[name]

    def __setitem__(self, name: str, value: str) -> None:
        self._own[name] = value

    def __delitem__(self, name: str) -> None:
        del self._own[name]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._own))

    def __len__(self) -> int:
        return len(self._own)


def _set_handler(world: World) -> Callable[[int, Any], Any]:
    def set_handler(signum: int, handler: Any) -> Any:
        assert world.current is not None
        handlers = world.current.process.handlers
        before = handlers.get(signum, real_signal.SIG_DFL)
        if handler == real_signal.SIG_DFL:
            handlers.pop(signum, None)
        else:
            handlers[signum] = handler
        return before

    return set_handler


def _stop_flag(world: World) -> dict[str, Any]:
    def install(self: Any) -> None:
        assert world.current is not None
        self._pid = processes.own_pid()
        for signum in signals.STOP_SIGNALS:
            world.current.process.handlers[signum] = self._on_signal

    def uninstall(self: Any) -> None:
        assert world.current is not None
        for signum in signals.STOP_SIGNALS:
            world.current.process.handlers.pop(signum, None)

    def on_signal(self: Any, signum: int, frame: object) -> None:
        if self.signum is None:
            self.signum = signum

    def listen(self: Any, first: Callable[[int], object], later: Callable[[int], object]) -> None:
        assert world.current is not None
        process = world.current.process
        process.listeners = first, later
        if self.signum is not None:
            world.listen(process, self.signum)

    def wait_for_listener(self: Any) -> None:
        assert world.current is not None
        for task in world.current.process.listening[:1]:
            world.join(task)

    return {
        "install": install,
        "uninstall": uninstall,
        "_on_signal": on_signal,
        "listen": listen,
        "wait_for_listener": wait_for_listener,
    }


class _Output:
    """A stream that writes the output of a simulated process to the log of that process."""

    def __init__(self, world: World, real: Any) -> None:
        self._world, self._real = world, real

    def write(self, text: str) -> int:
        task = self._world.current
        if task is None:
            return int(self._real.write(text))
        if text.strip():
            task.process.output.append(text.rstrip("\n"))
        return len(text)

    def flush(self) -> None:
        if self._world.current is None:
            self._real.flush()

    def isatty(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


# ---- threads


def _stand_ins(world: World) -> dict[ModuleType, Any]:
    """Return the replacements for Python modules."""

    class Thread(_Thread):
        _world = world

    threading: dict[str, Any] = {
        "Thread": Thread,
        "Event": lambda: _Event(world),
        "Lock": lambda: _Lock(world),
        "RLock": lambda: _RLock(world),
        "current_thread": lambda: getattr(world.current, "thread", None) or world.current,
        "get_ident": lambda: world.current.ident if world.current else 0,
    }
    queue: dict[str, Any] = {"SimpleQueue": partial(_Queue, world), "Queue": partial(_Queue, world)}
    changed = {real_threading: threading, real_queue: queue, real_signal: {"signal": _set_handler(world)}}
    return {module: _StandIn(module, names) for module, names in changed.items()}


class _Thread:
    """The used part of `threading.Thread`."""

    _world: World

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self.name = name or "thread"
        self.daemon = bool(daemon)
        self._target, self._args, self._kwargs = target, args, kwargs or {}
        self._task: Task | None = None

    def start(self) -> None:
        self._world.step("starts thread", self.name)
        self._task = self._world.thread(self.name, self.run)
        self._task.thread = self  # type: ignore[attr-defined]

    def run(self) -> None:
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.over

    @property
    def ident(self) -> int | None:
        return self._task.ident if self._task else None

    def join(self, timeout: float | None = None) -> None:
        if self._task is not None and self._world.current is not None:
            self._world.join(self._task, timeout)


class _Event:
    def __init__(self, world: World) -> None:
        self._world = world
        self._flag = False
        self._waiters: list[Task] = []

    def is_set(self) -> bool:
        return self._flag

    def set(self) -> None:
        self._flag = True
        self._world.wake(self._waiters)

    def clear(self) -> None:
        self._flag = False

    def wait(self, timeout: float | None = None) -> bool:
        world = self._world
        world.look()
        if self._flag or world.current is None:
            return self._flag
        if timeout is not None and timeout <= 0:
            world.step("looks up")
            return self._flag
        world.wait(self._waiters, timeout)
        return self._flag


class _Lock:
    def __init__(self, world: World) -> None:
        self._world = world
        self._holder: Task | None = None
        self._waiters: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        world = self._world
        if world.current is None:
            return True
        world.look()
        deadline = None if timeout < 0 else world.now + timeout
        while self._holder is not None:
            if not blocking:
                return False
            left = None if deadline is None else deadline - world.now
            if left is not None and left <= 0:
                return False
            world.wait(self._waiters, left)
        self._holder = world.current
        return True

    def release(self) -> None:
        self._holder = None
        self._world.wake(self._waiters)

    def locked(self) -> bool:
        return self._holder is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exception: object) -> None:
        self.release()


class _RLock(_Lock):
    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._world.current is not None and self._holder is self._world.current:
            self._depth += 1
            return True
        taken = super().acquire(blocking, timeout)
        self._depth += taken
        return taken

    def release(self) -> None:
        self._depth -= 1
        if self._depth <= 0:
            self._depth = 0
            super().release()


class _Queue:
    def __init__(self, world: World, maxsize: int = 0) -> None:
        self._world = world
        self._maxsize = maxsize
        self._items: deque[Any] = deque()
        self._getters: list[Task] = []
        self._putters: list[Task] = []

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        while self._maxsize and len(self._items) >= self._maxsize:
            if not block or not self._world.wait(self._putters, timeout):
                raise real_queue.Full
        self._items.append(item)
        self._world.wake(self._getters)

    def put_nowait(self, item: Any) -> None:
        self.put(item, False)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        while not self._items:
            if not block or not self._world.wait(self._getters, timeout):
                raise real_queue.Empty
        item = self._items.popleft()
        self._world.wake(self._putters)
        return item

    def get_nowait(self) -> Any:
        return self.get(False)

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)

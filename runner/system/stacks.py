"""Collect the stacks of the threads of this process and of its child processes.

Source lines are omitted, because reading them could block if a file system hangs.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import sysconfig
import threading
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import NamedTuple

from runner.system import clock, files, processes

SIGNAL = signal.SIGRTMIN + 9
"""The signal that asks a process that has called `show_to_parent` for its stacks."""
_MEMORY = "runner-stacks"
CHILDREN_S = 1.0
"""How long to wait for child processes; a child that is stuck inside the kernel does not answer."""
POLL_S = 0.02
_LIBRARIES = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib"))


class Frame(NamedTuple):
    """One call in progress."""

    module: str
    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"

    @property
    def is_library(self) -> bool:
        """Check whether the call is in Python's library or an installed package."""
        return self.file.startswith((*_LIBRARIES, "<frozen"))


def of_threads() -> dict[int, list[Frame]]:
    """Return the calls in progress in each thread of this process, keyed by thread ident, innermost first."""
    return {ident: _frames(frame) for ident, frame in _innermost().items()}


def running_modules() -> set[str]:
    """Return the names of the modules whose functions are running in any thread of this process."""
    found = set()
    for frame in _innermost().values():
        calls: FrameType | None = frame
        while calls is not None:
            found.add(str(calls.f_globals.get("__name__")))
            calls = calls.f_back
    return found


def _innermost() -> dict[int, FrameType]:
    """Get the innermost frame of each thread.

    Before Python 3.11.5 this holds a lock of the interpreter that a garbage collection may need, which is a deadlock:
    https://github.com/python/cpython/issues/106883.
    """
    if sys.version_info >= (3, 11, 5) or not gc.isenabled():
        return sys._current_frames()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        gc.enable()


def _frames(frame: FrameType | None) -> list[Frame]:
    found = []
    while frame is not None:
        code, module = frame.f_code, frame.f_globals.get("__name__")
        found.append(Frame(str(module), code.co_qualname, code.co_filename, frame.f_lineno or code.co_firstlineno))
        frame = frame.f_back
    return found


def text(first: int | None = None) -> str:
    """Return the stacks of all threads of this process, the innermost call last, and of its child processes.

    Args:
        first: ident of the thread to begin with.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    threads = sorted(of_threads().items(), key=lambda item: item[0] != first)
    parts = [f"Thread {names.get(ident, ident)}:\n{_lines(frames)}" for ident, frames in threads]
    return "\n".join([*parts, _children()])


def _lines(frames: Sequence[Frame]) -> str:
    return "".join(f'  File "{each.file}", line {each.line}, in {each.function}\n' for each in reversed(frames))


def _children() -> str:
    children = processes.descendants(processes.own_pid())
    if not children:
        return "No child processes.\n"
    shown = _stacks_of(children)
    return "\n".join(f"{processes.described(pid)}\n{shown.get(pid, '')}" for pid in children)


def show_to_parent() -> None:
    """Let the parent of this process read its stacks, even while this process is stuck in a call that never returns."""
    with suppress(OSError, AttributeError):  # without memory or support, the parent cannot see the stacks
        faulthandler.register(SIGNAL, file=os.memfd_create(_MEMORY), all_threads=True)


def _stacks_of(pids: Sequence[int]) -> dict[int, str]:
    """Return the stacks of the processes that expose them and answer in time."""
    places = {pid: place for pid in pids if (place := _memory_of(pid)) is not None}
    before = {pid: files.read_small(place) for pid, place in places.items()}
    for pid in places:
        with suppress(OSError):
            processes.send_signal(pid, SIGNAL)
    deadline = clock.monotonic() + CHILDREN_S
    last, shown = dict[int, str | None](), before
    # Wait until each process has written, and no more output arrives.
    while clock.monotonic() < deadline and (shown != last or any(shown[pid] == before[pid] for pid in places)):
        clock.sleep(POLL_S)
        last, shown = shown, {pid: files.read_small(place) for pid, place in places.items()}
    return {pid: stack for pid, stack in shown.items() if stack}


def _memory_of(pid: int) -> str | None:
    """Return the path of the file to which a process writes its stacks, or None if it does not."""
    folder = f"/proc/{pid}/fd"
    try:
        numbers = files.list_dir(folder)
    except OSError:  # the process has ended, or belongs to another user
        return None
    places = (f"{folder}/{number}" for number in numbers)
    return next((place for place in places if _MEMORY in (files.read_link(place) or "")), None)

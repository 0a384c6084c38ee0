"""Run commands, and start and inspect processes. See `signals` for signals to this process.

Call these functions through the module (`processes.run(...)`). This module imports no torch, hydra or numpy.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import resource
import shutil
import signal
import socket
import subprocess
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from runner.system import clock, files, signals

Process = subprocess.Popen
"""A started process, for type hints."""

start = subprocess.Popen
"""Start a process and return at once."""

PIPE, DEVNULL, TimeoutExpired = subprocess.PIPE, subprocess.DEVNULL, subprocess.TimeoutExpired

run = subprocess.run
"""Run a command to its end."""


def run_shielded(
    command: Sequence[str], *, given: str | None, timeout: float, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command to completion, with stop signals blocked in it.

    (A shell that ignores them by `trap ""` can still be killed before the trap.) The signals are blocked in this thread
    only while the command starts.

    Args:
        command: program and arguments.
        given: text for its standard input.
        timeout: seconds after which the command is killed.
        options: see `start`.

    Raises:
        TimeoutExpired: the command took longer.
        OSError: the command cannot be started.
    """
    with signals.blocked():
        process = start(command, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True, errors="replace", **options)
    with process:
        try:
            output, errors = process.communicate(given, timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


become = os.execve
"""(path, arguments, environment): replace the program of this process; unflushed buffers are lost."""

send_signal = os.kill
"""Send a signal to a process of this machine."""

environment = os.environ
"""The environment variables of this process: `processes.environment.get(...)`."""

own_pid = os.getpid
"""Return the id of this process."""

host_name = socket.gethostname
"""Return the name of this machine."""

user_id = os.getuid
"""Return the id of the user who started this process."""

effective_user_id = os.geteuid
"""Return the id of the user whose rights this process has."""

find_command = shutil.which
"""Return the path of a command on PATH; None if it is not there."""

_SIGEV_THREAD = 2
_PR_SET_PDEATHSIG = 1
_PARENT = "RUNNER_PARENT"


def state_of(pid: int) -> tuple[str, str] | None:
    """Return (state letter, start time) of a process of this machine, or None if there is none.

    The values are fields 3 and 22 of /proc/<pid>/stat (proc(5)). The process name in field 2 may contain anything, so
    fields are counted from its closing bracket.

    Raises:
        OSError: this cannot be read now, for example because too many files are open.
    """
    stat = files.read_if_there(f"/proc/{pid}/stat")
    if stat is None:
        return None
    fields = stat.rpartition(")")[2].split()
    return fields[0], fields[19]


def _shown_state(pid: int) -> tuple[str, str] | None:
    """Return `state_of` for display only, or None if it cannot be read."""
    with suppress(OSError):
        return state_of(pid)
    return None


def is_over(state: tuple[str, str] | None, start_time: object) -> bool:
    """Check whether a process that began at `start_time` has ended, given the `state_of` its id."""
    return state is None or state[1] != start_time or state[0] in "ZXx"


def parent_of(pid: int) -> int | None:
    """Return the parent of a process on this machine, or None: proc(5), field 4 of stat."""
    stat = files.read_small(f"/proc/{pid}/stat")
    return None if stat is None else int(stat.rpartition(")")[2].split()[1])


def children_of(pid: int) -> list[int]:
    """Return the pids of a process's children that it has not waited for yet, in ascending order.

    A process that begins or ends during the call may be missing.
    """
    return sorted(int(name) for name in files.list_dir("/proc") if name.isdigit() and parent_of(int(name)) == pid)


def began() -> float:
    """Return when this process began, on `clock.monotonic`, or the current time if unknown."""
    state = _shown_state(own_pid())
    # Counted in ticks since the machine was started: proc(5), field 22.
    return clock.monotonic() if state is None else uptime(int(state[1]) / os.sysconf("SC_CLK_TCK"))


def uptime(seconds: float) -> float:
    """Convert `seconds` of this machine's uptime to a time on `clock.monotonic`, which stops during suspension."""
    return clock.monotonic() - max(time.clock_gettime(time.CLOCK_BOOTTIME) - seconds, 0.0)


def boot_id() -> str | None:
    """Return the id of this machine's current boot."""
    return files.read_small("/proc/sys/kernel/random/boot_id")


def this_process() -> dict[str, Any]:
    """Return the entries that identify this process among all processes of all machines.

    Raises:
        OSError: see `state_of`. Without a start time, other processes would assume that this process has ended.
    """
    state = state_of(own_pid())
    return {
        "host": host_name(),
        "pid": own_pid(),
        "start_time": state[1] if state else None,
        "boot_id": boot_id(),
        "machine_id": files.read_small("/etc/machine-id"),
        "pid_namespace": files.read_link("/proc/self/ns/pid"),
    }


TAG = r"\d+-[0-9a-f]{8}"
"""A regular expression for the results of `tag`."""


def tag() -> str:
    """Return `PID-8 digits`, a name that is unique across machines. PIDs alone are reused."""
    return f"{own_pid()}-{zlib.crc32(repr(sorted(this_process().items())).encode()):08x}"


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def bound(variables: Mapping[str, str]) -> dict[str, str]:
    """Return `variables` for a process that must end when this thread ends for any reason, see `end_with_parent`."""
    return {**variables, _PARENT: str(own_pid())}


def end_with_parent() -> bool:
    """Let the kernel kill this process when its parent ends, if the parent requested that with `bound`.

    Returns:
        whether the parent asked for it.
    """
    parent = environment.pop(_PARENT, None)
    if parent is None:
        return False
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    with suppress(OSError):  # if unreadable, assume that it lives: it has just started this process
        state = state_of(int(parent))
        if state is None or state[0] in "ZX":  # the parent ended before the call
            end_now(1)
    return True


def descendants(pid: int) -> list[int]:
    """Return the child processes of a process of this machine, their children and so on."""
    children = children_of(pid)
    return [*children, *(below for child in children for below in descendants(child))]


def described(pid: int) -> str:
    """Describe a process of this machine: its state, where it waits inside the kernel, and its command."""
    state, wait = _shown_state(pid), files.read_small(f"/proc/{pid}/wchan")
    command = (files.read_small(f"/proc/{pid}/cmdline") or "").replace("\0", " ").strip()
    where = f", waits in {wait}" if wait and wait != "0" else ""
    return f"Process {pid} (state {state[0] if state else '?'}{where}): {command}"


def peak_memory() -> int:
    """Return the peak resident memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


at_exit = atexit.register
"""Call a function when this process exits normally."""

end_now = os._exit
"""End this process at once with a status, without Python's handlers, destructors and buffers."""


class _Notification(ctypes.Structure):
    """`struct sigevent` for SIGEV_THREAD: call `function(value)` in a thread (sigevent(7))."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("padding", ctypes.c_char * 64),
    )


class _TimerSpec(ctypes.Structure):
    """`struct itimerspec`: interval and first expiry, each in seconds and nanoseconds."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("every_s", "every_ns", "after_s", "after_ns"))


def end_after(seconds: int, status: int) -> None:
    """End this process with `status` if it still runs after `seconds`, even if its threads are blocked.

    The thread that ends it belongs to the C library and needs no Python: a destructor that waits while it holds the
    interpreter's lock would stop all Python threads forever.

    Raises:
        OSError: the system has no timer left.
    """
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "timer_create"):  # glibc before 2.34
        library = ctypes.CDLL("librt.so.1", use_errno=True)
    leave = ctypes.cast(library._exit, ctypes.c_void_p)
    notification = _Notification(value=status, notify=_SIGEV_THREAD, function=leave.value)
    timer = ctypes.c_void_p()
    when = _TimerSpec(after_s=seconds)
    failed = library.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(notification), ctypes.byref(timer))
    if failed or library.timer_settime(timer, 0, ctypes.byref(when), None):
        raise OSError(ctypes.get_errno(), "cannot create a timer")

"""All access to other processes: run a command, start a process, look one up. Signals to this process: `signals`.

Call these through the module (`processes.run(...)`). Nothing here imports torch, hydra or numpy.
"""

from __future__ import annotations

import os
import socket
import subprocess
from typing import Any

from runner.system import files

Process = subprocess.Popen
"""A process that was started, for type hints."""

start = subprocess.Popen
"""Start a process and return at once."""

run = subprocess.run
"""Run a command to its end."""

send_signal = os.kill
"""Send a signal to a process of this machine."""

PIPE, DEVNULL, TimeoutExpired = subprocess.PIPE, subprocess.DEVNULL, subprocess.TimeoutExpired


def state_of(pid: int) -> tuple[str, str] | None:
    """(state letter, start time) of a process of this machine, or None if there is none.

    From /proc/<pid>/stat, fields 3 and 22 (proc(5)). The process name in field 2 may contain anything, so fields are
    counted from its closing bracket.
    """
    stat = files.read_small(f"/proc/{pid}/stat")
    if stat is None:
        return None
    fields = stat.rpartition(")")[2].split()
    return fields[0], fields[19]


def this_process() -> dict[str, Any]:
    """What identifies this process among all processes of all machines."""
    state = state_of(os.getpid())
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "start_time": state[1] if state else None,
        "boot_id": files.read_small("/proc/sys/kernel/random/boot_id"),
        "machine_id": files.read_small("/etc/machine-id"),
        "pid_namespace": files.read_link("/proc/self/ns/pid"),
    }

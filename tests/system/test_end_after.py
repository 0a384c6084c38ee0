"""A process exits with its status, even while a destructor holds the interpreter's lock."""

from __future__ import annotations

import subprocess
import sys

STUCK = """
import ctypes
from runner.system import processes
processes.end_after(1, 75)
ctypes.PyDLL(None).pause()  # keeps the interpreter's lock
"""


def test_process_with_the_interpreter_lock_ends_with_its_status() -> None:
    assert subprocess.run([sys.executable, "-c", STUCK], timeout=300, check=False).returncode == 75


def test_a_process_that_ends_in_time_is_left_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from runner.system import processes; processes.end_after(1000, 75)"],
        timeout=300,
        check=False,
    )
    assert done.returncode == 0

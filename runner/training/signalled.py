"""Recognize failures of a child process, such as a compiler, that also received the stop signal.

A scheduler, a terminal and `kill -- -PGID` signal every process in a group. This process completes its step, but a
`g++` started by torch.compile ends, and the compilation fails. This must not be reported as a crash.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor

from exactdata.interrupts import StoppedError
from runner.errors import UserError
from runner.system.signals import STOP

COMPILERS = ("torch._inductor", "torch._dynamo", "triton")
"""Packages that raise compilation errors. The messages vary if a child process was ended by a signal."""
STOPS = (subprocess.CalledProcessError, BrokenExecutor, StoppedError)


def is_stop(error: BaseException) -> bool:
    """Check whether a child process, such as a compiler, caused `error` after a signal asked this process to stop."""
    return bool(STOP) and not isinstance(error, UserError) and any(map(_is_of_child, _chain(error)))


def line(error: BaseException) -> str:
    """Describe an `error` for which `is_stop` is true, in one line."""
    found = next(filter(_is_of_child, _chain(error)))
    if isinstance(found, StoppedError):
        return f"{STOP.name}: {found}"
    return (
        f"{STOP.name} also ended a process that this one was waiting for (a compiler, say), and what it was "
        f"computing could not be completed ({type(found).__name__})"
    )


def _is_of_child(error: BaseException) -> bool:
    return isinstance(error, STOPS) or type(error).__module__.startswith(COMPILERS)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, then the error that caused it or was being handled when it was raised, and so on."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__

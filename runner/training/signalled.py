"""A failure that the stop itself has brought about: the signal reached a child process of this one, such as a compiler.

A scheduler, a terminal and `kill -- -PGID` signal every process of a group. This one completes its step; a `g++` that
torch.compile has started is ended, and the compilation fails. That is no crash.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor

from exactdata.interrupts import StoppedError
from runner.errors import UserError
from runner.system.signals import STOP

COMPILERS = ("torch._inductor", "torch._dynamo", "triton")
"""Packages whose errors are those of a compilation: with what message a child's end comes up differs."""
STOPS = (subprocess.CalledProcessError, BrokenExecutor, StoppedError)


def is_stop(error: BaseException) -> bool:
    """Whether `error` arose from compilers or other child processes while this process was asked to stop."""
    return bool(STOP) and not isinstance(error, UserError) and any(map(_is_of_child, _chain(error)))


def line(error: BaseException) -> str:
    """What to tell about an `error` that `is_stop`."""
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
    """An error and those that it was raised from, or while they were handled."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__

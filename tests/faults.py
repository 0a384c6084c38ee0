"""Counts the changes a process makes to a file system, and breaks the one of your choice.

Every change that the runner's commit code makes goes through a function of `os`; these are replaced for
a while. Reads are not counted.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

CALLS = ("open", "write", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir")


@dataclass
class Trace:
    """The changes so far: (call, path or descriptor's path, new path)."""

    calls: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.calls)


Break = Callable[[int, str, Callable[[], Any], tuple[Any, ...]], Any]
"""(number of the call from 0, its name, the real call, its arguments) -> its result."""


@contextmanager
def intercepted(act: Break | None = None) -> Iterator[Trace]:
    """Send every change to the file system through `act`."""
    trace, originals = Trace(), {name: getattr(os, name) for name in CALLS}

    def wrap(name: str) -> Callable[..., Any]:
        real = originals[name]

        def call(*args: Any, **options: Any) -> Any:
            if name == "open" and not (args[1] if len(args) > 1 else options.get("flags", 0)) & os.O_CREAT:
                return real(*args, **options)
            number = trace.count
            new = str(args[1]) if name in ("rename", "replace") else ""
            trace.calls.append((name, path_of(args[0]), new))
            if act is None:
                return real(*args, **options)
            return act(number, name, lambda: real(*args, **options), args)

        return call

    try:
        for name in CALLS:
            setattr(os, name, wrap(name))
        yield trace
    finally:
        for name, real in originals.items():
            setattr(os, name, real)


def path_of(target: Any) -> str:
    """A path, whether it is given as one or as an open descriptor."""
    return os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else str(target)


def failing(at: int, code: int) -> Break:
    """Call number `at` fails with this errno; a write writes half before it does."""

    def act(number: int, name: str, call: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        if number != at:
            return call()
        if name == "write" and len(args[1]) > 1:
            _half(args)
        raise OSError(code, os.strerror(code), path_of(args[0]))

    return act


def signalled(at: int, number_of_signal: int, when: str) -> Break:
    """The process gets a signal `before` or `after` call number `at`, or in the `middle` of a write."""

    def act(number: int, name: str, call: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        if number != at:
            return call()
        if when == "middle" and name == "write":
            _half(args)
        if when != "after":
            os.kill(os.getpid(), number_of_signal)
            return call()
        try:
            return call()
        finally:
            os.kill(os.getpid(), number_of_signal)

    return act


def killed(at: int, when: str) -> Break:
    """SIGKILL at call number `at`."""
    return signalled(at, signal.SIGKILL, when)


def _half(args: tuple[Any, ...]) -> None:
    """What a torn write leaves: the first half, written past the replaced os.write."""
    with open(f"/proc/self/fd/{args[0]}", "ab", buffering=0) as file:
        file.write(bytes(args[1][: len(args[1]) // 2]))

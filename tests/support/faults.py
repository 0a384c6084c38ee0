"""Counts the changes a process makes to a file system, and breaks a chosen one.

Every change that the commit code makes goes through a function of `os`, most of them under the names of
`runner.system.files`; both are replaced for a while. Reads are not counted.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from runner.system import files

CALLS = ("open", "write", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir")


@dataclass
class Trace:
    """The changes so far: (call, path or descriptor's path, new path)."""

    calls: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.calls)


Break = Callable[[int, str, Callable[[], Any], tuple[Any, ...]], Any]
"""(index of the call, its name, the real call, its arguments) -> its result."""


@contextmanager
def intercepted(act: Break | None = None) -> Iterator[Trace]:
    """Send every change to the file system through `act`."""
    trace = Trace()

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if name == "open" and not (args[1] if len(args) > 1 else options.get("flags", 0)) & os.O_CREAT:
                return real(*args, **options)
            index = trace.count
            new = str(args[1]) if name in ("rename", "replace") else ""
            trace.calls.append((name, path_of(args[0]), new))
            if act is None:
                return real(*args, **options)
            return act(index, name, lambda: real(*args, **options), args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            real = getattr(os, name)
            replacement = wrap(name, real)
            patch.setattr(os, name, replacement)
            for alias in [alias for alias, function in vars(files).items() if function is real]:
                patch.setattr(files, alias, replacement)
        yield trace


def path_of(target: Any) -> str:
    """A path, passed as one or as an open descriptor."""
    return os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else str(target)


def failing(at: int, code: int) -> Break:
    """Call number `at` fails with this errno; a write fails after writing half."""

    def act(index: int, name: str, call: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        if index != at:
            return call()
        if name == "write" and len(args[1]) > 1:
            _write_half(args)
        raise OSError(code, os.strerror(code), path_of(args[0]))

    return act


def signaled(at: int, signum: int, when: str) -> Break:
    """The process gets a signal `before` or `after` call number `at`, or in the `middle` of a write."""

    def act(index: int, name: str, call: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        if index != at:
            return call()
        if when == "middle" and name == "write":
            _write_half(args)
        if when != "after":
            os.kill(os.getpid(), signum)
            return call()
        try:
            return call()
        finally:
            os.kill(os.getpid(), signum)

    return act


def killed(at: int, when: str) -> Break:
    """SIGKILL at call number `at`."""
    return signaled(at, signal.SIGKILL, when)


def _write_half(args: tuple[Any, ...]) -> None:
    """Leave what an interrupted write leaves: the first half, written without the replaced os.write."""
    with open(f"/proc/self/fd/{args[0]}", "ab", buffering=0) as file:
        file.write(bytes(args[1][: len(args[1]) // 2]))

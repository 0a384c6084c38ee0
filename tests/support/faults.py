"""Count the changes that a process makes to a file system, and break a chosen change.

Every change that the commit code makes goes through a function of `os`, most of them under the names of
`runner.system.files`; both are replaced for a while. Reads are not counted.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from runner.system import files

CALLS = ("open", "write", "copy_file_range", "ftruncate", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir")


@dataclass
class Trace:
    """The recorded changes: (call, path or descriptor's path, new path)."""

    calls: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.calls)


@dataclass
class ReadTrace:
    """The recorded reads of files: (call, path)."""

    calls: list[tuple[str, str]] = field(default_factory=list)

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
            trace.calls.append((name, path_of(args[0], options.get("dir_fd")), new))
            if act is None:
                return real(*args, **options)
            return act(index, name, lambda: real(*args, **options), args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            real = getattr(os, name)
            replacement = wrap(name, real)
            if name in ("unlink", "rmdir"):  # shutil.rmtree calls the functions of `os`
                patch.setattr(os, name, replacement)
            for alias in [alias for alias, function in vars(files).items() if function is real]:
                patch.setattr(files, alias, replacement)
        yield trace


def path_of(target: Any, dir_fd: int | None = None) -> str:
    """Return the path of an argument: a path, an open descriptor, or a name relative to a directory's descriptor."""
    if isinstance(target, int):
        return os.readlink(f"/proc/self/fd/{target}")
    return str(target) if dir_fd is None else os.path.join(path_of(dir_fd), target)


def failing(at: int, code: int) -> Break:
    """Fail call number `at` with this errno. A write fails after writing half."""
    return failing_from(at, code, at + 1)


def failing_from(start: int, code: int, stop: int = sys.maxsize) -> Break:
    """Fail all calls from number `start` to `stop` with this errno. A write fails after writing half."""

    def act(index: int, name: str, call: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        if not start <= index < stop:
            return call()
        if name == "write" and len(args[1]) > 1:
            _write_half(args)
        raise OSError(code, os.strerror(code), path_of(args[0]))

    return act


def killed(at: int) -> Break:
    """Send SIGKILL before call number `at`."""
    return interrupted(at, lambda: os.kill(os.getpid(), signal.SIGKILL))


def interrupted(at: int, action: Callable[[], object]) -> Break:
    """Call `action` before call number `at`, with the real file system."""
    busy = False

    def act(index: int, name: str, call: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        nonlocal busy
        if not busy and index == at:
            busy = True
            action()
            busy = False
        return call()

    return act


def _write_half(args: tuple[Any, ...]) -> None:
    """Write the first half of the data, without the replaced os.write, as an interrupted write does."""
    with open(f"/proc/self/fd/{args[0]}", "ab", buffering=0) as file:
        file.write(bytes(args[1][: len(args[1]) // 2]))


@contextmanager
def reads_intercepted(
    errors: dict[int, int] | None = None,
    *,
    stays: tuple[int, str] | None = None,
    after: dict[str, Callable[[], object]] | None = None,
) -> Iterator[ReadTrace]:
    """Count every read of checkpoint files, and break some.

    Args:
        errors: number of the call -> the errno of its failure.
        stays: (errno, part of a path): every read of such a path fails.
        after: path -> action, called once, after the file was first opened and closed.
    """
    trace = ReadTrace()
    pending = dict(after or {})

    def note(call: str, path: str) -> None:
        number = trace.count
        trace.calls.append((call, path))
        code = (errors or {}).get(number, 0)
        if stays is not None and stays[1] in path:
            code = stays[0]
        if code:
            raise OSError(code, os.strerror(code), path)

    class Reading(io.FileIO):
        def __init__(self, path: str, real: BinaryIO) -> None:
            super().__init__(os.dup(real.fileno()), "rb")
            real.close()
            self.path = path

        def readinto(self, buffer: Any) -> int:
            note("read", self.path)
            return super().readinto(buffer) or 0

        def readall(self) -> bytes:
            note("read", self.path)
            return super().readall()

        def close(self) -> None:
            super().close()
            pending.pop(self.path, lambda: None)()

    real_open, real_list, real_lstat = files.open_regular, files.list_dir, files.lstat

    def open_regular(path: str | Path, *, follow: bool = False) -> BinaryIO:
        note("open", str(path))
        return io.BufferedReader(Reading(str(path), real_open(path, follow=follow)))

    def list_dir(path: Any) -> list[str]:
        note("list", str(path))
        return real_list(path)

    def lstat(path: Any) -> os.stat_result:
        note("stat", str(path))
        return real_lstat(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "open_regular", open_regular)
        patch.setattr(files, "list_dir", list_dir)
        patch.setattr(files, "lstat", lstat)
        yield trace

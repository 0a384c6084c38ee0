"""Let one of several processes do a piece of work while the rest wait, on any shared file system.

A claim is a file that its owner touches every few seconds. Waiting processes remove a claim that is no longer touched.
Claims only avoid duplicate work. If two processes do the same work, they produce the same files, and the first rename
wins.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from exactdata import interrupts
from exactdata.interrupts import StoppedError

TOUCH_S = 5.0
STALE_S = 60.0
"""Seconds without a touch after which a claim is considered abandoned, measured by the waiting process."""
POLL_S = 0.1


@contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Try to hold a claim for the duration of the block. Yields False if a different process holds it.

    Args:
        path: path of the claim file, in an existing directory.

    Raises:
        OSError: a file system operation fails.
    """
    try:
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        yield False
        return
    with os.fdopen(fd, "w") as file:
        json.dump({"host": socket.gethostname(), "pid": os.getpid()}, file)
    done = threading.Event()
    thread = threading.Thread(target=_touch, args=(path, done), daemon=True)
    thread.start()
    try:
        yield True
    finally:
        done.set()
        thread.join()
        path.unlink(missing_ok=True)


def _touch(path: Path, done: threading.Event) -> None:
    while not done.wait(TOUCH_S):
        with suppress(OSError):  # the file system may work again next time
            os.utime(path)


class Watch:
    """Remove claims whose owners no longer run.

    Args:
        directory: the directory of the claims.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._seen: dict[str, tuple[int, float]] = {}

    def remove_dead(self) -> None:
        """Check all claims once. Call this repeatedly: a claim is removed if it has not changed between calls."""
        now = time.monotonic()
        for path in list(self.directory.iterdir()):
            with suppress(FileNotFoundError):
                touched = path.stat().st_mtime_ns
                before, since = self._seen.get(path.name, (None, now))
                if before != touched:
                    self._seen[path.name] = touched, now
                if (before == touched and now - since > STALE_S) or _is_of_dead_process(path):
                    path.unlink()


def _is_of_dead_process(path: Path) -> bool:
    """Return whether the owner was a process on this machine that no longer runs."""
    try:
        owner = json.loads(path.read_text())
        if owner["host"] != socket.gethostname():
            return False
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError, KeyError, TypeError):  # a different user's process, or an incomplete claim
        return False
    return False


def fill(directory: Path, make: Callable[[Path], None]) -> None:
    """Create a directory atomically: call `make` on a temporary directory next to it, then sync and rename that.

    Has no effect if a different process creates the directory first.

    Raises:
        OSError: a file system operation fails. Files written so far are removed.
    """
    folder = directory.parent / f".{directory.name}-{uuid.uuid4().hex}"
    try:
        folder.mkdir()
        make(folder)
        for file in folder.iterdir():
            sync(file)
        sync(folder)
        folder.rename(directory)
    except OSError:
        if not directory.is_dir():  # otherwise a different process created it, and may have removed `folder`
            raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sync(directory.parent)


def write(path: Path, data: bytes) -> None:
    """Write a file atomically. The file survives a power failure."""
    temporary = path.parent / f".{path.name}-{uuid.uuid4().hex}"
    try:
        temporary.write_bytes(data)
        sync(temporary)
        temporary.replace(path)
    except FileNotFoundError:
        if not path.is_file():  # otherwise a different process wrote it, and has removed `temporary`
            raise
    finally:
        temporary.unlink(missing_ok=True)


def remove_left(directory: Path, pattern: str = ".*") -> None:
    """Remove the temporary files of killed processes from a directory. No process may still be writing there."""
    for left in directory.glob(pattern):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Sync a file, or the entries of a directory, to disk, so that a power failure does not lose them."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def once(directory: Path, claims: Path, make: Callable[[Path], None]) -> None:
    """Create a directory with `fill` in one of the processes that need it, while the rest wait.

    Args:
        directory: the directory to create. Its parent must exist.
        claims: the directory of the claims.
        make: called with a directory, writes the files into it.

    Raises:
        StoppedError: this process was asked to stop.
        OSError: a file system operation fails.
    """
    watch = Watch(claims)
    while not directory.is_dir():
        with claimed(claims / directory.name) as ours:
            if ours and not directory.is_dir():
                fill(directory, make)
        if not ours:
            pause()
            watch.remove_dead()
    remove_left(directory.parent, f".{directory.name}-*")


def pause(seconds: float = POLL_S) -> None:
    """Wait for `seconds`.

    Raises:
        StoppedError: this process was asked to stop.
    """
    if interrupts.requested():
        raise StoppedError("the preparation of documents was asked to stop; it continues at the next start")
    time.sleep(seconds)

"""Let one process of many do a piece of work, and the others wait, on any shared file system.

A claim is a file that its owner touches every few seconds. A claim that nobody touches any more is removed by whoever
waits. Claims only save work: two owners of one piece produce the same files, and the first rename wins.
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
"""A claim that was not touched for so long, by the clock of the one who waits, has lost its owner."""
POLL_S = 0.1


@contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Hold a claim within the block; the value is False if another process has it.

    Args:
        path: of the claim; its directory exists.

    Raises:
        OSError: the file system refuses.
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
        with suppress(OSError):  # the file system may be back at the next time
            os.utime(path)


class Watch:
    """Removes claims that have lost their owners.

    Args:
        directory: of the claims.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._seen: dict[str, tuple[int, float]] = {}

    def remove_dead(self) -> None:
        """Look at all claims once; call it again and again."""
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
    """Whether the owner was a process of this machine that has ended."""
    try:
        owner = json.loads(path.read_text())
        if owner["host"] != socket.gethostname():
            return False
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError, KeyError, TypeError):  # another user's, or half written
        return False
    return False


def fill(directory: Path, make: Callable[[Path], None]) -> None:
    """Create a directory atomically: `make` fills a temporary one beside it, which is synced and renamed.

    Does nothing if another process has created it meanwhile.

    Raises:
        OSError: the file system refuses; what was written is removed.
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
        if not directory.is_dir():  # else another was faster, and may have removed what was written here
            raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sync(directory.parent)


def write(path: Path, data: bytes) -> None:
    """Write a file that is whole or not there, even after a power failure."""
    temporary = path.parent / f".{path.name}-{uuid.uuid4().hex}"
    try:
        temporary.write_bytes(data)
        sync(temporary)
        temporary.replace(path)
    except FileNotFoundError:
        if not path.is_file():  # else another was faster, and has removed what was left here
            raise
    finally:
        temporary.unlink(missing_ok=True)


def remove_left(directory: Path, pattern: str = ".*") -> None:
    """Remove what processes that were killed have left in a directory, where all is complete that they wrote."""
    for left in directory.glob(pattern):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Make a file, or the names in a directory, outlive a power failure."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def once(directory: Path, claims: Path, make: Callable[[Path], None]) -> None:
    """Create a directory as `fill` does, in one of the processes that want it; the others wait.

    Args:
        directory: to be created; its parent exists.
        claims: the directory of the claims.
        make: fills it.

    Raises:
        StoppedError: this process was asked to stop.
        OSError: the file system refuses.
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
    """Wait a moment.

    Raises:
        StoppedError: this process was asked to stop.
    """
    if interrupts.requested():
        raise StoppedError("the preparation of documents was asked to stop; it continues at the next start")
    time.sleep(seconds)

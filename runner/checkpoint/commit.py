"""One checkpoint from nothing to committed: temporary directory, fsync, manifest, fence, rename, fsync.

Every change to the file system goes through a plain `os` call, so that tests can count and break each
of them. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runner.checkpoint import manifest as manifests
from runner.checkpoint.manifest import CHUNK, FileRecord, Manifest
from runner.checkpoint.store import remove_tree
from runner.files import fsync_dir

DIRECTORY_MODE = 0o755
FILE_MODE = 0o644  # less the umask; never writable by others, whatever the umask


class HashingFile:
    """A new file, written front to back, that knows its size and SHA-256 at the end.

    Small writes are collected into chunks. `close` makes the file durable.

    Raises:
        OSError: the file exists, or the file system refuses.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(path, flags, FILE_MODE)
        self._digest = hashlib.sha256()
        self._pending = bytearray()
        self._size = 0
        self.fault: OSError | None = None

    def write(self, data: Any) -> int:
        """Append bytes or any buffer; returns their number."""
        view = memoryview(data).cast("B")
        self._size += len(view)
        if len(view) < CHUNK:
            self._pending += view
            if len(self._pending) >= CHUNK:
                self._drain()
        else:
            self._drain()
            self._put(view)
        return len(view)

    def tell(self) -> int:
        """Bytes written so far."""
        return self._size

    def flush(self) -> None:
        """Nothing to do before `close`: who reads a file that is not committed?"""

    def close(self) -> FileRecord:
        """Write out, fsync, close; returns what the manifest says of the file."""
        try:
            self._drain()
            os.fsync(self._fd)
        finally:
            self.abandon()
        return FileRecord(self._size, self._digest.hexdigest())

    def abandon(self) -> None:
        """Close without making durable."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _drain(self) -> None:
        if self._pending:
            pending, self._pending = self._pending, bytearray()
            self._put(memoryview(pending))

    def _put(self, view: memoryview) -> None:
        """Hash and write in chunks that are still in the CPU's cache the second time."""
        try:
            for start in range(0, len(view), CHUNK):
                piece = view[start : start + CHUNK]
                self._digest.update(piece)
                while piece:
                    piece = piece[os.write(self._fd, piece) :]
        except OSError as error:
            self.fault = error
            raise


def write_file(path: Path, fill: Callable[[HashingFile], Any]) -> FileRecord:
    """Make a new durable file with what `fill` writes into it."""
    file = HashingFile(path)
    try:
        fill(file)
        return file.close()
    except RuntimeError:
        if file.fault is not None:  # torch.save turns it into an error about positions in its archive
            raise file.fault from None
        raise
    finally:
        file.abandon()


class Transaction:
    """The temporary directory of one checkpoint. `commit` makes it real, `abort` removes it."""

    def __init__(self, final: Path, fence: int, check_fence: Callable[[], None] | None) -> None:
        self.final = final
        self.path = final.with_name(f"{final.name}.tmp-{fence}-{os.getpid()}")
        self._check = check_fence or (lambda: None)

    def begin(self) -> None:
        """Make the directory, then look whether this process may still write.

        In this order: a newer incarnation takes its number first and sweeps afterwards, so either it
        sees this directory or this process sees its number.
        """
        self._check()
        os.mkdir(self.path, DIRECTORY_MODE)
        try:
            self._check()
        except BaseException:
            self.abort()
            raise

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest, and give the directory its final name if the fence still stands."""
        write_file(self.path / manifests.NAME, lambda file: file.write(manifest.encode()))
        fsync_dir(self.path)
        self._check()
        os.rename(self.path, self.final)
        fsync_dir(self.final.parent)

    def abort(self) -> None:
        """Remove what was written; a leftover that cannot be removed is swept at the next start."""
        with contextlib.suppress(OSError):
            remove_tree(self.path)

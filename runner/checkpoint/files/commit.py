"""The commit of one checkpoint: temporary directory, fsync, manifest, fence, rename, fsync.

Every change goes through a function of `runner.system.files` that does one thing, so that tests can count and break
each of them. Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runner.checkpoint.files import manifest as manifests
from runner.checkpoint.files.store import BLOCK_BYTES, Fence, FileRecord, Writer, new_hash
from runner.system import files, processes

FILE_MODE = 0o644  # minus the umask; never writable by others, whatever the umask
WRITEBACK_BYTES = 8 << 20
"""After how many bytes the disk is told to begin: it works while the next ones are hashed."""


def temporary_name(path: Path, fence: Fence, use: str = "") -> Path:
    """A name beside `path` for a temporary directory of the attempt `fence`: of a save, or of another `use`."""
    return path.with_name(f"{path.name}.tmp-{fence.number}-{processes.own_pid()}{use}")


def remove_tree(path: Path) -> None:
    """Remove a directory, which may be gone already."""
    with contextlib.suppress(FileNotFoundError):
        files.remove_tree(path)


class HashingFile:
    """A new file, written front to back, whose size and XXH3-128 are known at the end.

    Small writes are collected into blocks. After `finish`, `sync` makes the file durable.

    Raises:
        OSError: the file exists, or the file system refuses.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = files.open_fd(path, flags, FILE_MODE)
        self._digest = new_hash()
        self._pending = bytearray()
        self._size = 0
        self._written = self._begun = 0  # bytes that were written, and that the disk was told of
        self.error: OSError | None = None
        """What the file system refused, if it did: torch.save replaces it by an error of its own."""

    def write(self, data: Any) -> int:
        """Append bytes or any buffer; returns their number."""
        view = memoryview(data).cast("B")
        self._size += len(view)
        if len(view) < BLOCK_BYTES:
            self._pending += view
            if len(self._pending) >= BLOCK_BYTES:
                self._drain()
        else:
            self._drain()
            self._put(view)
        return len(view)

    def tell(self) -> int:
        """Number of bytes written so far."""
        return self._size

    def flush(self) -> None:
        """Does nothing: nobody reads the file before `finish`."""

    def finish(self) -> FileRecord:
        """Write what is pending; returns the file's entry in the manifest."""
        self._drain()
        self._begin_writeback()
        return FileRecord(self._size, self._digest.hexdigest())

    def sync(self) -> None:
        """Fsync and close."""
        try:
            files.fsync_fd(self._fd)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close without fsync, unless closed already."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            files.close_fd(fd)

    def _drain(self) -> None:
        if self._pending:
            pending, self._pending = self._pending, bytearray()
            self._put(memoryview(pending))

    def _put(self, view: memoryview) -> None:
        """Hash and write in blocks, which are still in the CPU's cache for the write."""
        try:
            for start in range(0, len(view), BLOCK_BYTES):
                block = view[start : start + BLOCK_BYTES]
                self._digest.update(block)
                self._written += len(block)
                while block:
                    block = block[files.write_fd(self._fd, block) :]
                if self._written - self._begun >= WRITEBACK_BYTES:
                    self._begin_writeback()
        except OSError as error:
            self.error = error
            raise

    def _begin_writeback(self) -> None:
        files.begin_writeback(self._fd, self._begun, self._written - self._begun)
        self._begun = self._written


class NewFiles:
    """New files in one directory, written one after another, that become durable together.

    The disk has begun to write all of them before the first fsync, which then waits for all. A context manager, which
    closes what was not synced.

    Args:
        directory: where they are.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: list[HashingFile] = []

    def __enter__(self) -> NewFiles:
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._files:
            file.abandon()

    def write(self, name: str, fill: Callable[[HashingFile], Any]) -> FileRecord:
        """Create a file with what `fill` writes into it; returns its entry in the manifest.

        Raises:
            OSError: the file exists, or the file system refused.
        """
        file = HashingFile(self._directory / name)
        self._files.append(file)
        try:
            fill(file)
            return file.finish()
        except RuntimeError:
            if file.error is not None:  # torch.save turns it into an error about positions in its archive
                raise file.error from None
            raise

    def sync(self) -> None:
        """Make all files durable.

        Raises:
            OSError: the file system refused.
        """
        while self._files:
            self._files.pop(0).sync()


def write_file(path: Path, fill: Callable[[HashingFile], Any]) -> FileRecord:
    """Create a durable file with what `fill` writes into it.

    Raises:
        OSError: the file exists, or the file system refused.
    """
    with NewFiles(path.parent) as new:
        record = new.write(path.name, fill)
        new.sync()
        return record


class Transaction:
    """The temporary directory of one checkpoint: `commit` gives it its final name, `abort` removes it.

    Args:
        final: path of the checkpoint once it is committed.
        fence: this attempt's.
        prepare: called first; creates the directory of checkpoints.
    """

    def __init__(self, final: Path, fence: Fence, prepare: Callable[[], None] = lambda: None) -> None:
        self.final = final
        self._prepare = prepare
        self.path = temporary_name(final, fence)
        self._fence = fence

    def begin(self) -> None:
        """Create the directory, then check the fence once more.

        In this order: a newer attempt takes its fencing number first and sweeps afterwards, so either it sees this
        directory or this process sees its number.
        """
        self._prepare()
        self._fence.check()
        self._make_dir()
        try:
            self._fence.check()
        except BaseException:
            self.abort()
            raise

    def _make_dir(self) -> None:
        number = 0
        while True:
            try:
                files.make_dir(self.path, files.OWNED)
                return
            except FileExistsError:
                if self._fence.number:
                    raise
                # The PID alone comes again, in a container for example: most likely a process was killed.
                number += 1
                self.path = temporary_name(self.final, self._fence, f"-again{number}")

    def commit(self, manifest: bytes, new: Writer | None = None) -> None:
        """Write the manifest, and rename the directory if this attempt still holds the lease.

        Args:
            manifest: of all files in the directory.
            new: those of them that are not durable yet.
        """
        with new or NewFiles(self.path) as unsynced:
            unsynced.write(manifests.NAME, lambda file: file.write(manifest))
            unsynced.sync()
        files.fsync_dir(self.path)
        self._fence.check()
        files.rename(self.path, self.final)
        files.fsync_dir(self.final.parent)

    def abort(self) -> None:
        """Remove the directory; what cannot be removed is swept after the next save or by the next attempt."""
        with contextlib.suppress(OSError):
            remove_tree(self.path)

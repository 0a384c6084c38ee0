"""Commit one checkpoint: write a temporary directory, fsync, write the manifest, check the fence, rename, fsync.

Each change on disk is one call of a function in `runner.system.files`, so that tests can count the changes and make
each one fail. This module does not import torch.
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

FILE_MODE = 0o644  # before the umask applies; never writable by other users
WRITEBACK_BYTES = 8 << 20
"""Number of bytes after which writeback starts, so that the disk writes while the next bytes are hashed."""


def temporary_name(path: Path, fence: Fence, use: str = "") -> Path:
    """Return a path next to `path` for a temporary directory of this attempt. `use` makes the path distinct."""
    return path.with_name(f"{path.name}.tmp-{fence.number}-{processes.own_pid()}{use}")


def remove_tree(path: Path) -> None:
    """Remove a directory, if it exists."""
    with contextlib.suppress(FileNotFoundError):
        files.remove_tree(path)


class HashingFile:
    """Write a new file sequentially, and compute its size and XXH3-128 hash.

    Small writes are collected into blocks. `finish` returns the size and checksum. Call `sync` afterwards to make the
    file durable.

    Raises:
        OSError: the file already exists, or the file system returned an error.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = files.open_fd(path, flags, FILE_MODE)
        self._digest = new_hash()
        self._pending = bytearray()
        self._size = 0
        self._written = self._begun = 0  # bytes written, and bytes whose writeback has started
        self.error: OSError | None = None
        """The file system error, if any. It is kept because torch.save raises a different error in its place."""

    def write(self, data: Any) -> int:
        """Append bytes or any other buffer, and return the number of bytes."""
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
        """Return the number of bytes written so far."""
        return self._size

    def flush(self) -> None:
        """Do nothing: the file is not read before `finish`."""

    def finish(self) -> FileRecord:
        """Write the pending bytes, and return the file's entry for the manifest."""
        self._drain()
        self._begin_writeback()
        return FileRecord(self._size, self._digest.hexdigest())

    def sync(self) -> None:
        """Fsync and close the file."""
        try:
            files.fsync_fd(self._fd)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the file without fsync, unless it is already closed."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            files.close_fd(fd)

    def _drain(self) -> None:
        if self._pending:
            pending, self._pending = self._pending, bytearray()
            self._put(memoryview(pending))

    def _put(self, view: memoryview) -> None:
        """Hash and write block by block, so that each block is still in the CPU's cache when it is written."""
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
    """Write new files in one directory, one after another, and make them durable together.

    Writeback of all files starts before the first fsync, so that the disk is already writing all of them during the
    first fsync. As a context manager, this object closes files that were not synced.

    Args:
        directory: directory of the files.
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
        """Create a file, let `fill` write its content, and return its entry for the manifest.

        Raises:
            OSError: the file already exists, or the file system returned an error.
        """
        file = HashingFile(self._directory / name)
        self._files.append(file)
        try:
            fill(file)
            return file.finish()
        except RuntimeError:
            if file.error is not None:  # torch.save raises an error about archive positions instead
                raise file.error from None
            raise

    def sync(self) -> None:
        """Make all files durable.

        Raises:
            OSError: the file system returned an error.
        """
        while self._files:
            self._files.pop(0).sync()


def write_file(path: Path, fill: Callable[[HashingFile], Any]) -> FileRecord:
    """Create a file, let `fill` write its content, and make the file durable.

    Raises:
        OSError: the file already exists, or the file system returned an error.
    """
    with NewFiles(path.parent) as new:
        record = new.write(path.name, fill)
        new.sync()
        return record


class Transaction:
    """The temporary directory of one checkpoint. `commit` renames it to the final name, and `abort` removes it.

    Args:
        final: path of the committed checkpoint.
        fence: fence of this attempt.
        prepare: function that creates the checkpoint directory. It is called first.
    """

    def __init__(self, final: Path, fence: Fence, prepare: Callable[[], None] = lambda: None) -> None:
        self.final = final
        self._prepare = prepare
        self.path = temporary_name(final, fence)
        self._fence = fence

    def begin(self) -> None:
        """Create the directory, then check the fence once more.

        The order matters: a newer attempt first takes its fencing number and then removes leftovers. So either the
        newer attempt sees this directory, or this process sees the newer number.
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
                # Without a fencing number, only the PID distinguishes the name, and PIDs repeat, e.g. in containers.
                # The existing directory is most likely from a killed process.
                number += 1
                self.path = temporary_name(self.final, self._fence, f"-again{number}")

    def commit(self, manifest: bytes, new: Writer | None = None) -> None:
        """Write the manifest, and rename the directory if this attempt still holds the lease.

        Args:
            manifest: encoded manifest of all files in the directory.
            new: files in the directory that are not durable yet.
        """
        with new or NewFiles(self.path) as unsynced:
            unsynced.write(manifests.NAME, lambda file: file.write(manifest))
            unsynced.sync()
        files.fsync_dir(self.path)
        self._fence.check()
        files.rename(self.path, self.final)
        files.fsync_dir(self.final.parent)

    def abort(self) -> None:
        """Remove the directory. If this fails, the next save or attempt removes it."""
        with contextlib.suppress(OSError):
            remove_tree(self.path)

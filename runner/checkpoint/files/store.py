"""Define the interface `Store` for storing checkpoints. `directory.Directory` implements it.

This module does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

BLOCK_BYTES = 1 << 18
"""Number of bytes hashed, read or written at once, small enough for the cache of a CPU core."""

COMMITTED = re.compile(r"step_(\d+)")
SET_ASIDE = re.compile(r"step_\d+\.(corrupt|misnamed)(-\d+)?")


def step_name(step: int) -> str:
    """Return the name of a step's checkpoint, such as `step_00000100`."""
    return f"step_{step:08d}"


def new_hash() -> Any:
    """Return a new XXH3-128 hasher. It detects bit rot and torn writes, and is ten times as fast as SHA-256.

    It does not protect against forgery. SHA-256 would not either, because a user who can change a file can also change
    the manifest.
    """
    from xxhash import xxh3_128

    return xxh3_128()


@dataclass(frozen=True)
class FileRecord:
    """The size in bytes and the XXH3-128 hash of a file."""

    size: int
    xxh128: str


@dataclass(frozen=True)
class Fence:
    """The fencing number of an attempt.

    Attributes:
        number: the fencing number, or 0 if no other process can change the checkpoints.
        check: function that raises SupersededError if a newer attempt holds the lease.
    """

    number: int = 0
    check: Callable[[], None] = lambda: None


class Place(Protocol):
    """An object with a path for messages. The path need not exist on a file system."""

    @property
    def path(self) -> Path: ...


class Stored(Place, Protocol):
    """A stored checkpoint, opened for reading by path. Picklable, so that it can be sent to other ranks.

    Methods raise OSError like a file system does. The errno distinguishes a missing file from a transient error.
    """

    def wrong_kind(self) -> str | None:
        """Describe the entry if it cannot be a checkpoint, e.g. `a link`. Otherwise, return None.

        Raises FileNotFoundError if the entry does not exist.
        """

    def names(self) -> list[str]:
        """List the names of the files."""

    def size(self, name: str) -> int:
        """Return the size of a file in bytes without opening it."""

    def open(self, name: str) -> tuple[BinaryIO, int]:
        """Open a file for random-access reading. Return the file and its size in bytes."""


class Writer(Protocol):
    """Write new files of one checkpoint and make them durable together. As a context manager, it closes the files."""

    def __enter__(self) -> Writer: ...

    def __exit__(self, *exception: object) -> None: ...

    def write(self, name: str, fill: Callable[[Any], Any]) -> FileRecord:
        """Create a file, let `fill` write its content, and return its entry for the manifest."""

    def sync(self) -> None:
        """Make all files durable."""


class Save(Place, Protocol):
    """A save of one checkpoint to a temporary location. The checkpoint does not exist until the commit."""

    def begin(self) -> None:
        """Create the temporary location. Raise SupersededError if a newer attempt holds the lease."""

    def commit(self, manifest: bytes, new: Writer) -> None:
        """Write the manifest, make `new` durable, and publish the checkpoint if this attempt holds the lease."""

    def abort(self) -> None:
        """Remove the files if possible."""


class Store(Place, Protocol):
    """A store for a run's checkpoints. Changes raise SupersededError if a newer attempt holds the lease."""

    def look_anew(self) -> None:
        """Refresh cached listings, so that checkpoints committed by other machines are visible."""

    def names(self) -> list[str]:
        """List the names of all entries. Raise CheckpointError if they cannot be read."""

    def at(self, name: str) -> Stored:
        """Return the entry with this name, which may not exist."""

    def save(self, name: str) -> Save:
        """Return a new save of a checkpoint with this name. The caller must call `begin`."""

    def writer(self, path: Path) -> Writer:
        """Return a writer for the files of a save at `path`, which this rank or another one has begun."""

    def set_aside(self, name: str, mark: str, why: str) -> None:
        """Rename a checkpoint to `name.mark`, or a similar unused name. Log a warning, even if renaming fails.

        Args:
            name: name of the checkpoint.
            mark: `corrupt` or `misnamed`.
            why: reason, for the warning.
        """

    def delete(self, name: str) -> None:
        """Delete a checkpoint atomically, unless it is pinned."""

    def sweep(self) -> None:
        """Remove leftovers of killed saves and deletions. Call it only while no save is in flight."""

    def pinned(self) -> set[int]:
        """Return the steps that must not be deleted."""

    def results(self) -> dict[int, dict[str, Any]]:
        """Return results of evaluations after the save, by step. Raise CheckpointError if they cannot be read."""

    def warning(self) -> str | None:
        """Return a warning if other users may change the checkpoints, or None."""

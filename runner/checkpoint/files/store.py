"""The interface `Store` of a store of checkpoints, and its return types. `directory.Directory` implements it.

Imports no torch.
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
    """Return the directory name of a step, such as `step_00000100`."""
    return f"step_{step:08d}"


def new_hash() -> Any:
    """Return a new XXH3-128 hash. It detects bit rot and torn writes, and is ten times as fast as SHA-256.

    It does not protect against forgery, and need not: a user who can write a file can also write the manifest.
    """
    from xxhash import xxh3_128

    return xxh3_128()


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and XXH3-128 of one file."""

    size: int
    xxh128: str


@dataclass(frozen=True)
class Fence:
    """The fencing number of an attempt.

    Attributes:
        number: 0 if no other process can work on the checkpoints.
        check: raises SupersededError if a newer attempt holds the lease.
    """

    number: int = 0
    check: Callable[[], None] = lambda: None


class Place(Protocol):
    """A location with a path for messages. The path need not be on a file system."""

    @property
    def path(self) -> Path: ...


class Stored(Place, Protocol):
    """One stored checkpoint to read, named by its path. It is pickled to be sent to other ranks.

    Methods raise OSError like a file system. The errno separates a missing file from an error that may pass.
    """

    def wrong_kind(self) -> str | None:
        """Return what the entry is if it cannot be a checkpoint (`a link`), or None.

        Raises FileNotFoundError if there is no entry.
        """

    def names(self) -> list[str]:
        """List the names of the files."""

    def size(self, name: str) -> int:
        """Return the size of a file in bytes without opening it."""

    def open(self, name: str) -> tuple[BinaryIO, int]:
        """Open a file for reading from any position. Return it with its size in bytes."""


class Writer(Protocol):
    """New files of one checkpoint, which become durable together. A context manager that closes them."""

    def __enter__(self) -> Writer: ...

    def __exit__(self, *exception: object) -> None: ...

    def write(self, name: str, fill: Callable[[Any], Any]) -> FileRecord:
        """Create a file with the content that `fill` writes, and return its entry in the manifest."""

    def sync(self) -> None:
        """Make all files durable."""


class Save(Place, Protocol):
    """A save of one checkpoint in a temporary place: the checkpoint does not exist until the commit."""

    def begin(self) -> None:
        """Create the place for the files. Raise SupersededError if a newer attempt holds the lease."""

    def commit(self, manifest: bytes, new: Writer) -> None:
        """Write the manifest, make `new` durable, and publish the checkpoint if this attempt holds the lease."""

    def abort(self) -> None:
        """Remove the files, as far as possible."""


class Store(Place, Protocol):
    """The store of a run's checkpoints. Changes raise SupersededError if a newer attempt holds the lease."""

    def look_anew(self) -> None:
        """Refresh cached listings, so that checkpoints committed by other machines are visible."""

    def names(self) -> list[str]:
        """List the names of all entries. Raise CheckpointError if they cannot be read."""

    def at(self, name: str) -> Stored:
        """Return the entry with this name, which may not exist."""

    def save(self, name: str) -> Save:
        """Return the save of a checkpoint with this name, not begun yet."""

    def writer(self, path: Path) -> Writer:
        """Return a writer of new files for a save at `path` that this or another rank has begun."""

    def set_aside(self, name: str, mark: str, why: str) -> None:
        """Rename a checkpoint to `name.mark`, or a similar free name. Log a warning, even if that fails.

        Args:
            name: name of the checkpoint, which is in the way.
            mark: `corrupt` or `misnamed`.
            why: reason, for the warning.
        """

    def delete(self, name: str) -> None:
        """Delete a checkpoint atomically, unless it has a pin."""

    def sweep(self) -> None:
        """Remove leftovers of killed saves and deletions. Call it only while no save is in flight."""

    def pinned(self) -> set[int]:
        """Return the steps that must not be deleted."""

    def results(self) -> dict[int, dict[str, Any]]:
        """Return results of later evaluations of checkpoints, by step. Raise CheckpointError if unreadable."""

    def warning(self) -> str | None:
        """Return a warning if other users may change the checkpoints, or None."""

"""What a store of checkpoints does: `Store` and what it returns. `directory.Directory` is one. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

BLOCK_BYTES = 1 << 18
"""How much is hashed, read or written at once: little enough to stay in a core's own cache."""

COMMITTED = re.compile(r"step_(\d+)")
SET_ASIDE = re.compile(r"step_\d+\.(corrupt|misnamed)(-\d+)?")


def step_name(step: int) -> str:
    """`step_00000100`."""
    return f"step_{step:08d}"


def new_hash() -> Any:
    """An XXH3-128 with `update` and `hexdigest`: it detects rot and torn writes, ten times as fast as SHA-256.

    It is no protection against forgery, and needs to be none: who can write a file can write the manifest beside it.
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
        number: 0 where nobody else can work on the checkpoints.
        check: raises SupersededError if a newer attempt holds the lease.
    """

    number: int = 0
    check: Callable[[], None] = lambda: None


class Place(Protocol):
    """What is at a path, which need not be one of a file system, and is for messages."""

    @property
    def path(self) -> Path: ...


class Stored(Place, Protocol):
    """One checkpoint to read, which has the name of its path. It is pickled to be sent to other ranks.

    A method raises OSError as a file system does: its errno tells a missing file from an error that may pass.
    """

    def wrong_kind(self) -> str | None:
        """What is there if it can be no checkpoint (`a link`), or None; FileNotFoundError if nothing is."""

    def names(self) -> list[str]:
        """The names of its files."""

    def size(self, name: str) -> int:
        """The size of a file in bytes, without opening it."""

    def open(self, name: str) -> tuple[BinaryIO, int]:
        """A file, to be read from any position, and its size in bytes."""


class Writer(Protocol):
    """New files of one checkpoint, which become durable together; a context manager that closes them."""

    def __enter__(self) -> Writer: ...

    def __exit__(self, *exception: object) -> None: ...

    def write(self, name: str, fill: Callable[[Any], Any]) -> FileRecord:
        """Create a file with what `fill` writes into it; returns its entry in the manifest."""

    def sync(self) -> None:
        """Make all files durable."""


class Save(Place, Protocol):
    """One checkpoint that is being saved, at a path of its own: it is absent until it is committed."""

    def begin(self) -> None:
        """Make the place for its files; raises SupersededError if a newer attempt holds the lease."""

    def commit(self, manifest: bytes, new: Writer) -> None:
        """Write the manifest, make `new` durable, and let the checkpoint appear, unless superseded meanwhile."""

    def abort(self) -> None:
        """Remove its files, as far as possible."""


class Store(Place, Protocol):
    """Where the checkpoints of a run are. A change raises SupersededError if a newer attempt holds the lease."""

    def look_anew(self) -> None:
        """Let the next look show what other machines have committed since the last one."""

    def names(self) -> list[str]:
        """The names of all that is there; raises CheckpointError if that cannot be read."""

    def at(self, name: str) -> Stored:
        """What has this name, or may have it."""

    def save(self, name: str) -> Save:
        """The save of a checkpoint of this name, not begun yet."""

    def writer(self, path: Path) -> Writer:
        """New files of a save that was begun, by this or another rank; `path` is that of the save."""

    def set_aside(self, name: str, mark: str, why: str) -> None:
        """Rename a checkpoint to `name.mark`, or a free name like it, and log a warning, also if that fails.

        Args:
            name: of the checkpoint, which is in the way.
            mark: `corrupt` or `misnamed`.
            why: what is wrong with it.
        """

    def delete(self, name: str) -> None:
        """Delete a checkpoint atomically, unless it has a pin."""

    def sweep(self) -> None:
        """Remove what killed saves and deletions left behind. Only while no save is in flight."""

    def pinned(self) -> set[int]:
        """The steps that are not to be deleted."""

    def results(self) -> dict[int, dict[str, Any]]:
        """Return what evaluations gave for checkpoints that were saved before, by step; raises CheckpointError."""

    def warning(self) -> str | None:
        """Who else may change the checkpoints, as a warning, or None."""

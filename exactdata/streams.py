"""Resume a stream at any sample, on any number of workers and ranks, by defining two methods."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import xxhash
from torch.utils.data import IterableDataset

from exactdata.loading.protocols import LoaderStateError, State, epoch, shard


class ShardedStream(IterableDataset[Any]):
    """A stream made of *units*, such as files, row groups or blocks of lines. Each unit is read by one shard.

    Subclasses define `units` and `read`. The state of a shard is the number of units it has read, and the position
    within the current unit. After a resume with a different number of workers or ranks, the unread units, and the rest
    of partly read units, are distributed over the new shards.

    A state also contains a digest of the ordered units and of the sizes of the files that they name. A resume within an
    epoch raises an error if the units, their order or the size of a file have changed. The files may have moved to a
    different directory.

    Example:
        ```python
        from exactdata import ShardedStream, StatefulDataLoader

        class Lines(ShardedStream):
            def units(self):
                return [["a", "b", "c"], ["d", "e"], ["f", "g", "h"]]  # usually files

            def read(self, unit, position):
                for number in range(position or 0, len(unit)):
                    yield unit[number], number + 1  # the sample, and the position after it

        loader = StatefulDataLoader(Lines(), batch_size=2)
        first = next(iter(loader))
        state = loader.state_dict()
        resumed = StatefulDataLoader(Lines(), batch_size=2)
        resumed.load_state_dict(state)
        print(first, list(resumed))
        ```

    Attributes:
        epoch: the loader's epoch, from 0. Without a loader, the number of times this shard has been read to its end.
    """

    epoch = 0
    begins_anew = True  # after an epoch, the state begins the next one, see `fetch.load_end`
    _units: int | None = None  # number of units, set at the first sample
    _content: str | None = None  # digest of the units, set at the first sample
    _left: list[list[Any]] | None = None  # rest of the epoch after a resume, see `_units_of_shard`; None if complete
    _shard: tuple[int, int] | None = None  # (number, shards) of the shard being read; None between epochs
    _done = 0  # number of units of this shard that were read
    _at: Any = None  # position in the current unit
    _loaded = False

    def units(self) -> Sequence[Any]:
        """Return all units of this epoch, in the same order on every rank and worker. May depend on `self.epoch`."""
        raise NotImplementedError

    def read(self, unit: Any, position: Any) -> Iterator[tuple[Any, Any]]:
        """Yield the samples of a unit, each with the position that follows it.

        Args:
            unit: one of `units()`.
            position: the position that was yielded with the last consumed sample. If None, read the unit from its
                start.

        Yields:
            (sample, position). The position may have any type that a checkpoint can store, but must not be None.
        """
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        if not self._loaded:
            self._begin()
        self._loaded = False
        told = epoch()
        self.epoch = self.epoch if told is None else told
        units = self.units()
        self._shard, known, content = self._shard or shard(), self._units, digest_of_units(units)
        if known not in (None, len(units)):
            raise LoaderStateError(
                f"this state is of {known} units of {type(self).__name__}, now there are {len(units)}: use the same "
                "data, or start it from the beginning"
            )
        if self._content not in (None, content):
            raise LoaderStateError(
                f"this state is of other units of {type(self).__name__}, although there are {known} as before: a file "
                "was replaced, grew or shrank, or their order is another one (sort what glob returns): use the same "
                "data, or start it from the beginning"
            )
        self._units, self._content = len(units), content
        for number, position in _units_of_shard(self._units, self._left, self._shard)[self._done :]:
            self._at = position if self._at is None else self._at
            for sample, after in self.read(units[number], self._at):
                self._at = after
                yield sample
            self._done, self._at = self._done + 1, None
        self._begin()
        self.epoch += 1

    def _begin(self) -> None:
        self._units, self._content, self._left, self._shard, self._done, self._at = None, None, None, None, 0, None

    def state_dict(self) -> State:
        """Return the position of this shard."""
        return {
            "epoch": self.epoch,
            "units": self._units,
            "content": self._content,
            "left": self._left,
            "shard": None if self._shard is None else list(self._shard),
            "done": self._done,
            "at": self._at,
        }

    def load_state_dict(self, state: State) -> None:
        """Continue from `state` at the next `iter()`."""
        self.epoch, self._units, self._content = state["epoch"], state["units"], state["content"]
        self._left = state["left"]
        self._shard = None if state["shard"] is None else (state["shard"][0], state["shard"][1])
        self._done, self._at, self._loaded = state["done"], state["at"], True

    def aggregate_state_dict(self, states: Sequence[State]) -> State:
        """Return the rest of this epoch, combined from the states of the shards that have not ended."""
        self.check_state_dicts(states)
        found: list[tuple[int, Any]] = []
        for state in states:
            mine = _units_of_shard(state["units"], state["left"], state["shard"])[state["done"] :]
            if mine and state["at"] is not None:
                mine[0] = (mine[0][0], state["at"])
            found += mine
        left: list[list[Any]] = []
        for number, position in sorted(found, key=lambda unit: unit[0]):
            if left and left[-1][1] == number and position is None:
                left[-1][1] = number + 1
            else:
                left.append([number, number + 1, position])
        known = next((state for state in states if state["units"] is not None), states[0])
        return {**states[0], "units": known["units"], "content": known["content"], "left": left, "done": 0, "at": None}

    def check_state_dicts(self, states: Sequence[State]) -> None:
        """Check that all shards of an epoch read the same units. Called when the states of all ranks are combined.

        Raises:
            LoaderStateError: the shards read different units.
        """
        found: dict[int, str] = {}
        for state in states:
            content = state["content"]
            if content is not None and found.setdefault(state["epoch"], content) != content:
                raise LoaderStateError(
                    f"ranks or workers have different units of {type(self).__name__} in epoch {state['epoch']}: some "
                    "are read twice and others never; let units() return the same files in the same order everywhere "
                    "(sort what glob returns)"
                )

    def finish_state_dict(self, state: State) -> State:
        """Return the state of a shard that has nothing left to read in the epoch of `state`."""
        return {**state, "left": [], "shard": [0, 1], "done": 0, "at": None}

    def deaggregate_state_dict(self, aggregated: State, number: int, shards: int) -> State:
        """Return the state of shard `number` of `shards`, given the rest of an epoch in `aggregated`."""
        return {**aggregated, "shard": [number, shards]}


def _units_of_shard(units: int, left: list[list[Any]] | None, of: Sequence[int]) -> list[tuple[int, Any]]:
    """List the units that a shard reads, as (unit, position to start at).

    Args:
        units: number of units.
        left: the units left at a resume, as ranges [first, stop, position in the first]. If None, all units.
        of: number of the shard, and number of shards.
    """
    number, shards = of
    if left is None:
        return [(unit, None) for unit in range(number, units, shards)]
    pairs = [(unit, at if unit == first else None) for first, stop, at in left for unit in range(first, stop)]
    return pairs[number::shards]


def digest_of_units(units: Sequence[Any]) -> str:
    """Compute a digest of the ordered units, including the sizes of the files that they name.

    The digest omits the directory that all files share, so that data may be moved. It also omits memory addresses.
    """
    sizes: dict[str, int | None] = {}

    def note_files(part: Any) -> None:
        if isinstance(part, list | tuple):
            for each in part:
                note_files(each)
        elif isinstance(part, str | os.PathLike) and (path := os.fspath(part)) not in sizes:
            sizes[path] = None
            with suppress(OSError, ValueError):
                sizes[path] = os.path.getsize(path) if os.path.isfile(path) else None

    def described(part: Any) -> str:
        if isinstance(part, list | tuple):
            return f"[{', '.join(map(described, part))}]"
        if isinstance(part, str | os.PathLike) and sizes[path := os.fspath(part)] is not None:
            return f"{path.removeprefix(root)} of {sizes[path]} bytes"
        return re.sub(r" at 0x[0-9a-f]+", "", repr(part))

    note_files(list(units))
    files = [path for path, size in sizes.items() if size is not None]
    root = os.path.commonpath(map(os.path.dirname, files)) if len({os.path.isabs(file) for file in files}) == 1 else ""
    digest = xxhash.xxh3_64()
    for unit in units:
        digest.update(f"{described(unit)}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()

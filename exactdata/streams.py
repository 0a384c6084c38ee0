"""Resume a stream anywhere, on any number of workers and ranks, from two methods of its class."""

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
    """A stream made of *units*, such as files, row groups or blocks of lines; each unit is read by one shard.

    A subclass defines `units` and `read`. The state of a shard is the number of units it has read, and the position
    within the current unit. With another number of workers or ranks, the remaining units, and the rest of the current
    ones, are dealt out to the new shards.

    A state also holds a digest of the units in their order, with the sizes of the files that they name. A resume within
    an epoch refuses another order, and a file that was replaced, grew or shrank. The files may be in another directory.

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
        epoch: the loader's epoch, from 0; without a loader, how many times this shard has come to the end.
    """

    epoch = 0
    begins_anew = True  # the state after the end of an epoch begins the next one, see `fetch.load_end`
    _units: int | None = None  # number of units, from the first sample on
    _content: str | None = None  # digest of the units, from the first sample on
    _left: list[list[Any]] | None = None  # rest of the epoch at the resume, see `_units_of_shard`; None: everything
    _shard: tuple[int, int] | None = None  # (number, shards) that is being read; None between two epochs
    _done = 0  # units of this shard that were read
    _at: Any = None  # position in the next one
    _loaded = False

    def units(self) -> Sequence[Any]:
        """Return all units of this epoch in order, equal on every rank and worker. They may depend on `self.epoch`."""
        raise NotImplementedError

    def read(self, unit: Any, position: Any) -> Iterator[tuple[Any, Any]]:
        """Yield the samples of a unit, each with the position after it.

        Args:
            unit: one of `units()`.
            position: None: from the beginning; else the position that was yielded with the last consumed sample.

        Yields:
            (sample, position): the position is of any type that a checkpoint can hold, but not None.
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
        """Return the rest of this epoch, from the states of the shards that have not ended."""
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
        """Check that the shards of an epoch read the same units. The loader calls this when ranks are saved.

        Raises:
            LoaderStateError: they do not.
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
        """Return the state of a shard with nothing left of the epoch in `state`."""
        return {**state, "left": [], "shard": [0, 1], "done": 0, "at": None}

    def deaggregate_state_dict(self, aggregated: State, number: int, shards: int) -> State:
        """Return the state of shard `number` of `shards`, from the rest of an epoch."""
        return {**aggregated, "shard": [number, shards]}


def _units_of_shard(units: int, left: list[list[Any]] | None, of: Sequence[int]) -> list[tuple[int, Any]]:
    """List (unit, position in it) of everything that a shard reads.

    Args:
        units: number of units.
        left: [first, stop, position in the first] of the units that were left at a resume; None: all of them.
        of: (number, shards).
    """
    number, shards = of
    if left is None:
        return [(unit, None) for unit in range(number, units, shards)]
    pairs = [(unit, at if unit == first else None) for first, stop, at in left for unit in range(first, stop)]
    return pairs[number::shards]


def digest_of_units(units: Sequence[Any]) -> str:
    """Compute a digest of units in their order: of the files that they name, with their sizes, and of everything else.

    The common part of the directories of all files is left out, so that data may be moved. So are addresses in memory.
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

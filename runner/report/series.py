"""Read the numbers of a metrics.jsonl as arrays, and thin them without losing the extremes."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from runner.metrics.records import CARRIED
from runner.system import files

BLOCK_BYTES = 1 << 18  # small: the garbage collector traverses the records of a block
MAX_KINDS = 32  # sets of names in a block up to which equal ones are added together
NUMBERS = frozenset({int, float, type(None)})


@dataclass(frozen=True)
class Series:
    """The values of one number by step.

    Attributes:
        steps: int64 of shape (N,), ascending.
        values: float64 of shape (N,); NaN where the record has null.
    """

    steps: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def last(self) -> float:
        return float(self.values[-1])

    def best(self, lowest: bool) -> tuple[float, int] | None:
        """Return the best value and its first step; None if no value is finite."""
        finite = np.flatnonzero(np.isfinite(self.values))
        if not len(finite):
            return None
        values = self.values[finite]
        at = finite[int(np.argmin(values) if lowest else np.argmax(values))]
        return float(self.values[at]), int(self.steps[at])

    @property
    def is_constant(self) -> bool:
        """Return whether all values are the same finite number."""
        return bool(np.isfinite(self.values[0]) and (self.values == self.values[0]).all())

    def at(self, step: int) -> float:
        """Return the value at `step`, which must have a point."""
        return float(self.values[np.searchsorted(self.steps, step)])

    def thinned(self, points: int, keep: Collection[int] = ()) -> Series:
        """Return about `points` points: the lowest, the highest and a gap of every stretch; all if there are fewer.

        Add points at equal ratios of their indices, for logarithmic axes, and the points at the steps `keep`.
        """
        count = len(self.steps)
        if count <= points:
            return self
        finite = np.isfinite(self.values)
        lowest = highest = self.values
        kept = [_spaced(count, points // 4), np.flatnonzero(np.isin(self.steps, list(keep)))]
        if not finite.all():
            lowest, highest = np.where(finite, self.values, np.inf), np.where(finite, self.values, -np.inf)
            kept.append(_of_each_stretch(finite.view(np.int8), points // 4, np.argmin))
        kept.append(_of_each_stretch(lowest, points // 3, np.argmin))
        kept.append(_of_each_stretch(highest, points // 3, np.argmax))
        indices = np.unique(np.concatenate(kept))
        return Series(self.steps[indices], self.values[indices])


@lru_cache(maxsize=64)
def _spaced(count: int, points: int) -> np.ndarray:
    """Return the first and last of `count` indices, and indices between them at equal ratios."""
    return np.unique(np.concatenate([[0], np.geomspace(1, count, max(points, 2)).astype(np.int64) - 1]))


def _of_each_stretch(values: np.ndarray, stretches: int, extreme: Callable[..., Any]) -> np.ndarray:
    """Return the index of the extreme value in each of `stretches` equal parts, and in the remainder."""
    length = -(-len(values) // max(stretches, 1))
    whole = len(values) // length * length
    found = extreme(values[:whole].reshape(-1, length), axis=1) + np.arange(0, whole, length)
    return found if whole == len(values) else np.append(found, whole + extreme(values[whole:]))


@dataclass
class Columns:
    """Values by name, collected from records that may have different names."""

    wanted: Callable[[str], bool] = lambda name: True
    steps: dict[str, list[np.ndarray]] = field(default_factory=dict)
    values: dict[str, list[np.ndarray]] = field(default_factory=dict)

    def add(self, records: Sequence[dict[str, Any]]) -> None:
        """Add the numbers of records under the step of each; nested names become `a/b`.

        Raises:
            ValueError: a record is not that of a step.
        """
        steps = [record.get("step") if type(record) is dict else None for record in records]
        wrong = (r for r, step in zip(records, steps, strict=True) if type(step) is not int or step < 0)
        if set(map(type, steps)) != {int} or min(steps) < 0:  # type: ignore[type-var,operator]
            raise ValueError(f"{next(wrong)!s:.60} is not the record of a step")
        self._add(records, np.array(steps, dtype=np.int64), "")

    def _add(self, records: Sequence[Mapping[str, Any]], steps: np.ndarray, prefix: str) -> None:
        """Add records with their steps; records with the same names are added together."""
        names = list(map(tuple, records))
        kinds = set(names)
        if len(kinds) > MAX_KINDS:
            self._add_each(records, steps.tolist(), prefix)
            return
        for kind in kinds:
            if len(kinds) == 1:
                self._add_alike(kind, records, steps, prefix)
            else:
                among = [index for index, own in enumerate(names) if own == kind]
                self._add_alike(kind, [records[index] for index in among], steps[among], prefix)

    def _add_alike(
        self, names: tuple[str, ...], records: Sequence[Mapping[str, Any]], steps: np.ndarray, prefix: str
    ) -> None:
        for name in names:
            if (name == "step" and not prefix) or not (
                isinstance(records[0][name], dict) or self.wanted(prefix + name)
            ):
                continue
            values = [record[name] for record in records]
            kinds = set(map(type, values))
            if kinds == {dict}:
                self._add(values, steps, f"{prefix}{name}/")
            elif kinds <= NUMBERS:
                self._append(prefix + name, steps, np.array(values, dtype=np.float64))
            elif kinds & NUMBERS - {type(None)} or dict in kinds:  # mixed types: add each value separately
                for value, step in zip(values, steps, strict=True):
                    if type(value) is dict or type(value) in NUMBERS:
                        self._add_alike((name,), [{name: value}], step[None], prefix)

    def _add_each(self, records: Sequence[Mapping[str, Any]], steps: Sequence[int], prefix: str) -> None:
        """Add records that mostly have different names, such as batches from a few of many sources."""
        found: dict[str, tuple[list[int], list[float | None]] | None] = {}

        def take(record: Mapping[str, Any], step: int, prefix: str) -> None:
            for name, value in record.items():
                kind, full = type(value), prefix + name
                if kind is dict:
                    take(value, step, f"{full}/")
                elif kind in NUMBERS and full != "step":
                    if full not in found:
                        found[full] = ([], []) if self.wanted(full) else None
                    column = found[full]
                    if column is not None:
                        column[0].append(step)
                        column[1].append(value)

        for record, step in zip(records, steps, strict=True):
            take(record, step, prefix)
        for name, column in found.items():
            if column is not None:
                self._append(name, np.array(column[0], dtype=np.int64), np.array(column[1], dtype=np.float64))

    def _append(self, name: str, steps: np.ndarray, values: np.ndarray) -> None:
        self.steps.setdefault(name, []).append(steps)
        self.values.setdefault(name, []).append(values)

    def series(self) -> dict[str, Series]:
        found = {}
        for name, parts in self.steps.items():
            steps, values = np.concatenate(parts), np.concatenate(self.values[name])
            if len(steps) > 1 and (steps[1:] < steps[:-1]).any():
                order = np.argsort(steps, kind="stable")
                steps, values = steps[order], values[order]
            found[name] = Series(steps, values)
        return found


def merged(one: Series, other: Series) -> Series:
    """Merge two series. At a common step, use the value of `one`."""
    steps, values = np.concatenate([one.steps, other.steps]), np.concatenate([one.values, other.values])
    unique, first = np.unique(steps, return_index=True)
    return Series(unique, values[first])


def _carried(one: Series, last: int) -> Series:
    """Add points to a number that is only recorded when it changes, so that lines between points are right.

    Its value is repeated at the step before each change and at the last step. Before its first point it was 0.
    """
    steps = np.concatenate([[0], one.steps, [last + 1]])
    values = np.concatenate([[0.0], one.values])
    gaps = np.flatnonzero(np.diff(steps) > 1)
    return Series(np.insert(one.steps, gaps, steps[gaps + 1] - 1), np.insert(one.values, gaps, values[gaps]))


def read_series(path: Path, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Series]:
    """Read the numbers of a JSON Lines file by name; an incomplete last line is ignored.

    A number that is only recorded when it changes (see `runner.metrics.records`) gets a point at both ends of a change.

    Args:
        path: the file; a missing file has no numbers.
        wanted: whether to read the number of a name.

    Raises:
        ValueError: a line is not the record of a step.
        OSError: the file cannot be read.
    """
    columns = Columns(wanted)
    number = 0
    for data in _blocks(path):
        lines = data.splitlines()
        try:
            columns.add(_records(lines))
        except ValueError as error:
            raise ValueError(f"{path.name} from line {number + 1} on: {error}") from None
        number += len(lines)
    found = columns.series()
    last = max((int(one.steps[-1]) for one in found.values()), default=0)
    return {name: _carried(one, last) if name.startswith(f"{CARRIED}/") else one for name, one in found.items()}


def _blocks(path: Path) -> Iterator[bytes]:
    """Yield the file in blocks that end with a complete line."""
    rest = b""
    try:
        file = files.open_regular(path)
    except FileNotFoundError:
        return
    with file:
        while data := file.read(BLOCK_BYTES):
            end = data.rfind(b"\n") + 1
            if end:
                yield rest + data[:end]
                rest = data[end:]
            else:
                rest += data
            if len(rest) > files.MAX_RECORD_BYTES:
                raise ValueError(f"{path.name} has a line of more than {files.MAX_RECORD_BYTES} bytes")


def _records(lines: Sequence[bytes]) -> list[Any]:
    """Return the parsed lines.

    Raises:
        ValueError: a line is not JSON.
    """
    try:
        return list(map(orjson.loads, lines))
    except orjson.JSONDecodeError:  # NaN and Infinity, which Python's json writes
        pass
    records = []
    for line in lines:
        try:
            records.append(json.loads(line))
        except (ValueError, RecursionError):
            raise ValueError(f"{line[:60].decode(errors='backslashreplace')} is not JSON") from None
    return records

"""Define the points of a search: the range of each setting, and the values drawn for each trial.

Uses only the standard library and seeded random generators.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import product
from typing import Any

DIGITS = 4
"""Significant digits of a number drawn from an interval. There are few, because people read and type these numbers."""
TRIES = 1000
"""The maximum number of draws to find a point that no trial has used."""

Point = dict[str, str]
"""The overrides of a trial: a value for each key, as on the command line."""


def pairs(point: Mapping[str, str]) -> list[str]:
    """Return the overrides of a point as they are typed on the command line."""
    return [f"{key}={value}" for key, value in point.items()]


@dataclass(frozen=True)
class Dimension:
    """The range of one setting, either a list of values or an interval of numbers.

    Attributes:
        key: the dotted key of the setting, or the name of a config group.
        values: the listed values, as on the command line; empty for an interval.
        low: the lower end of the interval, inclusive.
        high: the upper end of the interval, inclusive.
        log: whether to draw the logarithm uniformly.
        whole: whether to draw integers.
        ordered: whether the values are numbers in ascending order.
    """

    key: str
    values: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    whole: bool = False
    ordered: bool = False

    @property
    def size(self) -> float:
        """Return the number of values, infinite for an interval of real numbers."""
        if self.values:
            return len(self.values)
        return self.high - self.low + 1 if self.whole else math.inf if self.low < self.high else 1

    def at(self, share: float) -> str:
        """Return the value at the fraction `share` of the range, where 0 <= share < 1."""
        if self.values:
            return self.values[int(share * len(self.values))]
        if self.whole:
            low, high = int(self.low), int(self.high)
            if self.log:  # each integer gets the logarithms that round to it
                first, last = math.log(low - 0.5), math.log(high + 0.5)
                return str(min(max(round(math.exp(first + share * (last - first))), low), high))
            return str(low + int(share * (high - low + 1)))
        if self.log:
            first, last = math.log(self.low), math.log(self.high)
            return self.written(math.exp(first + share * (last - first)))
        return self.written(self.low + share * (self.high - self.low))

    def written(self, number: float) -> str:
        """Format a number of the interval with few digits, so that it stays inside the interval."""
        rounded = float(f"{number:.{DIGITS}g}")
        return repr(min(max(rounded, self.low), self.high))

    def to_json(self) -> dict[str, Any]:
        """Convert to a JSON entry for search.json."""
        return {**asdict(self), "values": list(self.values)}

    @staticmethod
    def from_json(entry: Mapping[str, Any]) -> Dimension:
        """Create from a JSON entry of search.json.

        Raises:
            TypeError: the entry is malformed.
        """
        return Dimension(**{**entry, "values": tuple(entry.get("values", ()))})


@dataclass(frozen=True)
class Space:
    """All settings that a search varies, in the order of the command."""

    dimensions: tuple[Dimension, ...]

    @cached_property
    def size(self) -> float:
        """Return the number of points, which may be infinite."""
        return math.prod(each.size for each in self.dimensions)

    def grid(self) -> Iterator[Point]:
        """Yield every combination of values. The last key varies fastest. All dimensions must be lists or integers."""
        keys = [each.key for each in self.dimensions]
        for values in product(*map(_enumerated, self.dimensions)):
            yield dict(zip(keys, values, strict=True))

    def random(self, seed: int) -> Iterator[Point]:
        """Yield points drawn uniformly without repetition until none is left. The same seed yields the same points."""
        seen: set[tuple[str, ...]] = set()
        while len(seen) < self.size:
            found = self._draw(seed, len(seen), seen)
            if found is None and math.isinf(self.size):
                return  # the interval is so narrow that all its numbers have the same digits
            if found is None:  # nearly all points of a small space are used: shuffle the remaining ones
                rest = [point for point in self.grid() if tuple(point.values()) not in seen]
                random.Random(f"{seed}/rest").shuffle(rest)
                yield from rest
                return
            seen.add(tuple(found.values()))
            yield found

    def _draw(self, seed: int, number: int, taken: set[tuple[str, ...]]) -> Point | None:
        generator = random.Random(f"{seed}/{number}")
        for _ in range(TRIES if math.isinf(self.size) else 10):
            point = {each.key: each.at(generator.random()) for each in self.dimensions}
            if tuple(point.values()) not in taken:
                return point
        return None


def _enumerated(dimension: Dimension) -> Sequence[str]:
    if dimension.values:
        return dimension.values
    return [str(number) for number in range(int(dimension.low), int(dimension.high) + 1)]

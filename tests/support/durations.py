"""Estimate how long tests take, from `tests/durations.json`: for the time left, and for shards of similar length.

The file has wall seconds for each test function that takes more than a second, the mean of its cases; `other` is the
mean of the rest. `make test-all ARGS=--record-durations` writes it anew.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

FILE = Path(__file__).resolve().parents[1] / "durations.json"
SHORT_S = 1.0


def function_of(name: str) -> str:
    """Return the test function of a test id."""
    return re.sub(r"(\[.*\])?(@[\w-]+)?$", "", name, flags=re.DOTALL)


class Durations:
    """Expected wall seconds of tests.

    Args:
        functions: id of a test function -> seconds of one of its cases.
        other: seconds of a test of any other function.
    """

    def __init__(self, functions: Mapping[str, float], other: float) -> None:
        self.functions = functions
        self._other = other

    @classmethod
    def read(cls) -> Durations:
        """Read the durations from the file."""
        read = json.loads(FILE.read_text())
        return cls(read["functions"], read["other"])

    def of(self, name: str) -> float:
        """Return the expected seconds of a test by its id."""
        return self.functions.get(function_of(name), self._other)

    def shard(self, names: Sequence[str], number: int, count: int) -> list[bool]:
        """Return which of `names` belong to shard `number` of `count`.

        Neighbours stay together: they share fixtures.
        """
        seconds = [max(self.of(name), 0.001) for name in names]
        whole, before, found = sum(seconds), 0.0, []
        for each in seconds:
            middle = before + each / 2
            found.append(min(int(middle * count / whole), count - 1) == number - 1)
            before += each
        return found


def record(measured: Iterable[tuple[str, float]]) -> None:
    """Rewrite the file from (test id, wall seconds). Functions that did not run keep their values."""
    cases: dict[str, list[float]] = defaultdict(list)
    for name, seconds in measured:
        cases[function_of(name)].append(seconds)
    means = {name: sum(each) / len(each) for name, each in cases.items()}
    short = [each for name, mean in means.items() if mean <= SHORT_S for each in cases[name]]
    before = {name: mean for name, mean in Durations.read().functions.items() if name not in means}
    long = before | {name: round(mean, 1) for name, mean in means.items() if mean > SHORT_S}
    content = {"other": round(sum(short) / max(len(short), 1), 4), "functions": dict(sorted(long.items()))}
    FILE.write_text(json.dumps(content, indent=1) + "\n")

"""Define the rules of a search: the settings it varies and how it decides. They never change once it has begun."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from runner.search.points import Dimension, Space


class Algorithm(Enum):
    """The algorithm of a search. It determines how points are chosen and whether trials are paused."""

    random = "random"
    grid = "grid"
    tpe = "tpe"
    asha = "asha"
    asha_tpe = "asha_tpe"

    @property
    def pauses(self) -> bool:
        """Return whether most trials stop at a rung before the last one."""
        return self in (Algorithm.asha, Algorithm.asha_tpe)

    @property
    def learns(self) -> bool:
        """Return whether new points depend on earlier results."""
        return self in (Algorithm.tpe, Algorithm.asha_tpe)


@dataclass(frozen=True)
class Rules:
    """The rules in search.json. Together with the journal they determine every decision, and they never change.

    Attributes:
        maximize: whether high values of the metric are good.
    """

    algorithm: Algorithm
    space: Space
    metric: str
    maximize: bool
    seed: int = 0
    reduction: int = 3
    repeats: int = 1

    def to_json(self) -> dict[str, Any]:
        """Convert to a JSON entry for search.json."""
        space = [each.to_json() for each in self.space.dimensions]
        mode = "max" if self.maximize else "min"
        rest = {key: getattr(self, key) for key in ("metric", "seed", "reduction", "repeats")}
        return {"algorithm": self.algorithm.name, "mode": mode, **rest, "space": space}

    @staticmethod
    def from_json(entry: Mapping[str, Any]) -> Rules:
        """Create from a JSON entry of search.json.

        Raises:
            LookupError, TypeError: the entry is malformed.
        """
        space = Space(tuple(map(Dimension.from_json, entry["space"])))
        rest = {key: entry[key] for key in ("metric", "seed", "reduction", "repeats")}
        return Rules(Algorithm[entry["algorithm"]], space, maximize=entry["mode"] == "max", **rest)

    def rank(self, value: float) -> float:
        """Return a sort key: lower is better, and infinite for a diverged trial."""
        return math.inf if not math.isfinite(value) else -value if self.maximize else value

"""Which fault strikes when: a pure function of the seed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Faults come in this part of a run: at its very end none would be noticed.
BUSY = 0.8


@dataclass(frozen=True)
class Planned:
    """One fault of the plan.

    `step`: it strikes at its moment once so many steps are complete. `fraction` in [0, 1): how far into
    the start of an attempt, where the moment is `start`; which byte, where one is flipped.
    """

    number: int
    kind: str
    moment: str
    step: int
    fraction: float


def make_plan(moments: Mapping[str, Sequence[str]], count: int, steps: int, seed: int) -> list[Planned]:
    """`count` faults in order of their steps, each kind at least once if `count` allows.

    Args:
        moments: the kinds to choose from, and the moments each may strike at.
        count: how many faults.
        steps: length of the run.
        seed: the same seed gives the same plan.
    """
    draw = random.Random(f"plan {seed}")
    kinds = list(moments)
    draw.shuffle(kinds)
    chosen = kinds[:count] + draw.choices(kinds, k=max(0, count - len(kinds)))
    draw.shuffle(chosen)
    at = targets(draw, count, steps)
    return [
        Planned(number, kind, draw.choice(list(moments[kind])), step, draw.random())
        for number, (kind, step) in enumerate(zip(chosen, at, strict=True), start=1)
    ]


def replan(left: Sequence[Planned], steps: int, seed: int, again: int) -> list[Planned]:
    """The faults for which a run was too short, spread over another run of the same length.

    Args:
        again: how often this was done; each time the faults come earlier.
    """
    draw = random.Random(f"plan {seed} again {again}")
    order = list(left)
    draw.shuffle(order)
    at = targets(draw, len(order), max(2, int(steps * 0.7**again)))
    return [
        Planned(fault.number, fault.kind, fault.moment, step, fault.fraction)
        for fault, step in zip(order, at, strict=True)
    ]


def targets(draw: random.Random, count: int, steps: int) -> list[int]:
    """`count` steps in ascending order, one in each part of the busy time of a run of `steps` steps."""
    last = max(1, int(steps * BUSY))
    return [min(last, max(1, round((index + draw.random()) * last / count))) for index in range(count)]

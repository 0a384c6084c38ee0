"""Plan when each fault is injected, as a pure function of the seed, and record the outcomes."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

# The part of a run in which faults are injected: no step would follow a fault at the very end.
BUSY = 0.8


@dataclass(frozen=True)
class PlannedFault:
    """One fault of the plan.

    Attributes:
        number: counted from 1.
        kind: the name of the kind of fault.
        trigger: the name of the trigger to wait for.
        step: the trigger counts only once this many steps are complete.
        fraction: in [0, 1): how far into the start of an attempt, if the trigger is `start`; which byte, if one is
            flipped.
    """

    number: int
    kind: str
    trigger: str
    step: int
    fraction: float


@dataclass
class Outcome:
    """The outcome of one injected fault.

    Attributes:
        step: complete steps of the run when the fault was injected.
        attempt: the attempt in progress then.
        answer: what the run did, in words.
        answered: whether that is what the fault requires.
        resumes_at: the step at which the next attempt has to resume; None if there is none.
        steps_lost: steps from there to `step`, which are trained again.
    """

    number: int
    kind: str
    trigger: str
    run: str
    step: int
    attempt: int | None
    answer: str
    answered: bool
    resumes_at: int | None = None
    steps_lost: int = 0


def make_plan(triggers: Mapping[str, Sequence[str]], count: int, steps: int, seed: int) -> list[PlannedFault]:
    """Plan `count` faults, ordered by step, with each kind at least once if `count` allows.

    Args:
        triggers: the kinds to choose from, each with its possible triggers.
        count: how many faults.
        steps: length of the run.
        seed: the same seed gives the same plan.
    """
    draw = random.Random(f"plan {seed}")
    kinds = list(triggers)
    draw.shuffle(kinds)
    chosen = kinds[:count] + draw.choices(kinds, k=max(0, count - len(kinds)))
    draw.shuffle(chosen)
    return [
        PlannedFault(number, kind, draw.choice(list(triggers[kind])), step, draw.random())
        for number, (kind, step) in enumerate(zip(chosen, spread(draw, count, steps), strict=True), start=1)
    ]


def replan(left: Sequence[PlannedFault], steps: int, seed: int, round_number: int) -> list[PlannedFault]:
    """Spread the faults that a run was too short for over another run of the same length.

    Args:
        left: the faults that were not injected.
        steps: length of the run.
        seed: the same seed gives the same plan.
        round_number: how often this was done; each time the faults come earlier.
    """
    draw = random.Random(f"plan {seed} again {round_number}")
    order = list(left)
    draw.shuffle(order)
    at = spread(draw, len(order), max(2, int(steps * 0.7**round_number)))
    return [replace(fault, step=step) for fault, step in zip(order, at, strict=True)]


def spread(draw: random.Random, count: int, steps: int) -> list[int]:
    """Draw `count` steps in ascending order, one in each part of the busy time of a run of `steps` steps."""
    last = max(1, int(steps * BUSY))
    return [min(last, max(1, round((index + draw.random()) * last / count))) for index in range(count)]

"""Plan when each fault is injected, as a pure function of the seed, and define the record of an outcome."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

# Faults are injected in this first part of a run, because no step would follow a fault at the very end.
BUSY = 0.8


@dataclass(frozen=True)
class PlannedFault:
    """One planned fault.

    Attributes:
        number: the number of the fault, from 1.
        kind: the name of the kind of fault.
        trigger: the name of the trigger to wait for.
        step: the earliest step; the trigger is ignored until this many steps are complete.
        fraction: a number in [0, 1). It chooses how far into the start of an attempt the fault is injected if the
            trigger is `start`, or which byte is flipped.
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
        step: the number of complete steps when the fault was injected.
        attempt: the number of the attempt that was in progress.
        answer: a description of how the run reacted.
        answered: whether the run reacted as the fault requires.
        resumes_at: the step at which the next attempt must resume; None if nothing is required.
        steps_lost: the number of steps between `resumes_at` and `step`, which are trained again.
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
    """Plan `count` faults, ordered by step. Each kind occurs at least once if `count` is large enough.

    Args:
        triggers: the possible triggers of each kind of fault, by kind.
        count: the number of faults.
        steps: the length of the run.
        seed: the seed of the plan. The same seed gives the same plan.
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
    """Distribute the faults that a run was too short for over another run of the same length.

    Args:
        left: the faults that were not injected.
        steps: the length of the run.
        seed: the seed of the plan. The same seed gives the same plan.
        round_number: how many times the faults have been replanned; each time they are injected earlier.
    """
    draw = random.Random(f"plan {seed} again {round_number}")
    order = list(left)
    draw.shuffle(order)
    at = spread(draw, len(order), max(2, int(steps * 0.7**round_number)))
    return [replace(fault, step=step) for fault, step in zip(order, at, strict=True)]


def spread(draw: random.Random, count: int, steps: int) -> list[int]:
    """Draw `count` steps in ascending order, one in each of `count` equal parts of the run's first `BUSY` fraction."""
    last = max(1, int(steps * BUSY))
    return [min(last, max(1, round((index + draw.random()) * last / count))) for index in range(count)]

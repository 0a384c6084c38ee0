"""Draw the strikes of a story from a seed. A search mutates them, and shrinking removes some.

A text names a schedule. `17` is the schedule of seed 17; `17.3` is that, changed by mutation 3; `17.3.8` that, changed
by mutation 8. The text alone reproduces the story.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from runner.errors import UserError

SCHEDULE = re.compile(r"\d{1,18}(\.\d{1,9})*")


@dataclass(frozen=True, order=True)
class Strike:
    """One event that disturbs a process, a machine or the disk.

    Attributes:
        at: the step before which it happens.
        kind: kind of the strike.
        choice: a number from 0 to 1 that chooses its target and details.
    """

    at: int
    kind: str
    choice: float


@dataclass(frozen=True)
class Schedule:
    """One story of a scenario: the same schedule is the same story.

    Attributes:
        text: the name, see above.
        strikes: all strikes in order.
        without: indices of the strikes to leave out.
        switching: probability that another thread continues after a step. None: the seed draws it.
    """

    text: str
    strikes: tuple[Strike, ...]
    without: frozenset[int] = frozenset()
    switching: float | None = None

    @property
    def seed(self) -> str:
        """Return the seed of everything but the strikes."""
        return self.text.partition(".")[0]

    @property
    def carried_out(self) -> list[Strike]:
        """Return the strikes that are not left out."""
        return [strike for number, strike in enumerate(self.strikes) if number not in self.without]


def schedule(text: str, kinds: Sequence[str], horizon: int, without: Sequence[int] = ()) -> Schedule:
    """Return the schedule of this name.

    Args:
        text: the name, see above.
        kinds: the kinds of strikes of the scenario.
        horizon: approximate number of steps of a story without strikes.
        without: strikes to leave out.

    Raises:
        UserError: the text is malformed.
    """
    if not SCHEDULE.fullmatch(text):
        raise UserError(f"seed {text!r}: write a whole number, or one that a search printed, such as 17.3")
    seed, *mutations = text.split(".")
    strikes = _draw(Random(f"strikes {seed}"), kinds, horizon)
    for mutation in mutations:
        strikes = _changed(strikes, Random(f"mutation {mutation}"), kinds, horizon)
    return Schedule(text, tuple(sorted(strikes)), frozenset(without))


def _draw(random: Random, kinds: Sequence[str], horizon: int) -> list[Strike]:
    count = random.choice((0, 1, 1, 2, 2, 3, 4, 6, 10))
    # In some schedules the same strike happens again and again.
    known = [random.choice(kinds)] if random.random() < 0.3 else kinds
    return [_strike(random, known, horizon) for _ in range(count)]


def _strike(random: Random, kinds: Sequence[str], horizon: int) -> Strike:
    return Strike(random.randrange(1, int(horizon * 1.5)), random.choice(kinds), random.random())


def _changed(strikes: Sequence[Strike], random: Random, kinds: Sequence[str], horizon: int) -> list[Strike]:
    """Return the strikes with a mutation: some moved a little, one added, one removed, one with another target."""
    found = list(strikes)
    for _ in range(random.choice((1, 1, 2, 3))):
        what = random.randrange(4)
        if what == 0 or not found:
            found.append(_strike(random, kinds, horizon))
            continue
        index = random.randrange(len(found))
        if what == 1:
            del found[index]
        elif what == 2:
            found[index] = replace(found[index], at=max(1, found[index].at + random.randrange(-20, 21)))
        else:
            found[index] = replace(found[index], choice=random.random())
    return found

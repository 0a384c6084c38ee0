"""What befalls the processes of a story, and when: drawn from a seed, changed by a search, thinned out by shrinking.

A schedule is named by a text. `17` is what seed 17 draws; `17.3` is that, changed by mutation 3; `17.3.8` that, changed
by mutation 8. The text alone brings the story back.
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
    """One thing that befalls somebody.

    Attributes:
        at: the step before which it happens.
        kind: what.
        choice: from 0 to 1, chooses whom it befalls and how.
    """

    at: int
    kind: str
    choice: float


@dataclass(frozen=True)
class Schedule:
    """One story of a scenario: the same schedule is the same story.

    Attributes:
        text: names it, see above.
        strikes: what befalls the processes, in order.
        without: numbers of the strikes that are left out.
        switching: how likely another thread continues after a step; None: as the seed draws.
    """

    text: str
    strikes: tuple[Strike, ...]
    without: frozenset[int] = frozenset()
    switching: float | None = None

    @property
    def seed(self) -> str:
        """What decides everything but the strikes."""
        return self.text.partition(".")[0]

    @property
    def carried_out(self) -> list[Strike]:
        """The strikes that are not left out."""
        return [strike for number, strike in enumerate(self.strikes) if number not in self.without]


def schedule(text: str, kinds: Sequence[str], horizon: int, without: Sequence[int] = ()) -> Schedule:
    """The schedule of this name.

    Args:
        text: see above.
        kinds: of strikes, that the scenario knows.
        horizon: about how many steps a story of it takes without any.
        without: strikes to leave out.

    Raises:
        UserError: it is no such text.
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
    # In some weather the same thing happens over and over.
    known = [random.choice(kinds)] if random.random() < 0.3 else kinds
    return [_strike(random, known, horizon) for _ in range(count)]


def _strike(random: Random, kinds: Sequence[str], horizon: int) -> Strike:
    return Strike(random.randrange(1, int(horizon * 1.5)), random.choice(kinds), random.random())


def _changed(strikes: Sequence[Strike], random: Random, kinds: Sequence[str], horizon: int) -> list[Strike]:
    """Some of the strikes a little earlier or later, one more, one less, one that befalls somebody else."""
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

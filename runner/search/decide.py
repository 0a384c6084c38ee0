"""Decide what a search does next, as a pure function of its journal, so that every decision can be checked later.

Uses ASHA as in Li et al. 2020, "A System for Massively Parallel Hyperparameter Tuning", Algorithm 2. Starting at the
highest rung, promote the best trial that is among the top 1/reduction of a rung and has not been promoted yet. If there
is no such trial, start a new one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from runner.errors import UserError
from runner.search.journal import DECISIONS, DONE, PROMOTE, START, WAIT, Entry, Journal, Trial
from runner.search.points import Point
from runner.search.rules import Algorithm, Rules


@dataclass(frozen=True)
class Decision:
    """A decision of a search: start the next trial, promote a trial to a rung, wait for results, or end the search."""

    what: str
    trial: int | None = None
    rung: int | None = None

    def matches(self, entry: Entry) -> bool:
        """Return whether an entry of the journal records this decision."""
        return self.what == entry["entry"] and all(
            wanted is None or entry.get(key) == wanted for key, wanted in (("trial", self.trial), ("rung", self.rung))
        )


def decide(rules: Rules, journal: Journal) -> Decision:
    """Return the next decision. It does not include tasks that other processes have already begun."""
    goes_on = not gives_up(journal)
    if rules.algorithm.pauses and goes_on:
        for rung in reversed(range(len(journal.rungs) - 1)):
            if (trial := promotable(rules, journal, rung)) is not None:
                return Decision(PROMOTE, trial.number, rung + 1)
    if len(journal.trials) < journal.limit and goes_on:
        return Decision(START, len(journal.trials))
    return Decision(WAIT if journal.outstanding else DONE)


def promotable(rules: Rules, journal: Journal, rung: int) -> Trial | None:
    """Return the best trial that may be promoted from `rung` and has not been promoted yet, or None."""
    values = journal.at(rung)
    best = sorted(values, key=lambda number: (rules.rank(values[number]), number))
    for number in best[: len(values) // rules.reduction]:
        trial = journal.trials[number]
        if trial.rung == rung and not trial.over and math.isfinite(values[number]):
            return trial
    return None


def most_promotions(rules: Rules, journal: Journal) -> int:
    """Return how many trials the results so far would allow to be promoted now."""
    if not rules.algorithm.pauses:
        return 0
    below = range(len(journal.rungs) - 1)
    beyond = [sum(trial.rung > rung for trial in journal.trials) for rung in below]
    return sum(max(0, len(journal.at(rung)) // rules.reduction - beyond[rung]) for rung in below)


def gives_up(journal: Journal) -> bool:
    """Return whether to stop starting and promoting trials, because all of them seem to have the same problem.

    Give up after several trials in a row failed with errors other than crashes, e.g. a lost disk. While no trial has a
    result, also give up if several trials failed, or one failed because the metric is missing.
    """
    if journal.errors >= GIVE_UP:
        return True
    failed = [trial for trial in journal.trials if trial.failed is not None]
    least = 1 if any(how == "metric" for trial in failed for _, how in trial.failures) else GIVE_UP
    return len(failed) >= least and not any(trial.results for trial in journal.trials)


GIVE_UP = 3


class Points:
    """The points of a search in the order of its trials. Points that were returned before are remembered."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        space = rules.space
        self._source: Iterator[Point] = space.grid() if rules.algorithm is Algorithm.grid else space.random(rules.seed)
        self._known: list[Point] = []

    def point(self, journal: Journal, number: int) -> Point:
        """Return the point of trial `number`, given the journal as it was before the trial began.

        Raises:
            UserError: the package that chooses points is not installed, or the space has too few points.
        """
        if self._rules.algorithm.learns:
            from runner.search.optuna import suggest

            return suggest(self._rules, journal, number)
        self._known += islice(self._source, max(0, number + 1 - len(self._known)))
        if number >= len(self._known):
            raise UserError(f"the space has only {len(self._known)} points: set search.trials={len(self._known)}")
        return self._known[number]


def replay(rules: Rules, entries: list[Entry]) -> list[str]:
    """Repeat every decision in a journal, and return one line for each that comes out differently."""
    journal, points, wrong = Journal(rules.repeats), Points(rules), list[str]()
    for number, entry in enumerate(entries, start=1):
        if entry["entry"] in DECISIONS:
            again = decide(rules, journal)
            found = " ".join(str(entry[key]) for key in ("entry", "trial", "rung") if key in entry)
            if not again.matches(entry):
                wrong.append(f"entry {number} is {found}, and the entries before it give {again}")
            elif again.what == START and (point := points.point(journal, len(journal.trials))) != entry["values"]:
                wrong.append(f"entry {number} begins trial {again.trial} with {entry['values']}, not with {point}")
        journal.add(entry)
    return wrong


@dataclass(frozen=True)
class Best:
    """The best trial by its result at the highest rung with results."""

    trial: Trial
    rung: int
    value: float


def best(rules: Rules, journal: Journal) -> Best | None:
    """Return the best trial so far that has not diverged, or None if no trial has a finite result."""
    results = [journal.at(rung) for rung in range(len(journal.rungs))]
    diverged = {number for values in results for number, value in values.items() if not math.isfinite(value)}
    for rung in reversed(range(len(journal.rungs))):
        values = {number: value for number, value in results[rung].items() if number not in diverged}
        if values:
            number = min(values, key=lambda each: (rules.rank(values[each]), each))
            return Best(journal.trials[number], rung, values[number])
    return None

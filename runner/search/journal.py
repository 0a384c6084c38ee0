"""Read and write the journal of a search: its decisions and results, in the order they were written.

    {"entry": "settings", "trials": 27, "rungs": [100, 300, 900]}        by a command; `null` means the end of the run
    {"entry": "start", "trial": 0, "values": {"optimizer.lr": "0.003"}, "repeat": 0, "slot": 0, "fence": 1}
    {"entry": "promote", "trial": 0, "rung": 1, "repeat": 0, "slot": 0, "fence": 1}
    {"entry": "take", "trial": 0, "repeat": 1, "step": 70, "slot": 1, "fence": 4}   a repeat that no live slot trains
    {"entry": "run", "trial": 0, "repeat": 0, "run": "NAME"}             its directory, next to the search
    {"entry": "result", "trial": 0, "repeat": 0, "rung": 0, "step": 100, "value": 2.3}     `null` if diverged
    {"entry": "failed", "trial": 0, "repeat": 0, "step": 70, "how": "crash", "reason": "..."}   or `killed`, `error`
    {"entry": "withdrawn", "trial": 0}
    {"entry": "retry", "trial": 0}                                       by a command, for a failed or withdrawn trial
    {"entry": "wait" | "done", "slot": 0, "fence": 1}                    nothing to train at present, or ever again

These lines and search.json determine the complete state of a search. Imports neither torch nor numpy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from runner.errors import RunDirError
from runner.search.points import Point

SETTINGS, START, PROMOTE, TAKE, RUN = "settings", "start", "promote", "take", "run"
RESULT, FAILED, WITHDRAWN, RETRY, WAIT, DONE = "result", "failed", "withdrawn", "retry", "wait", "done"
DECISIONS = (START, PROMOTE, WAIT, DONE)

CRASHES = 3
"""The number of crashes in a row without progress after which a trial has failed."""
KILLS = 20
"""The same limit for kills of the training process in a live slot. Higher, because the trial is rarely the cause."""
LOSSES = 50
"""The same limit for slots that end while they train the trial, e.g. by preemption."""

Entry = dict[str, Any]
Rungs = tuple[int | None, ...]


@dataclass(frozen=True)
class Claim:
    """The slot that trains one repeat of a trial, identified by its number and the fence of its lease."""

    slot: int
    fence: int


@dataclass(frozen=True)
class Result:
    """A trial's result at a rung. `value` is None if the trial diverged."""

    step: int
    value: float | None


@dataclass
class Trial:
    """One point of the search, with everything the journal records about it.

    Attributes:
        number: the index of the trial, from 0 in the order in which trials began.
        values: the point of the trial.
        rung: the highest rung that the trial was started for or promoted to.
        runs: the name of the run of each repeat, relative to the search's parent folder.
        results: the result for each repeat and rung.
        claims: the slot that currently trains each repeat.
        failed: why the trial is not trained any further; None if it has not failed.
        withdrawn: whether a user has withdrawn the trial.
        retried: whether a user has requested the trial again after that.
    """

    number: int
    values: Point
    rung: int = 0
    runs: dict[int, str] = field(default_factory=dict)
    results: dict[tuple[int, int], Result] = field(default_factory=dict)
    claims: dict[int, Claim] = field(default_factory=dict)
    failed: str | None = None
    withdrawn: bool = False
    retried: bool = False
    failures: dict[tuple[int, str], int] = field(default_factory=dict)  # by repeat and kind, since the last progress
    reached: dict[int, int] = field(default_factory=dict)  # by repeat: the step that was saved at the last failure

    @property
    def over(self) -> bool:
        """Return whether the trial is over, unless a user requests it again."""
        return self.failed is not None or self.withdrawn

    def lacks(self, repeats: int) -> list[int]:
        """Return the repeats that have no result at the trial's rung."""
        return [] if self.over else [each for each in range(repeats) if (each, self.rung) not in self.results]

    def value(self, rung: int, repeats: int) -> float | None:
        """Return the mean result of all repeats at a rung: nan if a repeat diverged, None if a result is missing."""
        found = [self.results.get((repeat, rung)) for repeat in range(repeats)]
        values = [math.nan if each.value is None else each.value for each in found if each is not None]
        return math.fsum(values) / repeats if len(values) == repeats else None


MALFORMED = (ValueError, TypeError, LookupError, AttributeError, RecursionError)


def _malformed(text: str, repeats: int, where: object) -> RunDirError:
    """Return an error, with a remedy, for the first line that is invalid after the lines before it."""
    made, reason = Journal(repeats), ""
    try:
        for line in text.splitlines():
            made.add(json.loads(line))
    except MALFORMED as error:
        reason = f"{type(error).__name__}: {error}"
    return RunDirError(
        f"{where}, line {len(made.entries) + 1}: malformed ({reason:.200}): restore it from a copy, or remove "
        "this line and those after it: the command of the search then goes on from there, with the results that its "
        "runs have"
    )


@dataclass
class Journal:
    """The state of a search, computed from its journal entries.

    Attributes:
        repeats: the number of seeds per point.
        entries: all entries so far.
        trials: the trials that have begun, ordered by number.
        limit: the maximum number of trials.
        rungs: the step of each rung.
        errors: the number of trials in a row that failed with an error other than a crash, without a result in between.
    """

    repeats: int = 1
    entries: list[Entry] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    limit: int = 0
    rungs: Rungs = (None,)
    errors: int = 0

    @staticmethod
    def parse(text: str, repeats: int, where: object = "the journal") -> Journal:
        """Parse the text of a journal.

        Raises:
            RunDirError: the journal is malformed; the message contains `where`.
        """
        made = Journal(repeats)
        try:
            for entry in json.loads(f"[{','.join(text.splitlines())}]"):
                made.add(entry)
        except MALFORMED:
            raise _malformed(text, repeats, where) from None
        return made

    def text(self) -> str:
        """Return the journal as text, one line per entry."""
        return "".join(f"{json.dumps(entry)}\n" for entry in self.entries)

    def add(self, entry: Entry) -> None:
        """Add an entry and update the state.

        Raises:
            LookupError, TypeError, ValueError: the entry is invalid after the entries before it.
        """
        kind = entry["entry"]
        if kind == SETTINGS:
            self.limit, self.rungs = int(entry["trials"]), tuple(entry["rungs"])
        elif kind == START:
            if entry["trial"] != len(self.trials):
                raise ValueError(f"trial {entry['trial']} begins after trial {len(self.trials) - 1}")
            self.trials.append(Trial(entry["trial"], {str(key): str(text) for key, text in entry["values"].items()}))
        if kind not in (SETTINGS, WAIT, DONE):
            self._of_trial(kind, entry)
        self.entries.append(entry)

    def _of_trial(self, kind: str, entry: Mapping[str, Any]) -> None:
        trial, repeat = self.trials[entry["trial"]], entry.get("repeat", 0)
        if kind == PROMOTE:
            trial.rung = entry["rung"]
        if kind == TAKE and repeat in trial.claims:
            self._failed(trial, repeat, {**entry, "how": "lost", "reason": "the slots that trained it have ended"})
        if kind in (START, PROMOTE, TAKE):
            trial.claims[repeat] = Claim(entry["slot"], entry["fence"])
        elif kind == RUN:
            trial.runs[repeat] = entry["run"]
        elif kind == RESULT:
            step, value = int(entry["step"]), entry["value"]
            trial.results[repeat, entry["rung"]] = Result(step, None if value is None else float(value))
            trial.retried, self.errors = trial.retried and bool(trial.lacks(self.repeats)), 0
            trial.claims.pop(repeat, None)
            trial.failures = {key: count for key, count in trial.failures.items() if key[0] != repeat}
        elif kind == FAILED:
            self._failed(trial, repeat, entry)
            self.errors += entry["how"] in ("error", "metric")
        elif kind == WITHDRAWN:
            trial.withdrawn, trial.retried, trial.claims = True, False, {}
        elif kind == RETRY:
            self.errors = 0
            trial.failed, trial.withdrawn, trial.retried, trial.failures = None, False, True, {}

    @staticmethod
    def _failed(trial: Trial, repeat: int, entry: Mapping[str, Any]) -> None:
        how, reason, step = entry["how"], entry["reason"], int(entry.get("step", 0))
        trial.claims.pop(repeat, None)
        if step > trial.reached.get(repeat, 0):
            trial.reached[repeat] = step
            trial.failures = {key: count for key, count in trial.failures.items() if key[0] != repeat}
        count = trial.failures[repeat, how] = trial.failures.get((repeat, how), 0) + 1
        most = {"crash": CRASHES, "killed": KILLS, "lost": LOSSES}.get(how, 1)
        if count >= most:
            trial.failed = reason if most == 1 else f"{reason} ({count} times in a row without progress)"

    def at(self, rung: int) -> dict[int, float]:
        """Return the complete results at a rung, by trial: the mean over the repeats, or nan for a diverged trial."""
        found = {trial.number: trial.value(rung, self.repeats) for trial in self.trials}
        return {number: value for number, value in found.items() if value is not None}

    def results(self, trial: Trial) -> list[tuple[int, float]]:
        """Return the (step, result) pairs of a trial, from the first rung on. nan means that the trial diverged."""
        values = [(rung, trial.value(rung, self.repeats)) for rung in range(len(self.rungs))]
        return [(trial.results[0, rung].step, value) for rung, value in values if value is not None]

    @property
    def outstanding(self) -> list[Trial]:
        """Return the trials that have no result at their current rung."""
        return [trial for trial in self.trials if trial.lacks(self.repeats)]

    def steps_trained(self) -> int:
        """Return how many steps were trained for the results so far. Each step of a run is counted once."""
        reached: dict[tuple[int, int], int] = {}
        for trial in self.trials:
            for (repeat, _), result in trial.results.items():
                key = trial.number, repeat
                reached[key] = max(reached.get(key, 0), result.step)
        return sum(reached.values())

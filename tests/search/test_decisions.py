"""A search's decisions against an independent ASHA, its handling of failures, and the replay of its journal."""

from __future__ import annotations

import json
import math
import time
from random import Random
from typing import Any

import pytest

from runner.errors import RunDirError
from runner.search.decide import Points, best, decide, most_promotions, replay
from runner.search.journal import CRASHES, KILLS, LOSSES, Journal
from runner.search.points import Dimension, Space
from runner.search.rules import Algorithm, Rules

SPACE = Space((Dimension("lr", low=1e-4, high=1e-1, log=True),))


def rules(algorithm: Algorithm = Algorithm.asha, **options: Any) -> Rules:
    return Rules(algorithm, SPACE, "eval_loss", **{"maximize": False, **options})


def begun(trials: int = 27, rungs: tuple[int | None, ...] = (100, 300, 900), repeats: int = 1) -> Journal:
    journal = Journal(repeats)
    journal.add({"entry": "settings", "trials": trials, "rungs": list(rungs)})
    return journal


class OtherAsha:
    """ASHA over a rung's sorted results, written from the paper alone."""

    def __init__(self, trials: int, rungs: int, reduction: int) -> None:
        self.trials, self.rungs, self.reduction = trials, rungs, reduction
        self.started = 0
        self.results: list[dict[int, float]] = [{} for _ in range(rungs)]
        self.promoted: list[set[int]] = [set() for _ in range(rungs)]

    def job(self) -> tuple[int, int] | None:
        for rung in range(self.rungs - 2, -1, -1):
            ordered = sorted((value, trial) for trial, value in self.results[rung].items())
            for value, trial in ordered[: len(ordered) // self.reduction]:
                if trial not in self.promoted[rung] and value < math.inf:
                    self.promoted[rung].add(trial)
                    return trial, rung + 1
        if self.started == self.trials:
            return None
        self.started += 1
        return self.started - 1, 0


@pytest.mark.parametrize("seed", range(12))
def test_decisions_are_those_of_an_independent_asha(seed: int) -> None:
    """Use any number of workers, results in any order, and trials that diverge."""
    random = Random(seed)
    trials, reduction, workers = random.choice((9, 27, 40)), random.choice((2, 3, 4)), random.choice((1, 2, 7))
    ours, other, made = begun(trials), OtherAsha(trials, 3, reduction), rules(reduction=reduction)
    running: list[tuple[int, int]] = []
    trained = {}
    while True:
        decision, job = decide(made, ours), other.job()
        if job is None:
            assert decision.what in ("wait", "done")
            if not running:
                break
        else:
            assert (decision.trial, decision.rung or 0) == job
            kind = "start" if job[1] == 0 else "promote"
            more: dict[str, Any] = {"values": {}} if kind == "start" else {"rung": job[1]}
            ours.add({"entry": kind, "trial": job[0], "slot": 0, "fence": 1, **more})
            running.append(job)
        while running and (len(running) >= workers or job is None):
            trial, rung = running.pop(random.randrange(len(running)))
            value = random.choice((None, *[random.random()] * 9))
            step = (100, 300, 900)[rung]
            ours.add({"entry": "result", "trial": trial, "rung": rung, "step": step, "value": value})
            other.results[rung][trial] = math.inf if value is None else value
            trained[trial] = step
            if job is not None:
                break
    assert decide(made, ours).what == "done"
    assert ours.steps_trained() == sum(trained.values())
    assert len(ours.trials) == trials


def test_high_is_good_with_mode_max() -> None:
    journal = begun(3, (1, 2))
    for number, value in enumerate((0.1, 0.9, 0.5)):
        journal.add({"entry": "start", "trial": number, "values": {}, "slot": 0, "fence": 1})
        journal.add({"entry": "result", "trial": number, "rung": 0, "step": 1, "value": value})
    assert decide(rules(maximize=True), journal).trial == 1
    assert decide(rules(), journal).trial == 0
    found = best(rules(maximize=True), journal)
    assert found is not None
    assert (found.trial.number, found.value) == (1, 0.9)


def test_a_trial_that_diverges_later_is_not_the_best() -> None:
    journal = begun(2, (1, 2))
    for number, value in enumerate((0.5, 1.0)):
        journal.add({"entry": "start", "trial": number, "values": {}, "slot": 0, "fence": 1})
        journal.add({"entry": "result", "trial": number, "rung": 0, "step": 1, "value": value})
    journal.add({"entry": "promote", "trial": 0, "rung": 1, "slot": 0, "fence": 1})
    journal.add({"entry": "result", "trial": 0, "rung": 1, "step": 2, "value": None})
    found = best(rules(), journal)
    assert found is not None
    assert (found.trial.number, found.rung, found.value) == (1, 0, 1.0)


def test_repeats_decide_by_their_mean_once_all_are_there() -> None:
    journal = begun(3, (1, 2), repeats=2)
    for number, values in enumerate(((0.0, 1.0), (0.4, 0.4), (0.3, None))):
        journal.add({"entry": "start", "trial": number, "values": {}, "slot": 0, "fence": 1})
        for repeat, value in enumerate(values):
            assert [trial.number for trial in journal.outstanding] == [number]
            journal.add({"entry": "result", "trial": number, "repeat": repeat, "rung": 0, "step": 1, "value": value})
    assert journal.at(0)[1] == 0.4
    assert math.isnan(journal.at(0)[2])
    assert decide(rules(repeats=2), journal).trial == 1


@pytest.mark.parametrize(("how", "most"), [("crash", CRASHES), ("killed", KILLS), ("error", 1)])
def test_a_trial_fails_after_so_many_failures_in_a_row(how: str, most: int) -> None:
    journal = begun(1)
    journal.add({"entry": "start", "trial": 0, "values": {}, "slot": 0, "fence": 1})
    for _ in range(most):
        assert journal.trials[0].failed is None
        assert journal.outstanding
        journal.add({"entry": "failed", "trial": 0, "how": how, "reason": "boom"})
    assert str(journal.trials[0].failed).startswith("boom")
    assert decide(rules(), journal).what == "done"
    journal.add({"entry": "retry", "trial": 0})
    assert decide(rules(), journal).what == "wait"


def test_kills_use_up_no_budget_for_crashes() -> None:
    journal = begun(1)
    journal.add({"entry": "start", "trial": 0, "values": {}, "slot": 0, "fence": 1})
    for how in ("crash", "killed", "killed", "crash", "killed"):
        journal.add({"entry": "failed", "trial": 0, "how": how, "reason": how})
    assert journal.trials[0].failed is None


def test_progress_begins_the_count_of_failures_anew() -> None:
    journal = begun(1)
    journal.add({"entry": "start", "trial": 0, "values": {}, "slot": 0, "fence": 1})
    for step in range(4 * CRASHES):
        journal.add({"entry": "failed", "trial": 0, "step": step // 2, "how": "crash", "reason": "boom"})
    assert journal.trials[0].failed is None


def test_a_result_begins_the_count_of_crashes_anew() -> None:
    journal = begun(1, (1, 2))
    journal.add({"entry": "start", "trial": 0, "values": {}, "slot": 0, "fence": 1})
    for _ in range(CRASHES - 1):
        journal.add({"entry": "failed", "trial": 0, "how": "crash", "reason": "boom"})
    journal.add({"entry": "result", "trial": 0, "rung": 0, "step": 1, "value": 1.0})
    journal.add({"entry": "promote", "trial": 0, "rung": 1, "slot": 0, "fence": 1})
    journal.add({"entry": "failed", "trial": 0, "how": "crash", "reason": "boom"})
    assert journal.trials[0].failed is None


def test_no_trial_begins_after_all_first_trials_failed() -> None:
    journal = begun(9)
    for number in range(3):
        assert decide(rules(), journal).trial == number
        journal.add({"entry": "start", "trial": number, "values": {}, "slot": 0, "fence": 1})
        journal.add({"entry": "failed", "trial": number, "how": "error", "reason": "no such file"})
    assert decide(rules(), journal).what == "done"


def test_a_trial_that_takes_its_slots_down_fails_in_the_end() -> None:
    """Such a trial may use up all memory of the job."""
    journal = begun(1)
    journal.add({"entry": "start", "trial": 0, "values": {}, "slot": 0, "fence": 0})
    for fence in range(1, LOSSES):
        journal.add({"entry": "take", "trial": 0, "repeat": 0, "step": 7, "slot": 0, "fence": fence})
    assert not journal.trials[0].over
    journal.add({"entry": "take", "trial": 0, "repeat": 0, "step": 8, "slot": 0, "fence": LOSSES})
    for fence in range(LOSSES + 1, 2 * LOSSES):
        journal.add({"entry": "take", "trial": 0, "repeat": 0, "step": 8, "slot": 0, "fence": fence})
    assert str(journal.trials[0].failed).startswith("the slots that trained it have ended (50 times")


def test_no_more_slots_start_than_there_are_promotions() -> None:
    journal = begun(9, (1, 2, 3))
    for number in range(9):
        journal.add({"entry": "start", "trial": number, "values": {}, "slot": 0, "fence": 1})
        journal.add({"entry": "result", "trial": number, "rung": 0, "step": 1, "value": float(number)})
    assert most_promotions(rules(), journal) == 3
    journal.add({"entry": "promote", "trial": 0, "rung": 1, "slot": 0, "fence": 1})
    assert most_promotions(rules(), journal) == 2


def test_several_errors_in_a_row_end_the_search_until_a_retry() -> None:
    """Such errors come from a missing disk or data set, not from the trials."""
    journal = begun(9, (1, 2))

    def fail(number: int, how: str) -> None:
        journal.add({"entry": "start", "trial": number, "values": {}, "slot": 0, "fence": 1})
        for _ in range(CRASHES if how == "crash" else 1):
            journal.add({"entry": "failed", "trial": number, "how": how, "reason": "gone"})

    journal.add({"entry": "start", "trial": 0, "values": {}, "slot": 0, "fence": 1})
    journal.add({"entry": "result", "trial": 0, "rung": 0, "step": 1, "value": 1.0})
    for number, how in enumerate(["error", "crash", "error", "crash"], start=1):
        fail(number, how)
        assert decide(rules(), journal).what == "start"
    fail(5, "error")
    assert decide(rules(), journal).what == "done"
    journal.add({"entry": "retry", "trial": 5})
    journal.add({"entry": "result", "trial": 5, "rung": 0, "step": 1, "value": 1.0})
    assert decide(rules(), journal).what == "start"


def test_a_metric_that_one_trial_lacks_is_looked_for_in_no_other() -> None:
    journal = begun(9)
    journal.add({"entry": "start", "trial": 0, "values": {}, "slot": 0, "fence": 1})
    journal.add({"entry": "failed", "trial": 0, "how": "metric", "reason": "it has no eval_lss"})
    assert decide(rules(), journal).what == "done"


def test_a_withdrawn_trial_is_neither_trained_nor_promoted() -> None:
    journal = begun(3, (1, 2))
    for number in range(3):
        journal.add({"entry": "start", "trial": number, "values": {}, "slot": 0, "fence": 1})
        journal.add({"entry": "result", "trial": number, "rung": 0, "step": 1, "value": float(number)})
    journal.add({"entry": "withdrawn", "trial": 0})
    assert decide(rules(), journal).what == "done"


def played(seed: int = 0) -> tuple[Rules, Journal]:
    """Return a search with one slot whose results are a function of the point."""
    made, journal = rules(seed=seed), begun()
    points = Points(made)
    while (decision := decide(made, journal)).what in ("start", "promote"):
        claim = {"repeat": 0, "slot": 0, "fence": 1}
        if decision.what == "start":
            values = points.point(journal, len(journal.trials))
            journal.add({"entry": "start", "trial": decision.trial, "values": values, **claim})
        else:
            journal.add({"entry": "promote", "trial": decision.trial, "rung": decision.rung, **claim})
        assert decision.trial is not None
        trial = journal.trials[decision.trial]
        value = abs(math.log10(float(trial.values["lr"])) + 2) + 1 / (trial.rung + 1)
        step = (100, 300, 900)[trial.rung]
        journal.add({"entry": "result", "trial": trial.number, "rung": trial.rung, "step": step, "value": value})
    journal.add({"entry": decision.what, "slot": 0, "fence": 1})
    return made, journal


def test_a_replay_repeats_every_decision_of_a_journal() -> None:
    made, journal = played()
    again = Journal.parse(journal.text(), 1)
    assert [vars(trial) for trial in again.trials] == [vars(trial) for trial in journal.trials]
    assert replay(made, again.entries) == []
    assert len([entry for entry in again.entries if entry["entry"] == "promote"]) >= 12


def test_a_replay_finds_a_decision_and_a_point_that_were_changed() -> None:
    made, journal = played()
    entries = json.loads(json.dumps(journal.entries))
    number = next(at for at, entry in enumerate(entries) if entry["entry"] == "result")
    entries[number]["value"] = -1.0
    assert replay(made, entries)
    entries = json.loads(json.dumps(journal.entries))
    start = next(entry for entry in entries if entry["entry"] == "start")
    start["values"] = {"lr": "0.5"}
    assert "begins trial 0 with {'lr': '0.5'}" in replay(made, entries)[0]


@pytest.mark.parametrize(
    "text", ["{", '{"entry": "start", "trial": 3, "values": {}}\n', '{"entry": "result"}\n', "[]\n"]
)
def test_a_malformed_journal_is_one_error_line(text: str) -> None:
    valid = '{"entry": "settings", "trials": 3, "rungs": [null]}\n'
    with pytest.raises(
        RunDirError, match=r"o/journal\.jsonl, line 2: malformed .* remove this line and those after it"
    ):
        Journal.parse(valid + text, 1, "o/journal.jsonl")


@pytest.mark.parametrize("algorithm", [Algorithm.random, Algorithm.asha])
def test_a_thousand_trials_are_read_and_decided_in_little_time(algorithm: Algorithm) -> None:
    """The bound is far above the time measured by `make bench`: it fails if the time grows quadratically."""
    journal = begun(1001, (100, 300, 900) if algorithm.pauses else (None,))
    made, random = rules(algorithm), Random(0)
    for number in range(1000):
        journal.add({"entry": "start", "trial": number, "values": {"lr": "0.1"}, "repeat": 0, "slot": 0, "fence": 1})
        journal.add({"entry": "run", "trial": number, "repeat": 0, "run": f"text-lr{number}-seed0-12345678"})
        journal.add({"entry": "result", "trial": number, "rung": 0, "step": 100, "value": random.random()})
    text, before = journal.text(), time.process_time()
    decide(made, Journal.parse(text, 1))
    assert time.process_time() - before < 0.5

"""Points chosen by Optuna from the journal, and the study for its dashboard."""

from __future__ import annotations

import math
import sqlite3
from pathlib import Path
from random import Random
from typing import Any

import pytest

from runner.errors import UserError
from runner.search.decide import Points, decide, replay
from runner.search.journal import Journal
from runner.search.points import Dimension, Space
from runner.search.rules import Algorithm, Rules

optuna = pytest.importorskip("optuna")

SPACE = Space(
    (
        Dimension("optimizer.lr", low=1e-5, high=1e-1, log=True),
        Dimension("model.width", ("64", "128"), ordered=False),
        Dimension("model.layers", low=1, high=8, whole=True),
        Dimension("train.batch_size", ("8", "16", "32"), ordered=True),
    )
)


def searched(algorithm: Algorithm, trials: int, seed: int = 0) -> tuple[Rules, Journal]:
    """Run a search whose result is the distance of the learning rate from 1e-3; every ninth trial diverges."""
    rules = Rules(algorithm, SPACE, "eval_loss", maximize=False, seed=seed)
    journal, points = Journal(), Points(rules)
    rungs = [2, 4] if algorithm.pauses else [None]
    journal.add({"entry": "settings", "trials": trials, "rungs": rungs})
    while (decision := decide(rules, journal)).what in ("start", "promote"):
        entry: dict[str, Any] = {"entry": decision.what, "trial": decision.trial, "repeat": 0, "slot": 0, "fence": 1}
        if decision.what == "start":
            entry["values"] = points.point(journal, len(journal.trials))
        else:
            entry["rung"] = decision.rung
        journal.add(entry)
        trial = journal.trials[decision.trial or 0]
        value = None if trial.number % 9 == 8 else abs(math.log10(float(trial.values["optimizer.lr"])) + 3)
        step = 2 * (trial.rung + 1)
        journal.add({"entry": "result", "trial": trial.number, "rung": trial.rung, "step": step, "value": value})
    return rules, journal


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [Algorithm.tpe, Algorithm.asha_tpe])
def test_sampler_learns_and_a_replay_repeats_every_point(algorithm: Algorithm) -> None:
    rules, journal = searched(algorithm, 40)
    assert replay(rules, journal.entries) == []
    points = [tuple(trial.values.items()) for trial in journal.trials]
    assert len({*points}) == 40
    distances = [abs(math.log10(float(trial.values["optimizer.lr"])) + 3) for trial in journal.trials]
    assert sum(distances[20:]) / 20 < 0.7 * sum(distances[:10]) / 10
    for trial in journal.trials:
        assert 1e-5 <= float(trial.values["optimizer.lr"]) <= 1e-1
        assert trial.values["train.batch_size"] in ("8", "16", "32")
        assert 1 <= int(trial.values["model.layers"]) <= 8


def test_the_first_points_are_those_of_a_random_search() -> None:
    rules, journal = searched(Algorithm.tpe, 4)
    random = SPACE.random(rules.seed)
    assert [trial.values for trial in journal.trials] == [next(random) for _ in range(4)]


def test_a_study_has_every_trial_with_its_state(tmp_path: Path) -> None:
    from runner.search.optuna import write_study

    rules, journal = searched(Algorithm.asha, 9)
    journal.add({"entry": "settings", "trials": 11, "rungs": [2, 4]})
    point = Points(rules).point(journal, 9)
    journal.add({"entry": "start", "trial": 9, "values": point, "repeat": 0, "slot": 0, "fence": 1})
    path = tmp_path / "study.db"
    for _ in range(2):  # the second time in the place of the first
        write_study(rules, journal, "mine", path)
    study = optuna.load_study(study_name="mine", storage=f"sqlite:///{path}")
    states = [trial.state.name for trial in study.trials]
    assert (states.count("COMPLETE"), states.count("PRUNED"), states.count("RUNNING")) == (3, 6, 1)
    assert study.best_trial.intermediate_values.keys() == {2, 4}
    (tmp_path / "text").write_text("mine")
    with pytest.raises(UserError, match="is not one of SQLite"):
        write_study(rules, journal, "mine", tmp_path / "text")
    with pytest.raises(UserError, match="cannot be written"):
        write_study(rules, journal, "mine", tmp_path / "missing" / "study.db")
    assert sqlite3.connect(path).execute("select count(*) from trials").fetchone() == (10,)


def test_a_small_space_is_not_asked_for_the_same_point_twice() -> None:
    small = Space((Dimension("model.width", tuple(map(str, range(14)))),))
    rules = Rules(Algorithm.tpe, small, "eval_loss", maximize=True)
    journal, random = Journal(), Random(0)
    journal.add({"entry": "settings", "trials": 14, "rungs": [None]})
    points = Points(rules)
    for number in range(14):
        values = points.point(journal, number)
        journal.add({"entry": "start", "trial": number, "values": values, "repeat": 0, "slot": 0, "fence": 1})
        journal.add({"entry": "result", "trial": number, "rung": 0, "step": 1, "value": random.random()})
    assert len({trial.values["model.width"] for trial in journal.trials}) == 14

"""Convert the journal for Optuna's samplers and dashboard. Needs `pip install preemptible-runner[search]`.

The journal is not stored in Optuna, because its storages do not survive killed processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from runner.errors import UserError
from runner.search.journal import Journal
from runner.search.points import Dimension, Point
from runner.search.rules import Rules
from runner.system import files

try:
    import optuna
except ImportError as error:
    raise UserError(
        f"search=tpe, search=asha_tpe and --optuna need Optuna ({error}): pip install 'preemptible-runner[search]'"
    ) from None

STARTUP = 10
"""The number of points drawn at random before the sampler has enough results to learn from."""


def suggest(rules: Rules, journal: Journal, number: int) -> Point:
    """Return the point of trial `number`, chosen by Optuna's TPE sampler from the results so far.

    The first points are the same as with search=random. The point depends only on the journal and the version of
    Optuna.
    """
    random = rules.space.random(rules.seed)
    if number < STARTUP:
        return next(point for at, point in enumerate(random) if at == number)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    seed = int.from_bytes(sha256(f"{rules.seed}/{number}".encode()).digest()[:4], "big")
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP, multivariate=True)
    study = optuna.create_study(sampler=sampler, direction=_direction(rules))
    for trial in _trials(rules, journal):
        study.add_trial(trial)
    asked = study.ask(_distributions(rules))
    point = {each.key: _text(each, asked.params[each.key]) for each in rules.space.dimensions}
    taken = [trial.values for trial in journal.trials]
    return point if point not in taken else next(each for each in random if each not in taken)


def write_study(rules: Rules, journal: Journal, name: str, path: Path) -> None:
    """Write a study file for optuna-dashboard, replacing any earlier file.

    Raises:
        UserError: the study file cannot be written.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if files.exists(path):
        with files.open_regular(path) as file:
            if file.read(15) != b"SQLite format 3":
                raise UserError(f"--optuna {path}: the file is not one of SQLite: choose another name")
        files.remove(path)
    try:
        storage = optuna.storages.RDBStorage(f"sqlite:///{path.absolute()}")
        study = optuna.create_study(storage=storage, study_name=name, direction=_direction(rules))
        for trial in _trials(rules, journal):
            study.add_trial(trial)
    except Exception as error:  # noqa: BLE001 whatever SQLAlchemy raises
        raise UserError(f"--optuna {path}: it cannot be written ({str(error).splitlines()[0]})") from None


def _direction(rules: Rules) -> Literal["minimize", "maximize"]:
    return "maximize" if rules.maximize else "minimize"


def _distributions(rules: Rules) -> dict[str, Any]:
    return {each.key: _distribution(each) for each in rules.space.dimensions}


def _distribution(dimension: Dimension) -> Any:
    of = optuna.distributions
    if dimension.ordered:
        return of.IntDistribution(0, len(dimension.values) - 1)  # the parameter is the index in the list
    if dimension.values:
        return of.CategoricalDistribution(dimension.values)
    if dimension.whole:
        return of.IntDistribution(int(dimension.low), int(dimension.high), log=dimension.log)
    return of.FloatDistribution(dimension.low, dimension.high, log=dimension.log)


def _text(dimension: Dimension, value: Any) -> str:
    if dimension.ordered:
        return dimension.values[int(value)]
    return str(value) if dimension.values or dimension.whole else dimension.written(float(value))


def _parameter(dimension: Dimension, text: str) -> Any:
    if dimension.ordered:
        return dimension.values.index(text)
    return text if dimension.values else int(text) if dimension.whole else float(text)


def _trials(rules: Rules, journal: Journal) -> Iterator[Any]:
    """Convert trials to Optuna trials: complete at the last rung, pruned below it or diverged, failed, or running."""
    states, worst = optuna.trial.TrialState, -math.inf if rules.maximize else math.inf
    distributions = _distributions(rules)
    for trial in journal.trials:
        values = {step: value if math.isfinite(value) else worst for step, value in journal.results(trial)}
        last = trial.value(len(journal.rungs) - 1, journal.repeats)
        if last is not None and math.isfinite(last):
            state = states.COMPLETE
        elif values:
            state = states.PRUNED
        else:
            state = states.FAIL if trial.over else states.RUNNING
        yield optuna.trial.create_trial(
            state=state,
            value=last if state is states.COMPLETE else None,
            params={each.key: _parameter(each, trial.values[each.key]) for each in rules.space.dimensions},
            distributions=distributions,
            intermediate_values=values,
            user_attrs={"run": trial.runs.get(0)},
        )

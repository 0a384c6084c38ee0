"""Collect a search's data for the page: trials, importance of settings, best result so far.

All values are derived from the rules and the journal. Results that are not finite are counted, but otherwise skipped.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

from runner.config.labels import short_names
from runner.search.decide import best
from runner.search.journal import RESULT, Journal, Trial
from runner.search.points import Dimension
from runner.search.rules import Rules

MIN_RESULTS = 8  # at one rung, to compute the importance of settings
MAX_BINS, BIN_SIZE = 4, 4  # for a numeric setting: most bins, fewest results in a bin


def search_data(rules: Rules, journal: Journal) -> dict[str, Any]:
    """Return the data of a search that the page draws."""
    varied = [each for each in rules.space.dimensions if each.size > 1]
    keys = [each.key.lstrip("+") for each in varied]
    names = short_names(keys, ("step", rules.metric))
    found = best(rules, journal)
    known = [results(journal, trial) for trial in journal.trials]
    return {
        "metric": rules.metric,
        "failed": sum(trial.failed is not None for trial in journal.trials),
        "diverged": sum(of_trial != [] and of_trial[-1][1] is None for of_trial in known),
        "rungs": len(journal.rungs),
        "best": found and found.trial.number,
        "dimensions": [
            {"name": names[key], "texts": each.values, "range": [each.low, each.high], "log": each.log}
            for key, each in zip(keys, varied, strict=True)
        ],
        "lines": [
            {
                "trial": trial.number,
                "at": [position(each, trial) for each in varied],
                "values": [trial.values[each.key] for each in varied],
                "results": of_trial,
                "promoted": trial.rung > 0,
            }
            for trial, of_trial in zip(journal.trials, known, strict=True)
        ],
        "importance": importance(varied, journal),
        "best_so_far": best_so_far(rules, journal),
        "steps": journal.steps_trained(),
    }


def position(dimension: Dimension, trial: Trial) -> float:
    """Return the position of a trial on a setting's axis: its number, or the index of its value in the list."""
    value = trial.values[dimension.key]
    return dimension.values.index(value) if dimension.values else float(value)


def results(journal: Journal, trial: Trial) -> list[tuple[int, float | None]]:
    """Return the steps and results of a trial from the first rung on. A result that is not finite becomes None."""
    return [(step, value if math.isfinite(value) else None) for step, value in journal.results(trial)]


def best_so_far(rules: Rules, journal: Journal) -> list[dict[str, Any]]:
    """Return each change of the best trial, with the number of distinct steps trained until then.

    The best trial is defined by `runner.search.decide.best`: it is at the highest rung with a result. Its result can
    therefore become worse when the first trial reaches a higher rung.
    """
    grown, reached, steps = Journal(journal.repeats), dict[tuple[int, int], int](), 0
    order: tuple[int, float, int] | None = None
    changes = []
    for entry in journal.entries:
        grown.add(entry)
        if entry["entry"] != RESULT:
            continue
        trial, rung, step = grown.trials[entry["trial"]], entry["rung"], entry["step"]
        run = trial.number, entry.get("repeat", 0)
        steps += max(step - reached.get(run, 0), 0)
        reached[run] = max(step, reached.get(run, 0))
        value = trial.value(rung, journal.repeats)
        if value is None or not math.isfinite(value):
            continue
        candidate = (-rung, rules.rank(value), trial.number)
        if order is None or candidate < order:
            order = candidate
            changes.append({"steps": steps, "value": value, "trial": trial.number, "step": step})
    return changes


def importance(dimensions: Sequence[Dimension], journal: Journal) -> dict[str, Any]:
    """Return the share of the variance of the results' ranks that each setting alone explains.

    The results are from the rung with the most finite ones, the higher of two: trials at higher rungs were selected by
    their results. Ranks are used, because one nearly diverged trial would dominate the variance of the values.
    """
    at = [journal.at(rung) for rung in range(len(journal.rungs))]
    finite = [{number: value for number, value in each.items() if math.isfinite(value)} for each in at]
    rung = max(range(len(finite)), key=lambda each: (len(finite[each]), each))
    values = _ranks(list(finite[rung].values()))
    shares: list[float | None] = []
    for each in dimensions if len(values) >= MIN_RESULTS else ():
        positions = [position(each, journal.trials[number]) for number in finite[rung]]
        groups = positions if each.values and not each.ordered else _bins(positions)
        shares.append(explained(groups, values))
    return {"step": journal.rungs[rung], "results": len(values), "needed": MIN_RESULTS, "shares": shares}


def explained(groups: Sequence[float], values: Sequence[float]) -> float | None:
    """Return the share of the variance of `values` between groups; None if each value is alone in its group.

    The share is corrected for the number of groups, since a setting without any effect would explain (groups - 1) /
    (values - 1): epsilon squared of Kelley, 1935, "An Unbiased Correlation Ratio Measure". It is at least 0.
    """
    total, kinds = _squares(values), set(groups)
    if len(kinds) == len(values):
        return None
    members = [[value for group, value in zip(groups, values, strict=True) if group == kind] for kind in kinds]
    within = math.fsum(map(_squares, members))
    ratio = within / (len(values) - len(kinds)) * (len(values) - 1) / total if total else 1.0
    return max(0.0, 1.0 - ratio)


def _squares(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values)


def _ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value; equal values have the same rank."""
    ordered = sorted(values)
    return [(bisect_left(ordered, value) + bisect_right(ordered, value)) / 2 for value in values]


def _bins(values: Sequence[float]) -> list[float]:
    """Return the bin of each value between quantiles, or the value itself if there are no more values than bins."""
    count = max(2, min(MAX_BINS, len(values) // BIN_SIZE))
    if len(set(values)) <= count:
        return list(values)
    ordered = sorted(values)
    return [bisect_left(ordered, value) * count // len(ordered) for value in values]

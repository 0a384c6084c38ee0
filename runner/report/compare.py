"""Compare runs: the settings in which they differ, their ranking, and means over seeds."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np

from runner.config.identity import ABSENT, as_text, kind_of
from runner.errors import UserError, nearest
from runner.report import goodput
from runner.report.runs import FINISHED, RunResults, lower_is_better
from runner.report.series import Series

FAILED = ("failed", "crash loop", "unreadable")
# Settings that differ between any two runs.
OWN = ("run.dir", "run.name")
MAX_SHORT = 32  # characters of a value that gets a column by default


@dataclass(frozen=True)
class Spread:
    """The mean and standard deviation of a metric over the finished runs of a group.

    Attributes:
        mean, std: of the values at `step`; the sample standard deviation is None for one run.
        runs: number of runs with a finite value at `step`.
        step: last step of all runs; if they differ in length, the largest step at which all have a value.
        cut: whether some runs are longer.
    """

    mean: float
    std: float | None
    runs: int
    step: int
    cut: bool


@dataclass
class Group:
    """Runs with the same values of some settings.

    Attributes:
        by: the settings, dotted key -> value.
        runs: all runs of the group.
        metrics: of the finished runs.
    """

    by: dict[str, Any]
    runs: list[RunResults]
    metrics: dict[str, Spread] = field(default_factory=dict)

    @property
    def failed(self) -> int:
        return sum(run.state in FAILED for run in self.runs)

    @property
    def left_out(self) -> int:
        """Return the number of runs excluded from the means: failed or unfinished runs, which may be shorter."""
        return sum(run.state != FINISHED for run in self.runs)


def differing(runs: Sequence[RunResults]) -> list[str]:
    """Return the keys of settings that differ between runs: result-changing ones first, the seed last."""
    readable = [run.settings for run in runs if run.settings]
    keys = dict.fromkeys(key for settings in readable for key in settings)
    found = [key for key in keys if key not in OWN and _differs(key, readable)]
    return sorted(found, key=lambda key: (key == "seed", kind_of(key) == "free", key))


def _differs(key: str, settings: Sequence[dict[str, Any]]) -> bool:
    first = settings[0].get(key, ABSENT)
    others = (each.get(key, ABSENT) for each in settings)
    return any(
        other is not first and (other != first or type(other) is not type(first)) and as_text(other) != as_text(first)
        for other in others
    )


def main_settings(runs: Sequence[RunResults]) -> list[str]:
    """Return the settings that get a column by default.

    They differ, can change a result, are in the config of at least half of the runs, and have short values: no paths,
    no digests, no lists, no notes. Settings with the most values come first, and the seed last.
    """
    readable = [run.settings for run in runs if run.settings]

    def is_main(key: str) -> bool:
        values = [settings[key] for settings in readable if key in settings]
        return (
            kind_of(key) != "free"
            and key != "notes"
            and 2 * len(values) >= len(readable)
            and all(map(_is_short, values))
        )

    def order(key: str) -> tuple[bool, int]:
        return key == "seed", -len({as_text(settings[key]) for settings in readable if key in settings})

    return sorted(filter(is_main, differing(runs)), key=order)


def _is_short(value: Any) -> bool:
    text = as_text(value)
    is_digest = re.fullmatch(r"(?=.*[0-9])[0-9a-f]{8,}", text) and isinstance(value, str)
    return not isinstance(value, dict | list) and len(text) <= MAX_SHORT and "/" not in text and not is_digest


def grouped(runs: Sequence[RunResults], by: Sequence[str]) -> list[Group]:
    """Group the runs by the values of the settings `by`, in the order of the values.

    Raises:
        UserError: no run has such a setting.
    """
    readable = [run for run in runs if run.settings]
    known = dict.fromkeys(key for run in readable for key in run.settings)
    for key in by:
        if readable and key not in known:
            raise UserError(f"--by {key}: no run has this setting{nearest(key, known)}; such as {_some(runs)}")
    found: dict[tuple[str, ...], Group] = {}
    for run in readable:
        values = {key: run.settings.get(key) for key in by}
        group = found.setdefault(tuple(map(as_text, values.values())), Group(values, []))
        group.runs.append(run)
    for group in found.values():
        group.metrics = _spreads([run for run in group.runs if run.state == FINISHED])
    return sorted(found.values(), key=lambda group: [_order(value) for value in group.by.values()])


def _some(runs: Sequence[RunResults]) -> str:
    return ", ".join(differing(runs)[:3]) or "sampler.temperature"


def _order(value: Any) -> tuple[int, float, str]:
    """Return a sort key that puts numbers first, by size."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return 0, value, ""
    return 1, 0.0, as_text(value)


def _spreads(runs: Sequence[RunResults]) -> dict[str, Spread]:
    names = dict.fromkeys(name for run in runs for name in run.metrics)
    found = {name: _spread([run.series[name] for run in runs if name in run.metrics]) for name in names}
    return {name: spread for name, spread in found.items() if spread is not None}


def _spread(curves: Sequence[Series]) -> Spread | None:
    """Return the spread at the common step, or None if there is no common step or no finite value there."""
    last = {int(curve.steps[-1]) for curve in curves}
    step = last.pop() if len(last) == 1 else _common_step(curves)
    values = [value for curve in curves if step is not None and math.isfinite(value := curve.at(step))]
    if step is None or not values:
        return None
    cut = any(int(curve.steps[-1]) > step for curve in curves)
    try:
        std = statistics.stdev(values) if len(values) > 1 else None
        return Spread(statistics.fmean(values), std, len(values), step, cut)
    except OverflowError:  # values near the largest float
        return Spread(math.inf, None, len(values), step, cut)


def _common_step(curves: Sequence[Series]) -> int | None:
    """Return the largest step at which all curves have a point."""
    common = reduce(np.intersect1d, [curve.steps for curve in curves])
    return int(common[-1]) if len(common) else None


def main_metric(runs: Sequence[RunResults]) -> str | None:
    """Return the metric that ranks runs by default: the metric that decides their best checkpoints, or the loss."""
    names = [name for run in runs for name in run.metrics]
    judged = [str(run.settings.get("checkpoint.best.metric")) for run in runs]
    return next((name for name in (*judged, "eval_loss", "loss", *names) if name in names), None)


def ranked(runs: Sequence[RunResults], metric: str | None) -> list[RunResults]:
    """Return the runs sorted by `metric`, best first. Runs without a value come last, in their original order."""
    sign = 1 if metric is None or is_lower_better(runs, metric) else -1

    def key(run: RunResults) -> tuple[bool, float]:
        result = run.metrics.get(metric or "")
        return (True, 0.0) if result is None or result.best is None else (False, sign * result.best)

    return sorted(runs, key=key)


def is_lower_better(runs: Sequence[RunResults], metric: str) -> bool:
    """Return whether lower is better for a metric, according to the runs' modes or the metric's name."""
    return lower_is_better(metric, {name: mode for run in runs for name, mode in run.modes.items()})


def as_json(runs: Sequence[RunResults], groups: Sequence[Group]) -> dict[str, Any]:
    """Return the report as JSON-serializable data.

    Nonfinite numbers are null; `goodput` is in node seconds by bucket.
    """
    keys = differing(runs)
    attempts = [attempt for run in runs for attempt in run.accounts]
    return {
        "runs": [
            {
                "run": run.name,
                "path": str(run.path),
                "state": run.state,
                "reason": run.reason,
                "steps": run.steps,
                "ranks": run.ranks,
                "settings": {key: for_json(run.settings[key]) for key in keys if key in run.settings},
                "fork": None if run.fork is None else dict(zip(("run", "step"), run.fork, strict=True)),
                "goodput": _rounded(run.seconds),
                "metrics": {
                    name: {"last": for_json(result.last), "best": result.best, "best_step": result.best_step}
                    for name, result in run.metrics.items()
                },
            }
            for run in runs
        ],
        "groups": [
            {
                "by": for_json(group.by),
                "n": len(group.runs),
                "failed": group.failed,
                "left_out": group.left_out,
                "metrics": {
                    name: {"mean": for_json(one.mean), "std": one.std, "runs": one.runs, "step": one.step}
                    for name, one in group.metrics.items()
                },
            }
            for group in groups
        ],
        "goodput": _rounded(goodput.of_run(attempts)),
        "weeks": {week: _rounded(seconds) for week, seconds in goodput.by_week(attempts).items()},
        "attempts_without_account": sum(not goodput.has_account(attempt) for attempt in attempts),
    }


def _rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {bucket: round(value, 3) for bucket, value in seconds.items()}


def for_json(value: Any) -> Any:
    """Convert a setting from YAML to JSON, which has neither NaN nor dates."""
    if isinstance(value, dict):
        return {str(key): for_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return list(map(for_json, value))
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)

"""The page of a report: one HTML file with its data and its script, which needs no network."""

from __future__ import annotations

import base64
import importlib.util
import json
import math
from collections import Counter
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from runner.errors import UserError
from runner.report import goodput
from runner.report.compare import FAILED, differing, for_json, is_lower_better
from runner.report.runs import FINISHED, RunResults, ends, is_metric
from runner.report.series import Series
from runner.report.tables import fork_lines, ranks_text, short_names

POINTS = 1_200_000
"""Of all curves of a page together: about 13 MB."""
MIN_POINTS = 40  # of a curve
MAX_EVENTS = 60  # evaluations of a run that the time line shows
PLOTTED = ("lr", "grad_norm")  # besides metrics
AXES = {"step": "step", "tokens_seen": "tokens", "samples_seen": "samples", "hours": "hours"}


def page(
    runs: Sequence[RunResults],
    title: str,
    metric: str | None,
    by: Sequence[str] = (),
    together: Sequence[str] = (),
    intro: str = "",
    refresh_s: float | None = None,
) -> str:
    """The HTML of the page.

    Args:
        runs: those to show, one or more.
        title: its heading.
        metric: what it shows first.
        by: the settings that it groups by first, if any.
        together: settings that one may want to group by together; each by itself can be chosen anyway.
        intro: HTML that precedes everything else.
        refresh_s: it is written again so often, and loads itself again.
    """
    parts = resources.files("runner.report") / "page"
    html = (parts / "page.html").read_text()
    plotly = _plotly().read_text()
    data = {**page_data(runs, title, metric, by, together), "refresh": refresh_s}
    # In this order: what is put in is not searched again.
    filled = {
        "/*STYLE*/": (parts / "page.css").read_text(),
        "<!--INTRO-->": f'<div id="intro">{intro}</div>' if intro else "",
        "/*PLOTLY*/": plotly.replace("</script", "<\\/script"),
        "/*DATA*/": json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        "/*SCRIPT*/": (parts / "page.js").read_text(),
    }
    made = ""
    for mark, content in filled.items():
        before, _, html = html.partition(mark)
        made += before + content
    return made + html


def _plotly() -> Path:
    """The script in the package plotly, of which no Python is imported.

    Raises:
        UserError: there is none.
    """
    found = importlib.util.find_spec("plotly")
    for folder in found.submodule_search_locations or [] if found else []:
        script = Path(folder) / "package_data" / "plotly.min.js"
        if script.is_file():
            return script
    raise UserError("the page needs the script of the package 'plotly', which is not there: pip install 'plotly>=6'")


def page_data(
    runs: Sequence[RunResults], title: str, metric: str | None, by: Sequence[str] = (), together: Sequence[str] = ()
) -> dict[str, Any]:
    """What the script reads."""
    keys = differing(runs)
    keys += [key for key in by if key not in keys]
    metrics = list(dict.fromkeys(name for run in runs for name in run.metrics))
    others = [name for name in PLOTTED if any(name in run.series for run in runs)]
    axes = [name for name in AXES if name == "step" or any(name in run.series or name == "hours" for run in runs)]
    states = ", ".join(f"{number} {state}" for state, number in Counter(run.state for run in runs).most_common())
    points, keep = _budget(runs), ends(runs)
    combined = [list(each) for each in dict.fromkeys([tuple(by), tuple(together)]) if len(each) > 1]
    return {
        "title": title,
        "summary": f"{len(runs)} run{'s' if len(runs) != 1 else ''}: {states}",
        "metric": metric,
        "metrics": metrics,
        "others": others,
        "lower": {name: is_lower_better(runs, name) for name in metrics},
        "by": list(by),
        "keys": keys,
        "combined": combined,
        "short": short_names(keys, metrics),
        "axes": [[name, AXES[name]] for name in axes],
        "buckets": goodput.BUCKETS,
        "waiting": goodput.WAITING,
        "weeks": goodput.by_week(attempt for run in runs for attempt in run.accounts),
        "forks": fork_lines(runs),
        "runs": [_run(run, keys, points, keep) for run in runs],
    }


def _budget(runs: Sequence[RunResults]) -> int:
    """The points of a curve, so that all together are not more than POINTS; those of parts count a quarter."""
    names = [name for run in runs for name in run.series if is_plotted(name)]
    parts = sum("/" in name for name in names)
    return max(MIN_POINTS, 4 * POINTS // max(4 * (len(names) - parts) + parts, 1))


def is_plotted(name: str) -> bool:
    """Whether the page has a curve of a number: of a metric, an axis, or what each source has given."""
    return is_metric(name) or name in (*PLOTTED, *AXES) or name.startswith("sources/")


def _run(run: RunResults, keys: Sequence[str], points: int, keep: Sequence[int]) -> dict[str, Any]:
    seconds = run.seconds
    return {
        "name": run.name,
        "state": run.state,
        "failed": run.state in FAILED,
        "finished": run.state == FINISHED,
        "reason": run.reason,
        "steps": run.steps,
        "ranks": ranks_text(run.ranks) if run.ranks not in ([], [1]) else None,
        "settings": {key: for_json(run.settings[key]) for key in keys if key in run.settings},
        "metrics": {name: [for_json(one.last), one.best, one.best_step] for name, one in run.metrics.items()},
        "series": {
            name: _packed(one.thinned(points // 4 if "/" in name else points, keep))
            for name, one in {**run.series, **_hours(run)}.items()
            if is_plotted(name)
        },
        "fork": None if run.fork is None else dict(zip(("run", "step"), run.fork, strict=True)),
        "attempts": [_attempt(attempt) for attempt in run.attempts if _has_times(attempt)],
        "events": _events(run),
        "seconds": {bucket: round(value, 1) for bucket, value in seconds.items()},
        "useful": goodput.shares(seconds)["useful"] if any(seconds.values()) else None,
    }


def _packed(series: Series) -> list[str]:
    """Steps as little-endian uint32 and values as float32, each in base64."""
    steps = np.minimum(series.steps, 2**32 - 1).astype("<u4")
    with np.errstate(over="ignore"):
        values = series.values.astype("<f4")
    return [base64.b64encode(part.tobytes()).decode() for part in (steps, values)]


def _hours(run: RunResults) -> dict[str, Series]:
    """Hours of training by step, without the time between attempts and what was made twice."""
    timed = run.timings.get("step_s")
    if timed is None or not len(timed):
        return {}
    # From the beginning to the last step, for which the last line of timings may have come too early.
    steps = np.append(timed.steps, max(run.steps, int(timed.steps[-1])))
    each = np.append(timed.values, timed.values[-1])
    taken = np.nancumsum(np.diff(steps, prepend=0) * each) / 3600
    return {"hours": Series(np.insert(steps, 0, 0), np.insert(taken, 0, 0.0))}


def _has_times(attempt: dict[str, Any]) -> bool:
    return all(isinstance(attempt.get(name), int | float) for name in ("started", "ended"))


def _attempt(attempt: dict[str, Any]) -> dict[str, Any]:
    names = ("attempt", "started", "ended", "start_step", "end_step", "steps_lost", "cause", "node", "ranks")
    return {name: attempt.get(name) for name in names}


def _events(run: RunResults) -> list[dict[str, Any]]:
    """Evaluations and phase changes with the time at which their step was made, as far as that is known."""
    clock = _clock(run)
    if not clock:
        return []
    evaluated = sorted(
        {int(step) for name in run.metrics if name.startswith("eval_") for step in run.series[name].steps}
    )
    evaluated = [step for step in evaluated if step > _trunk_steps(run)]
    every = math.ceil(len(evaluated) / MAX_EVENTS) or 1
    found = [(step, "evaluation", f"evaluation at step {step}") for step in evaluated[::every]]
    for key, value in run.settings.items():
        if key.startswith("phases.") and key.endswith(".start_step") and isinstance(value, int) and value <= run.steps:
            found.append((value, "phase", f"phase {key.split('.')[1]} from step {value}"))
    times = np.interp([step for step, _, _ in found], list(clock), list(clock.values()))
    return [{"time": float(at), "kind": kind, "text": text} for at, (_, kind, text) in zip(times, found, strict=True)]


def _clock(run: RunResults) -> dict[int, float]:
    """When some of the run's own steps were made: by the lines of its timings, its first start and its last end."""
    timed = run.timings.get("time")
    lines = [] if timed is None else zip(timed.steps.tolist(), timed.values.tolist(), strict=True)
    made = {step: at for step, at in lines if step > _trunk_steps(run)}
    if attempts := [attempt for attempt in run.attempts if _has_times(attempt)]:
        first, last = attempts[0], attempts[-1]
        edges = {first.get("start_step"): first["started"], last.get("end_step"): last["ended"]}
        made = {**{step: at for step, at in edges.items() if isinstance(step, int)}, **made}
    return dict(sorted(made.items()))


def _trunk_steps(run: RunResults) -> int:
    """The steps of a branch that its trunk made, at a time when there was no branch."""
    return 0 if run.fork is None else run.fork[1]

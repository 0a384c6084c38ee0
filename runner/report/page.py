"""Write the page of a report: one HTML file with its data and scripts, which needs no network."""

from __future__ import annotations

import base64
import gzip
import importlib.util
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from runner.config.identity import as_text
from runner.config.labels import short_names
from runner.errors import UserError
from runner.report import goodput
from runner.report.compare import FAILED, differing, for_json, is_lower_better, main_settings
from runner.report.media import embedded
from runner.report.runs import FINISHED, RunResults, ends, is_metric
from runner.report.series import Series
from runner.report.tables import TITLES, fork_lines, ranks_text
from runner.system import files

POINTS = 1_200_000
"""The limit for all curves of a page together: about 13 MB."""
MIN_POINTS = 40  # of one curve
MAX_EVENTS = 60  # evaluations of a run that the time line shows
PLOTTED = ("lr", "grad_norm")  # besides metrics
HARDWARE = {  # numbers of timings.jsonl -> title and unit on the page
    "tokens_per_s": ("tokens/s", 1.0),
    "samples_per_s": ("samples/s", 1.0),
    "memory_bytes": ("memory, GiB", 2.0**30),
    "gpu_memory_bytes": ("GPU memory, GiB", 2.0**30),
}
WAIT = "data wait, %"
MAX_DIFF = 20_000  # characters of the uncommitted changes of a run
MAX_DIFFS = 50  # different diffs on a page
SCRIPTS = ("core", "curves", "tables", "settings", "run", "media", "time", "main")  # of page/, in this order
SEARCH_SCRIPT = "search"  # also of page/, added last on a page with a search
AXES = {"step": "step", "tokens_seen": "tokens", "samples_seen": "samples", "hours": "hours"}


def page(
    runs: Sequence[RunResults],
    title: str,
    metric: str | None,
    by: Sequence[str] = (),
    together: Sequence[str] = (),
    intro: str = "",
    refresh_s: float | None = None,
    searches: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Return the HTML of the page.

    Args:
        runs: runs to show, one or more.
        title: heading of the page.
        metric: metric that the page shows first.
        by: settings by which the page groups runs initially, if any.
        together: settings offered as one combined grouping, in addition to each single setting.
        intro: HTML that precedes everything else.
        refresh_s: seconds after which the page is rewritten and reloads itself.
        searches: data of each search from `runner.report.search.search_data`, with its name and a summary.
    """
    parts = resources.files("runner.report") / "page"
    html = (parts / "page.html").read_text()
    data = {**page_data(runs, title, metric, by, together), "refresh": refresh_s}
    data |= {"searches": list(searches)} if searches else {}
    scripts = (*SCRIPTS, SEARCH_SCRIPT) if searches else SCRIPTS
    # Replace placeholders in their order in the page, so that inserted text is not searched for placeholders.
    filled = {
        "/*STYLE*/": (parts / "page.css").read_text(),
        "<!--INTRO-->": f'<div id="intro">{intro}</div>' if intro else "",
        "/*PLOTLY*/": _packed_plotly(_plotly()),
        "/*DATA*/": json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        "/*SCRIPT*/": "".join((parts / f"{name}.js").read_text() for name in scripts),
    }
    made = ""
    for mark, content in filled.items():
        before, _, html = html.partition(mark)
        made += before + content
    return made + html


def _plotly() -> Path:
    """Return the path of the script in the package plotly, without importing the package.

    Raises:
        UserError: plotly is not installed.
    """
    found = importlib.util.find_spec("plotly")
    for folder in found.submodule_search_locations or [] if found else []:
        script = Path(folder) / "package_data" / "plotly.min.js"
        if script.is_file():
            return script
    raise UserError("the page needs the script of the package 'plotly', which is not there: pip install 'plotly>=6'")


@cache
def _packed_plotly(script: Path) -> str:
    """Return the script gzipped (1.5 MB) and in base64. The browser unpacks it in a tenth of a second."""
    return base64.b64encode(gzip.compress(script.read_bytes(), mtime=0)).decode()


def page_data(
    runs: Sequence[RunResults], title: str, metric: str | None, by: Sequence[str] = (), together: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the data that the page's script reads."""
    keys = differing(runs)
    keys += [key for key in by if key not in keys]
    metrics = list(dict.fromkeys(name for run in runs for name in run.metrics))
    others = [name for name in PLOTTED if any(name in run.series for run in runs)]
    axes = [name for name in AXES if name == "step" or any(name in run.series or name == "hours" for run in runs)]
    states = ", ".join(f"{number} {state}" for state, number in Counter(run.state for run in runs).most_common())
    points, keep = _budget(runs), ends(runs)
    media, left_out = embedded(runs)
    common = {part: _common([getattr(run, part) for run in runs]) for part in ("settings", "code", "environment")}
    diffs = {digest: text for run in runs for digest, text in run.diffs.items()}
    places = {files.resolve(run.path): index for index, run in enumerate(runs)}
    combined = [list(each) for each in dict.fromkeys([tuple(by), tuple(together)]) if len(each) > 1]
    return {
        "title": title,
        "summary": f"{len(runs)} run{'s' if len(runs) != 1 else ''}: {states}",
        "metric": metric,
        "metrics": metrics,
        "results": [name for name in metrics if any(_has_best(run, name) for run in runs)],
        "others": others,
        "hardware": list(dict.fromkeys(name for run in runs for name in _hardware(run))),
        "lower": {name: is_lower_better(runs, name) for name in metrics},
        "by": list(by),
        "keys": keys,
        "main": list(dict.fromkeys([*main_settings(runs), *by])),
        "common": {part: for_json(found) for part, found in common.items()},
        "diffs": {digest: _beginning(text) for digest, text in list(diffs.items())[:MAX_DIFFS]},
        "left_out": left_out,
        "combined": combined,
        "short": short_names(keys, {*TITLES, *metrics}),
        "axes": [[name, AXES[name]] for name in axes],
        "buckets": goodput.BUCKETS,
        "waiting": goodput.WAITING,
        "weeks": goodput.by_week(attempt for run in runs for attempt in run.accounts),
        "forks": fork_lines(runs),
        "runs": [
            {
                **_run(run, points, keep),
                **{part: _rest(getattr(run, part), found) for part, found in common.items()},
                "fork": _fork(run, places),
                "media": of_run,
            }
            for run, of_run in zip(runs, media, strict=True)
        ],
    }


def _has_best(run: RunResults, name: str) -> bool:
    return name in run.metrics and run.metrics[name].best is not None


def _beginning(diff: str) -> str:
    more = len(diff) - MAX_DIFF
    return diff if more <= 0 else f"{diff[:MAX_DIFF]}\n… and {more} more characters: see code.json in the run directory"


def _common(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the entries shared by all non-empty parts."""
    first, *others = [part for part in parts if part] or [{}]
    return {key: value for key, value in first.items() if all(_is(one, key, value) for one in others)}


def _is(part: Mapping[str, Any], key: str, value: Any) -> bool:
    return key in part and as_text(part[key]) == as_text(value)


def _rest(part: Mapping[str, Any], common: Mapping[str, Any]) -> dict[str, Any]:
    return {key: for_json(value) for key, value in part.items() if key not in common}


def _fork(run: RunResults, places: Mapping[Path, int]) -> dict[str, Any] | None:
    """Return a branch's trunk, the fork's step, and the trunk's index on the page (None if not on the page)."""
    if run.fork is None or run.trunk is None:
        return None
    return {"run": run.fork[0], "step": run.fork[1], "index": places.get(run.trunk)}


def _budget(runs: Sequence[RunResults]) -> int:
    """Return the number of points per curve, so that the total is at most POINTS. Parts and hardware get a quarter."""
    names = [name for run in runs for name in run.series if is_plotted(name)]
    parts = sum("/" in name for name in names)
    quarters = parts + sum(name in HARDWARE or name == "data_wait_s" for run in runs for name in run.timings)
    return max(MIN_POINTS, 4 * POINTS // max(4 * (len(names) - parts) + quarters, 1))


def is_plotted(name: str) -> bool:
    """Return whether the page plots a number, which is so for metrics, axes and sample counts of sources."""
    return is_metric(name) or name in (*PLOTTED, *AXES) or name.startswith("sources/")


def _run(run: RunResults, points: int, keep: Sequence[int]) -> dict[str, Any]:
    seconds = run.seconds
    return {
        "name": run.name,
        "state": run.state,
        "failed": run.state in FAILED,
        "finished": run.state == FINISHED,
        "reason": run.reason,
        "steps": run.steps,
        "ranks": ranks_text(run.ranks) if run.ranks not in ([], [1]) else None,
        "path": str(run.path),
        "diffs": list(run.diffs),
        "metrics": {name: [for_json(one.last), one.best, one.best_step] for name, one in run.metrics.items()},
        "series": {
            name: _packed(one.thinned(points // 4 if "/" in name else points, keep))
            for name, one in {**run.series, **_hours(run)}.items()
            if is_plotted(name)
        },
        "hardware": {name: _packed(one.thinned(points // 4)) for name, one in _hardware(run).items()},
        "attempts": [_attempt(attempt) for attempt in run.attempts if _has_times(attempt)],
        "current": _attempt(run.under_way) if run.under_way else None,
        "events": _events(run),
        "seconds": {bucket: round(value, 1) for bucket, value in seconds.items()},
        "useful": goodput.shares(seconds)["useful"] if any(seconds.values()) else None,
    }


def _packed(series: Series) -> list[str]:
    """Return steps as little-endian uint32 and values as float32, each in base64."""
    steps = np.minimum(series.steps, 2**32 - 1).astype("<u4")
    with np.errstate(over="ignore"):
        values = series.values.astype("<f4")
    return [base64.b64encode(part.tobytes()).decode() for part in (steps, values)]


def _hours(run: RunResults) -> dict[str, Series]:
    """Return hours of training by step, without the time between attempts and without repeated steps."""
    timed = run.timings.get("step_s")
    if timed is None or not len(timed):
        return {}
    # From the beginning to the last step, which may be after the last line of timings.
    steps = np.append(timed.steps, max(run.steps, int(timed.steps[-1])))
    each = np.append(timed.values, timed.values[-1])
    taken = np.nancumsum(np.diff(steps, prepend=0) * each) / 3600
    return {"hours": Series(np.insert(steps, 0, 0), np.insert(taken, 0, 0.0))}


def _hardware(run: RunResults) -> dict[str, Series]:
    """Return speed and memory by step, and the percentage of step time spent waiting for data."""
    scaled = {title: (run.timings[name], scale) for name, (title, scale) in HARDWARE.items() if name in run.timings}
    found = {title: Series(one.steps, one.values / scale) for title, (one, scale) in scaled.items()}
    waited, step = run.timings.get("data_wait_s"), run.timings.get("step_s")
    if waited is not None and step is not None and len(step):
        taken = np.interp(waited.steps, step.steps, step.values)
        with np.errstate(divide="ignore", invalid="ignore"):
            found[WAIT] = Series(waited.steps, 100 * waited.values / taken)
    return found


def _has_times(attempt: dict[str, Any]) -> bool:
    return all(isinstance(attempt.get(name), int | float) for name in ("started", "ended"))


def _attempt(attempt: dict[str, Any]) -> dict[str, Any]:
    names = ("attempt", "started", "ended", "start_step", "end_step", "steps_lost", "cause", "node", "ranks")
    return {name: attempt.get(name) for name in names}


def _events(run: RunResults) -> list[dict[str, Any]]:
    """Return evaluations and phase changes, with the time of each step if known."""
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
    """Return the times of some steps, from the run's timings, first start and last end."""
    timed = run.timings.get("time")
    lines = [] if timed is None else zip(timed.steps.tolist(), timed.values.tolist(), strict=True)
    made = {step: at for step, at in lines if step > _trunk_steps(run)}
    if attempts := [attempt for attempt in run.attempts if _has_times(attempt)]:
        first, last = attempts[0], attempts[-1]
        edges = {first.get("start_step"): first["started"], last.get("end_step"): last["ended"]}
        made = {**{step: at for step, at in edges.items() if isinstance(step, int)}, **made}
    return dict(sorted(made.items()))


def _trunk_steps(run: RunResults) -> int:
    """Return the number of a branch's steps that its trunk made before the fork."""
    return 0 if run.fork is None else run.fork[1]

"""Format the tables of a report for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.config.identity import as_text
from runner.config.labels import short_names
from runner.report import goodput
from runner.report.compare import Group, Spread, main_settings
from runner.report.runs import FINISHED, Result, RunResults
from runner.system import files

MAX_SETTINGS = 6  # columns for differing settings; the page has all of them
MAX_TEXT = 40
MAX_CHANGES = 4  # of the number of ranks, shown
TITLES = ("run", "rank", "state", "step", "best", "at step", "attempts", "ranks", "useful", "runs", "left out")
"""Titles of the columns, except settings and metrics; on the terminal and on the page."""


def number(value: float | None) -> str:
    """Format a number with four significant digits or decimals, as usual for losses and accuracies."""
    if value is None:
        return ""
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e5 or value == 0 else f"{value:.4g}"


def run_table(runs: Sequence[RunResults], metrics: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Return columns and rows of runs: name, state, steps, last and best of each metric, differing settings.

    If any attempt had several ranks, the numbers of ranks as well.
    """
    several = any(run.ranks not in ([], [1]) for run in runs)
    keys = main_settings(runs)[:MAX_SETTINGS]
    names = short_names(keys, {*TITLES, *metrics})
    columns = ["run", "state", "step", *(["ranks"] if several else [])]
    columns += [title for metric in metrics for title in (metric, "best", "at step")]
    columns += [names[key] for key in keys]
    rows = []
    for run in runs:
        row = [run.name, run.state, str(run.steps or ""), *([ranks_text(run.ranks)] if several else [])]
        for metric in metrics:
            row += _result_cells(run.metrics.get(metric))
        row += [_setting(run.settings, key) for key in keys]
        rows.append(row)
    return columns, rows


def ranks_text(ranks: Sequence[int]) -> str:
    """Format numbers of ranks: `4`, or `4, 1, 2` if they changed between attempts; only the last of many changes."""
    shown = ranks[-MAX_CHANGES:]
    return ("…, " if len(shown) < len(ranks) else "") + ", ".join(map(str, shown))


def _setting(settings: dict[str, Any], key: str) -> str:
    text = as_text(settings[key]) if settings.get(key) is not None or (key in settings and key != "fork") else ""
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT // 2]}…{text[1 - MAX_TEXT // 2 :]}"


def _result_cells(result: Result | None) -> list[str]:
    if result is None:
        return ["", "", ""]
    return [number(result.last), number(result.best), str(result.best_step or "")]


def group_table(groups: Sequence[Group], metrics: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Return columns and rows of groups: settings, number of runs, excluded runs, mean ± standard deviation."""
    names = short_names(list(groups[0].by), {*TITLES, *metrics}) if groups else {}
    columns = [*names.values(), "runs", "left out", *metrics]
    rows = []
    for group in groups:
        row = [_setting(group.by, key) for key in group.by]
        row += [str(len(group.runs)), _left_out(group)]
        row += [_spread_text(group.metrics.get(metric)) or _no_mean(group, metric) for metric in metrics]
        rows.append(row)
    return columns, rows


def _no_mean(group: Group, metric: str) -> str:
    """Return why a group with finished runs has no mean: they were evaluated at different steps."""
    return "no common step" if any(metric in run.metrics for run in group.runs if run.state == FINISHED) else ""


def _left_out(group: Group) -> str:
    """Return e.g. `3 of 8: 1 failed, 2 not finished`, or "" if no run is excluded."""
    parts = {"failed": group.failed, "not finished": group.left_out - group.failed}
    why = ", ".join(f"{count} {name}" for name, count in parts.items() if count)
    return f"{group.left_out} of {len(group.runs)}: {why}" if why else ""


def fork_lines(runs: Sequence[RunResults]) -> list[str]:
    """Draw the branches below their trunks, each with the step of its fork; empty if there are none.

    A trunk that is not among the runs is drawn too.
    """
    by_path = {files.resolve(run.path): run for run in runs}
    branches: dict[Path, list[RunResults]] = {}
    for run in runs:
        if run.trunk is not None:
            branches.setdefault(run.trunk, []).append(run)
    shown: set[Path] = set()

    def below(trunk: Path, indent: str) -> list[str]:
        lines = []
        for place, run in enumerate(branches.get(trunk, []), start=1):
            corner, rest = ("└ ", "  ") if place == len(branches[trunk]) else ("├ ", "│ ")
            path = files.resolve(run.path)
            lines.append(f"{indent}{corner}{run.name} from step {run.fork[1] if run.fork else ''}")
            if path not in shown:
                shown.add(path)
                lines += below(path, indent + rest)
        return lines

    roots = [path for path in branches if path not in by_path or by_path[path].trunk is None]
    return [line for path in roots for line in (by_path[path].name if path in by_path else path.name, *below(path, ""))]


def goodput_table(seconds: Mapping[str, float]) -> tuple[list[str], list[list[str]]]:
    """Return columns and rows of node time by bucket, largest first; then the time without nodes."""
    of_allocated = goodput.shares(seconds)
    rows = [
        [goodput.BUCKETS[bucket], hours(seconds[bucket]), f"{100 * share:.1f} %"]
        for bucket, share in sorted(of_allocated.items(), key=lambda item: -item[1])
        if seconds[bucket]
    ]
    rows += [[goodput.BUCKETS[bucket], hours(seconds[bucket]), ""] for bucket in goodput.WAITING if seconds[bucket]]
    return ["node time", "", "share"], rows


def week_table(weeks: Mapping[str, Mapping[str, float]]) -> tuple[list[str], list[list[str]]]:
    """Return columns and rows of weeks: allocated node time, and the share of each bucket that is not always 0."""
    in_all = goodput.shares(goodput.total(weeks.values()))
    used = [bucket for bucket, share in in_all.items() if share]
    rows = []
    for week, seconds in weeks.items():
        of_allocated = goodput.shares(seconds)
        held = sum(seconds[bucket] for bucket in of_allocated)
        rows.append([week, hours(held), *(f"{100 * of_allocated[bucket]:.1f} %" for bucket in used)])
    return ["week", "node time", *used], rows


def hours(seconds: float) -> str:
    """Format a duration with a suitable unit: `12.3 s`, `4.5 min` or `6.7 h`."""
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.1f} s"


def _spread_text(spread: Spread | None) -> str:
    if spread is None:
        return ""
    values = number(spread.mean) + ("" if spread.std is None else f" ± {number(spread.std)}")
    return f"{values} at step {spread.step}" if spread.cut else values

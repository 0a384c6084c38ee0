"""Show a search as a table, as JSON, or line by line while it runs."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from runner.cli.base.console import PROGRAM, console, shown, table
from runner.config.labels import short_names
from runner.rundir.state import State, look
from runner.search.decide import best, decide, gives_up
from runner.search.directory import Record, SearchDir
from runner.search.journal import DONE, FAILED, PROMOTE, RESULT, START, WITHDRAWN, Entry, Journal, Trial
from runner.search.points import pairs
from runner.search.rules import Rules
from runner.system import files

STOPPED = ("killed", "interrupted")
"""The states of a run that has not reached its rung and is not being trained."""


def state_of(search: SearchDir, journal: Journal, trial: Trial) -> str:
    """Return the state of a trial as one word."""
    if trial.withdrawn:
        return "withdrawn"
    if trial.failed is not None:
        return "failed"
    if trial.lacks(journal.repeats):
        words = [state.word for state in _runs(search, trial)]
        return next((word for word in ("running", *STOPPED) if word in words), "waiting")
    value = trial.value(trial.rung, journal.repeats)
    if value is not None and not math.isfinite(value):
        return "diverged"
    if trial.rung < len(journal.rungs) - 1:
        return "paused"
    # The run may be longer than the last rung.
    ends = any(state.word == "paused" for state in _runs(search, trial))
    return "paused" if ends else "finished"


def _runs(search: SearchDir, trial: Trial) -> Iterator[State]:
    """Yield the state of each run of a trial. Skip runs that cannot be read."""
    for name in trial.runs.values():
        with suppress(OSError, ValueError):
            yield look(search.run(name))


def _progress(search: SearchDir, journal: Journal, trial: Trial) -> str:
    """Return the current step of a trial that lacks a result, such as ` at 70`, or an empty string for other trials."""
    steps = [state.step for state in _runs(search, trial)] if trial.lacks(journal.repeats) else []
    return f" at {min(steps)}" if steps else ""


def as_json(search: SearchDir, rules: Rules, journal: Journal) -> dict[str, Any]:
    """Return the state of a search as JSON values. Results that are not finite become null."""
    trials = [_trial(search, journal, trial) for trial in journal.trials]
    found = best(rules, journal)
    of_best = found and {**trials[found.trial.number], "result": found.value}
    return {
        "trials": trials,
        "best": of_best and {key: of_best[key] for key in ("run", "values", "result")},
        "algorithm": rules.algorithm.name,
        "metric": rules.metric,
        "mode": "max" if rules.maximize else "min",
        "rungs": list(journal.rungs),
        "wanted": journal.limit,
        "steps_trained": journal.steps_trained(),
    }


def _trial(search: SearchDir, journal: Journal, trial: Trial) -> dict[str, Any]:
    runs = [str(search.run(name).path) for _, name in sorted(trial.runs.items())]
    made: dict[str, Any] = {
        "run": runs[0] if runs else None,
        "values": {key.lstrip("+"): _typed(value) for key, value in trial.values.items()},
        "rung": trial.rung,
        "state": state_of(search, journal, trial),
        "results": {str(step): value for step, value in results(journal, trial).items()},
    }
    made |= {"runs": runs} if journal.repeats > 1 else {}
    return made | ({"reason": trial.failed} if trial.failed else {})


def _typed(text: str) -> Any:
    """Convert the text of a setting to a JSON value. Text that is not JSON stays a string."""
    for read in (int, float, json.loads):
        with suppress(ValueError):
            return read(text)
    return text


def results(journal: Journal, trial: Trial) -> dict[int, float | None]:
    """Return the results of a trial by step. Each is the mean over its repeats, or None if it is not finite."""
    return {step: value if math.isfinite(value) else None for step, value in journal.results(trial)}


def print_table(search: SearchDir, record: Record, journal: Journal) -> None:
    """Print the trials, best first, then a summary of the search and the command that trains the best run."""
    rules, overrides = record.rules, [*record.config.get("flags", ()), *record.config.get("overrides", ())]
    keys = [each.key.lstrip("+") for each in rules.space.dimensions]
    names = short_names(keys, ())
    made = table("trial", "state", *(names[key] for key in keys), "step", rules.metric, "run")
    found = best(rules, journal)

    def order(trial: Trial) -> tuple[Any, ...]:
        values = [trial.value(rung, journal.repeats) for rung in reversed(range(len(journal.rungs)))]
        reached = next((number for number, value in enumerate(values) if value is not None), len(values))
        value = values[reached] if reached < len(values) else None
        return reached, rules.rank(math.nan if value is None else value), trial.number

    for trial in sorted(journal.trials, key=order):
        known = results(journal, trial)
        step, value = next(reversed(known.items()), (None, None))
        written = "" if step is None else "nan" if value is None else f"{value:.5g}"
        run = shown(path := search.run(trial.runs[0]).path) if trial.runs else ""
        run += " (removed or moved)" if trial.runs and not files.is_dir(path) else ""
        mark = " *" if found and trial is found.trial else ""
        values = {key.lstrip("+"): text for key, text in trial.values.items()}
        made.add_row(
            f"{trial.number}{mark}",
            f"{state_of(search, journal, trial)}{_progress(search, journal, trial)}",
            *(values[key] for key in keys),
            "" if step is None else str(step),
            written,
            run,
        )
    console().print(made)
    console().print(summary(rules, journal))
    if found:
        console().print(f"its run: {PROGRAM} {shlex.join([*overrides, *pairs(found.trial.values)])}", soft_wrap=True)
    for trial in journal.trials:
        if trial.failed is not None:
            console().print(f"trial {trial.number} failed: {trial.failed}")


def summary(rules: Rules, journal: Journal) -> str:
    """Summarize the progress of a search and its best result in one line."""
    waiting = len(journal.outstanding)
    line = f"{len(journal.trials)} of {journal.limit} trials begun"
    line += f", {waiting} of them without the result that they are trained for" if waiting else ""
    line += f", {journal.steps_trained():,} steps trained"
    if gives_up(journal):
        line += "; trials failed one after the other, so no other is begun"
    elif decide(rules, journal).what == DONE:
        line += "; the search has ended"
    if (found := best(rules, journal)) is not None:
        line += f"; best: {rules.metric} {found.value:.5g}, trial {found.trial.number} ({point(found.trial.values)})"
    return line


def point(values: Mapping[str, str]) -> str:
    """Format a point as it is typed on the command line."""
    return " ".join(pairs(values))


def lines_of(rules: Rules, journal: Journal, first: int) -> Iterator[str]:
    """Yield a line for each relevant entry of a journal, starting at entry `first`."""
    for entry in journal.entries[first:]:
        if (line := _line(rules, journal, entry)) is not None:
            yield line


def _line(rules: Rules, journal: Journal, entry: Entry) -> str | None:
    trial = journal.trials[entry["trial"]] if "trial" in entry else None
    if trial is None:
        return None
    name, kind = f"trial {trial.number}", entry["entry"]
    repeat = f", seed {entry.get('repeat', 0) + 1} of {journal.repeats}" if journal.repeats > 1 else ""
    if kind == START:
        return f"{name} begins: {point(trial.values)}"
    if kind == PROMOTE:
        rung = journal.rungs[entry["rung"]]
        return f"{name} goes on to {'its end' if rung is None else f'step {rung}'}"
    if kind == RESULT:
        value = "it has diverged" if entry["value"] is None else f"{rules.metric} {entry['value']:.5g}"
        return f"{name}{repeat}: {value} at step {entry['step']}"
    if kind == FAILED:
        return f"{name}{repeat}: {entry['how']}: {entry['reason']}"
    return f"{name} is withdrawn" if kind == WITHDRAWN else None

"""Report the result of a drill as a table on the terminal, and as a file in HTML or JSON."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from runner.chaos.compare import Comparison
from runner.chaos.faults import KINDS
from runner.chaos.plan import Outcome, PlannedFault
from runner.errors import UserError
from runner.report.page import page
from runner.report.runs import RunResults, read_run
from runner.rundir.paths import RunDir
from runner.system.files import write_atomic

COLUMNS = ("fault", "injected", "at step", "steps lost", "what the run did")
DETAILS = ("#", "fault", "trigger", "run", "step", "steps lost", "what the run did")
RIGHT, WRONG = "✓", "✗"
POINTS = 1000  # the maximum number of points of a curve


@dataclass
class Result:
    """The result of a drill."""

    command: str
    config: str  # the run's readable name
    settings: list[str]  # what the drill changed in the configuration, one sentence each
    seed: int
    plan: list[PlannedFault]
    outcomes: list[Outcome]
    comparisons: dict[str, Comparison]  # by name of the run under faults
    errors: list[str]  # all other errors
    reference: RunDir
    killed: list[RunDir]

    @property
    def missing(self) -> list[PlannedFault]:
        """Return the planned faults that were not injected."""
        done = {outcome.number for outcome in self.outcomes}
        return [fault for fault in self.plan if fault.number not in done]

    @property
    def identical(self) -> bool:
        return bool(self.comparisons) and all(found.identical for found in self.comparisons.values())

    @property
    def good(self) -> bool:
        """Return whether the results are identical, all faults were injected, and the run reacted as required."""
        answered = all(outcome.answered for outcome in self.outcomes)
        return self.identical and answered and not self.missing and not self.errors

    @property
    def steps_lost(self) -> int:
        """Return the total number of steps that were trained again because of faults."""
        return sum(outcome.steps_lost for outcome in self.outcomes)

    def verdict(self) -> list[str]:
        """Return the verdict in one line, followed by one line for each reason if the drill failed."""
        lines = [f"{run}: {first}" for run, found in self.comparisons.items() for first in map(str, found.differences)]
        lines += [f"fault {o.number}, {o.kind} at step {o.step}: {o.answer}" for o in self.outcomes if not o.answered]
        if self.missing:
            kinds = ", ".join(fault.kind for fault in self.missing)
            lines.append(f"{len(self.missing)} faults were not injected because the run finished first: {kinds}")
        lines += self.errors
        if self.identical:
            one = list(self.comparisons.values())
            compared = (
                f"{sum(found.records for found in one)} records of metrics, {sum(found.tensors for found in one)} "
                f"tensors ({sum(found.values for found in one)} values)"
            )
            ranks = sorted({count for found in one for count in found.ranks})
            on = f" on {', '.join(map(str, ranks))} ranks" if len(ranks) > 1 else ""
            faults = f"{len(self.outcomes)} faults, {self.steps_lost} steps trained again"
            first = f"bit-identical{on}: {compared}; {faults}"
        else:
            first = "not identical" if self.comparisons else "not compared"
        return [first, *lines]

    def as_json(self) -> dict[str, Any]:
        """Return the result as plain values for JSON."""
        return {
            "verdict": "identical"
            if self.good
            else "not identical"
            if not self.identical
            else "identical, with faults",
            "good": self.good,
            "lines": self.verdict(),
            "command": self.command,
            "settings": self.settings,
            "seed": self.seed,
            "plan": [asdict(fault) for fault in self.plan],
            "faults": [asdict(outcome) for outcome in self.outcomes],
            "missing": [asdict(fault) for fault in self.missing],
            "comparisons": {run: found.as_json() for run, found in self.comparisons.items()},
            "reference": str(self.reference.path),
            "killed": [str(run.path) for run in self.killed],
        }


def rows(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    """Return one table row per kind of fault, with the columns in `COLUMNS`."""
    found: list[tuple[str, ...]] = []
    for kind in dict.fromkeys(outcome.kind for outcome in outcomes):
        own = [outcome for outcome in outcomes if outcome.kind == kind]
        steps = ", ".join(f"{outcome.step}{_when(outcome)}" for outcome in own)
        wrong = [outcome.answer for outcome in own if not outcome.answered]
        answer = f"{WRONG} {wrong[0]}" if wrong else f"{RIGHT} {KINDS[kind].requires}"
        count = f"{len(own)}×" + (f", {len(wrong)} wrong" if wrong else "")
        found.append((kind, count, steps, str(sum(outcome.steps_lost for outcome in own)), answer))
    return found


def _when(outcome: Outcome) -> str:
    return f" ({outcome.trigger})" if outcome.trigger in ("start", "evaluation", "save", "rename") else ""


def show(result: Result, console: Console) -> None:
    """Print the table and the verdict."""
    table = Table(*COLUMNS, title="Faults injected", title_justify="left")
    for column in table.columns[:-1]:
        column.max_width = 24
    for row in rows(result.outcomes):
        table.add_row(*map(escape, row), style="red" if row[-1].startswith(WRONG) else None)
    console.print(table)
    first, *rest = result.verdict()
    console.print(first, style="bold green" if result.good else "bold red", highlight=False, soft_wrap=True)
    for line in rest:
        console.print(f"  {line}", highlight=False, soft_wrap=True, markup=False)


def write(result: Result, path: Path) -> None:
    """Write the report as JSON if `path` ends in .json, else as HTML.

    Raises:
        UserError: the file cannot be written.
    """
    content = json.dumps(result.as_json(), indent=2) + "\n" if path.suffix == ".json" else as_html(result)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content)
    except OSError as error:
        raise UserError(f"--report {path} cannot be written ({error.strerror}): choose another file") from None


def _results(result: Result) -> list[RunResults]:
    """Read the results of the reference run and of the runs under faults."""
    found = [read_run(run, run.path.parent, POINTS) for run in (result.reference, *result.killed)]
    for run in found:
        run.state = str(run.status.get("state", ""))
    return found


def _facts(result: Result) -> list[str]:
    return [
        f"Command: {result.command}",
        f"Reference: {result.reference.path}",
        "Under faults: " + ", ".join(str(run.path) for run in result.killed),
        *(f"Set for the drill: {note}" for note in result.settings),
    ]


def _single(outcome: Outcome) -> tuple[Any, ...]:
    answer = f"{RIGHT if outcome.answered else WRONG} {outcome.answer}"
    return outcome.number, outcome.kind, outcome.trigger, outcome.run, outcome.step, outcome.steps_lost, answer


def as_html(result: Result) -> str:
    """Render the report as one HTML page: the verdict, the faults, and a comparison of the runs."""
    first, *rest = result.verdict()
    singles = [[str(cell) for cell in _single(outcome)] for outcome in result.outcomes]
    parts = [
        f'<p class="{"good" if result.good else "bad"}"><strong>{html.escape(first)}</strong></p>',
        _html_list(rest),
        _html_table(COLUMNS, rows(result.outcomes)),
        f"<details><summary>Every fault</summary>{_html_table(DETAILS, singles)}</details>",
        _html_list(_facts(result)),
    ]
    return page(_results(result), f"{result.config} under faults", "loss", intro="".join(parts))


def _html_list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>" if lines else ""


def _html_table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    below = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in body)
    return f"<table><tr>{top}</tr>{below}</table>"

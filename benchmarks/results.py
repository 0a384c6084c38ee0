"""Print benchmark figures, keep them in results.json, and write the tables of docs/project/benchmarks.md.

A figure has a table, a row and a column. Figures without a unit are ratios of two sides measured in the same run. They
are comparable across machines, so a new run is compared by them.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "benchmarks" / "results.json"
PAGE = ROOT / "docs" / "project" / "benchmarks.md"
REGRESSION = 1.15
"""A ratio that is this many times worse than before is a regression."""
PLACE = re.compile(r"(<!-- figures: (\S+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)


@dataclass(frozen=True)
class Figure:
    """A value in a table.

    Args:
        value: the value.
        unit: unit of `value`; empty for a ratio.
        at_most: the goal, if less is better.
        at_least: the goal, if more is better.
        more_is_better: direction of a ratio without a goal.
    """

    row: str
    column: str
    value: float
    unit: str = ""
    at_most: float | None = None
    at_least: float | None = None
    more_is_better: bool = False

    @property
    def missed(self) -> bool:
        """Return whether the figure misses its goal."""
        # Compared as displayed: 1.02 is not missed by 1.0203.
        shown = float(self.shown.replace(",", ""))
        return (self.at_most is not None and shown > self.at_most) or (
            self.at_least is not None and shown < self.at_least
        )

    @property
    def shown(self) -> str:
        """Return the value in three digits or more, and counts in full."""
        if self.unit and self.value.is_integer():
            return f"{self.value:,.0f}"
        size = abs(self.value)
        decimals = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 0.1 or not size else 3
        return f"{self.value:,.{decimals}f}"

    @property
    def goal(self) -> str:
        """Return the goal as text, or nothing."""
        if self.at_least is not None:
            return f"at least {self.at_least:g} {self.unit}".rstrip()
        return "" if self.at_most is None else f"at most {self.at_most:g} {self.unit}".rstrip()

    @property
    def text(self) -> str:
        """Return the value with its unit, and a note if it misses its goal."""
        return f"{self.shown} {self.unit}".rstrip() + (" **missed**" if self.missed else "")

    def worsened(self, before: Figure) -> float:
        """Return how many times worse this ratio is than `before`; 1 for a figure with a unit."""
        if self.unit or before.unit or min(self.value, before.value) <= 0:
            return 1.0
        times = self.value / before.value
        return 1 / times if self.at_least is not None or self.more_is_better else times


@dataclass
class Table:
    """The figures of one table, which were measured together."""

    name: str
    heading: str = ""
    figures: list[Figure] = field(default_factory=list)

    def add(self, row: str, column: str, value: float, unit: str = "", **more: Any) -> None:
        """Print a figure, and keep it; `more` are the other fields of `Figure`."""
        figure = Figure(row, column, float(value), unit, **more)
        self.figures.append(figure)
        goal = f"  ({figure.goal})" if figure.goal else ""
        print(f"  {row:<58} {column:<16} {figure.text.replace('**', '')}{goal}", flush=True)

    def markdown(self) -> str:
        """Return the table as Markdown for the docs."""
        rows = list(dict.fromkeys(figure.row for figure in self.figures))
        columns = list(dict.fromkeys(figure.column for figure in self.figures))
        cells = {(figure.row, figure.column): figure for figure in self.figures}
        goals = {row: {f.goal for f in self.figures if f.row == row} for row in rows}
        # One column for the goals of whole rows; where figures of a row differ in it, each has its own beside it.
        shared = all(len(found) == 1 for found in goals.values()) and any(map(any, goals.values()))
        lines = [[self.heading, *columns, *(["goal"] if shared else [])]]
        lines.append(["---"] * len(lines[0]))
        for row in rows:
            found = [cells.get((row, column)) for column in columns]
            aside = ["" if f is None or shared or not f.goal else f" ({f.goal})" for f in found]
            texts = ["" if f is None else f.text + goal for f, goal in zip(found, aside, strict=True)]
            lines.append([row, *texts, *(goals[row] if shared else ())])
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)


RECORDED: dict[str, Table] = {}
"""The tables of this process, by name."""


def table(name: str, heading: str = "") -> Table:
    """Return a new table, which replaces the table of this name when the figures are kept.

    Args:
        name: a word, by which the docs refer to it.
        heading: heading of the rows.
    """
    RECORDED[name] = Table(name, heading)
    return RECORDED[name]


def machine() -> str:
    """Describe the machine of the figures."""
    import psutil

    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "numpy"))
    memory = round(psutil.virtual_memory().total / 2**30)
    system = f"{platform.system()} {platform.release().split('-')[0]}"
    return f"{os.cpu_count()} cores, {memory} GiB, {system}, Python {platform.python_version()}, {versions}"


def kept(file: Path | None = None) -> dict[str, dict[str, Any]]:
    """Read the tables of earlier runs from the file: `date`, `machine`, `heading`, `figures`."""
    file = file or FILE
    return dict(json.loads(file.read_text())) if file.exists() else {}


def read(entry: dict[str, Any], name: str) -> Table:
    """Convert an entry of the file to a table."""
    return Table(name, entry["heading"], [Figure(**figure) for figure in entry["figures"]])


def regressions(now: Table, before: Table) -> Iterator[str]:
    """Yield a sentence for each ratio that got worse by more than `REGRESSION`."""
    old = {(figure.row, figure.column): figure for figure in before.figures}
    for figure in now.figures:
        earlier = old.get((figure.row, figure.column))
        if earlier is not None and (times := figure.worsened(earlier)) > REGRESSION:
            yield (
                f"{now.name}: {figure.row}, {figure.column}: {figure.shown}, was {earlier.shown} "
                f"({100 * (times - 1):.0f} % worse)"
            )


def keep(tables: Iterable[Table], accept: bool, file: Path | None = None) -> list[str]:
    """Write tables into the file, and return the regressions.

    A table with a regression stays as it was, so that the next run reports it again, unless it is accepted.
    """
    entries, found = kept(file), []
    for each in tables:
        worse = list(regressions(each, read(entries[each.name], each.name))) if each.name in entries else []
        found += worse
        if accept or not worse:
            entries[each.name] = entry(each)
    write(entries, file)
    return found


def entry(found: Table, device: str = "") -> dict[str, Any]:
    """Convert a table to an entry of the file.

    Args:
        found: the table.
        device: measured device in addition to this machine's processor.
    """
    figures = [
        {name: value for name, value in asdict(figure).items() if not (value is None or value is False)}
        for figure in found.figures
    ]
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    where = f"{device}, {machine()}" if device else machine()
    return {"date": today, "machine": where, "heading": found.heading, "figures": figures}


def write(entries: dict[str, dict[str, Any]], file: Path | None = None) -> None:
    """Replace the content of the file."""
    (file or FILE).write_text(json.dumps(entries, indent=1, ensure_ascii=False) + "\n")


def with_figures(page: str, entries: dict[str, dict[str, Any]]) -> str:
    """Return the page with each measured table replaced; the others stay as they are."""

    def fill(place: re.Match[str]) -> str:
        if place[2] not in entries:
            return place[0]
        entry = entries[place[2]]
        return f"{place[1]}\n{read(entry, place[2]).markdown()}\n{entry['date']}: {entry['machine']}.\n\n{place[3]}"

    return PLACE.sub(fill, page)

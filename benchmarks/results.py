"""Print benchmark figures, keep them in results.json, and write the tables of docs/project/benchmarks.md.

A figure stands in a table, a row and a column. Those without a unit are ratios whose two sides were measured in the
same run: they say something on any machine, and are what a new run is compared by.
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
"""So many times worse than it was, and a ratio is called a regression."""
PLACE = re.compile(r"(<!-- figures: (\S+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)


@dataclass(frozen=True)
class Figure:
    """A value in a table.

    Args:
        unit: of `value`; empty for a ratio.
        at_most: the goal, where less is better.
        at_least: the goal, where more is better.
        more_is_better: of a ratio without a goal.
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
        """Whether it has a goal that it misses."""
        # As it is read: 1.02 is not missed by 1.0203.
        shown = float(self.shown.replace(",", ""))
        return (self.at_most is not None and shown > self.at_most) or (
            self.at_least is not None and shown < self.at_least
        )

    @property
    def shown(self) -> str:
        """The value in three digits or more; what is counted, whole."""
        if self.unit and self.value.is_integer():
            return f"{self.value:,.0f}"
        size = abs(self.value)
        decimals = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 0.1 or not size else 3
        return f"{self.value:,.{decimals}f}"

    @property
    def goal(self) -> str:
        """The goal in words, or nothing."""
        if self.at_least is not None:
            return f"at least {self.at_least:g} {self.unit}".rstrip()
        return "" if self.at_most is None else f"at most {self.at_most:g} {self.unit}".rstrip()

    @property
    def text(self) -> str:
        """The value with its unit, and a word where it misses its goal."""
        return f"{self.shown} {self.unit}".rstrip() + (" **missed**" if self.missed else "")

    def worsened(self, before: Figure) -> float:
        """How many times worse this ratio is than it was; 1 for anything else."""
        if self.unit or before.unit or min(self.value, before.value) <= 0:
            return 1.0
        times = self.value / before.value
        return 1 / times if self.at_least is not None or self.more_is_better else times


@dataclass
class Table:
    """The figures of one table: what was measured together."""

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
        """The table as it stands in the docs."""
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
    """A new table, which replaces the one of this name when the figures are kept.

    Args:
        name: a word, by which the docs refer to it.
        heading: what the rows are.
    """
    RECORDED[name] = Table(name, heading)
    return RECORDED[name]


def machine() -> str:
    """What the figures were measured on."""
    import psutil

    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "numpy"))
    memory = round(psutil.virtual_memory().total / 2**30)
    system = f"{platform.system()} {platform.release().split('-')[0]}"
    return f"{os.cpu_count()} cores, {memory} GiB, {system}, Python {platform.python_version()}, {versions}"


def kept(file: Path | None = None) -> dict[str, dict[str, Any]]:
    """The tables of earlier runs as they stand in the file: `date`, `machine`, `heading`, `figures`."""
    file = file or FILE
    return dict(json.loads(file.read_text())) if file.exists() else {}


def read(entry: dict[str, Any], name: str) -> Table:
    """A table of the file."""
    return Table(name, entry["heading"], [Figure(**figure) for figure in entry["figures"]])


def regressions(now: Table, before: Table) -> Iterator[str]:
    """A sentence for each ratio that got worse by more than `REGRESSION`."""
    old = {(figure.row, figure.column): figure for figure in before.figures}
    for figure in now.figures:
        earlier = old.get((figure.row, figure.column))
        if earlier is not None and (times := figure.worsened(earlier)) > REGRESSION:
            yield (
                f"{now.name}: {figure.row}, {figure.column}: {figure.shown}, was {earlier.shown} "
                f"({100 * (times - 1):.0f} % worse)"
            )


def keep(tables: Iterable[Table], accept: bool, file: Path | None = None) -> list[str]:
    """Write tables into the file; the regressions.

    A table with a regression stays as it was, so that the next run names it again, unless it is accepted.
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
    """A table as it stands in the file.

    Args:
        device: what it was measured on beside this machine's processor.
    """
    figures = [
        {name: value for name, value in asdict(figure).items() if not (value is None or value is False)}
        for figure in found.figures
    ]
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    where = f"{device}, {machine()}" if device else machine()
    return {"date": today, "machine": where, "heading": found.heading, "figures": figures}


def write(entries: dict[str, dict[str, Any]], file: Path | None = None) -> None:
    """Replace what stands in the file."""
    (file or FILE).write_text(json.dumps(entries, indent=1, ensure_ascii=False) + "\n")


def with_figures(page: str, entries: dict[str, dict[str, Any]]) -> str:
    """The page with each of its tables made anew; those that were never measured stay as they are."""

    def fill(place: re.Match[str]) -> str:
        if place[2] not in entries:
            return place[0]
        entry = entries[place[2]]
        return f"{place[1]}\n{read(entry, place[2]).markdown()}\n{entry['date']}: {entry['machine']}.\n\n{place[3]}"

    return PLACE.sub(fill, page)

"""`runner show --settings [PREFIX]`: every setting there is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from runner.cli.base.console import PROGRAM, Parser, console, table
from runner.config.settings import settings

if TYPE_CHECKING:
    from rich.table import Table

    from runner.config.settings import Setting

WIDE = 200  # columns that a table of all settings needs


def parser() -> Parser:
    """Make the parser of the command's arguments."""
    made = Parser(
        prog=f"{PROGRAM} show",
        description="Prints every setting: its type, default, allowed values, whether it may change in an existing "
        "run, and what it is.",
    )
    made.add_argument(
        "--settings", nargs="?", const="", metavar="PREFIX", help="all settings, or those of a part such as eval"
    )
    made.add_argument("--json", action="store_true", help="print JSON")
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the command; its exit status.

    Raises:
        UserError: there is no such setting.
    """
    options = parser().parse_args(arguments)
    rows = settings((options.settings or "").strip("."))
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        console().print(_listing(rows) if console().width >= WIDE else _paragraphs(rows))
    return 0


def _listing(rows: Sequence[Setting]) -> Table:
    """Make a table of settings."""
    from rich.text import Text

    made = table("setting", "type", "default", "allowed", "may change later", "")
    for row in rows:
        about = f"{row.about} ({row.option})" if row.option else row.about
        made.add_row(*map(Text, (row.key, row.type, row.default, row.allowed, row.later, about)))
    return made


def _paragraphs(rows: Sequence[Setting]) -> str:
    """Write the same for a terminal on which a table has no room for what a setting is."""
    lines = []
    for row in rows:
        values = ", ".join(filter(None, (row.type, row.allowed, row.option)))
        lines.append(f"{row.key}={row.default}  ({values}; may change later: {row.later})\n    {row.about}")
    return "\n".join(lines)

"""Show every setting (`runner show --settings`), or a run's model or attempts (`runner show RUN --model`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from runner.cli.base import model
from runner.cli.base.console import PROGRAM, Parser, console, table, tell
from runner.cli.look.attempts import show_attempts
from runner.config.settings import settings
from runner.errors import UserError
from runner.rundir.attempt_log import ended_attempts
from runner.rundir.find import run_dir
from runner.rundir.origin import search_modules
from runner.rundir.trust import check_trusted, reading
from runner.system import files

if TYPE_CHECKING:
    from rich.table import Table

    from runner.config.settings import Setting

WIDE = 200  # the minimum terminal width for a table of all settings


def parser() -> Parser:
    """Return the command's argument parser."""
    made = Parser(
        prog=f"{PROGRAM} show",
        description="Prints the model of a run: its modules, their parameters, and the memory that training takes. Or "
        "its attempts: where each ran, which steps it made, and why it ended. Or every setting: its type, default, "
        "allowed values, whether it may change in an existing run, and what it is.",
    )
    made.add_argument(
        "--settings", nargs="?", const="", metavar="PREFIX", help="all settings, or those of a part such as eval"
    )
    made.add_argument("run", nargs="?", type=Path, metavar="RUN", help="a run directory, such as outputs/NAME")
    made.add_argument("--model", action="store_true", help="the model that RUN trains")
    made.add_argument("--attempts", action="store_true", help="the attempts of RUN: steps, ranks, cause of the end")
    made.add_argument("--json", action="store_true", help="print JSON")
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status.

    Raises:
        UserError: the setting or the run does not exist, or the run's model cannot be created.
    """
    options = parser().parse_args(arguments)
    asked = options.run is not None, options.model + options.attempts, options.settings is not None
    if asked not in ((True, 1, False), (False, 0, True)):
        raise UserError(
            f"pass a run and --model or --attempts ({PROGRAM} show outputs/NAME --model), or --settings [PREFIX] "
            "without a run; the settings of a run are in its config.yaml"
        )
    if options.attempts:
        return show_attempts(run_dir(options.run), options.json)
    if options.model:
        return _show_model(options.run, options.json)
    rows = settings((options.settings or "").strip("."))
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        console().print(_listing(rows) if console().width >= WIDE else _paragraphs(rows))
    return 0


def _show_model(path: Path, as_json: bool) -> int:
    """Create the model from a run's frozen config, print it, and return the exit status."""
    from runner.config.frozen import load
    from runner.training.model.footprint import footprint

    run = run_dir(path)
    with reading(run):
        check_trusted(run)
        config = load(run.path)
        attempts = ended_attempts(run)
        ranks = (attempts[-1] if attempts else files.read_object(run.attempt)).get("ranks") or 1
    search_modules(run, config.run.directory)
    held, reason = model.held_by(config)
    if held is None:
        tell(f"the model cannot be created without its memory ({reason}), so it was created with it")
        held = footprint(config, "cpu")
    if as_json:
        print(json.dumps({**asdict(held), "ranks": ranks}))
    else:
        for each in model.listing(held, config, ranks):
            console().print(each)
    return 0


def _listing(rows: Sequence[Setting]) -> Table:
    """Format settings as a table."""
    from rich.text import Text

    made = table("setting", "type", "default", "allowed", "may change later", "")
    for row in rows:
        about = f"{row.about} ({row.option})" if row.option else row.about
        made.add_row(*map(Text, (row.key, row.type, row.default, row.allowed, row.later, about)))
    return made


def _paragraphs(rows: Sequence[Setting]) -> str:
    """Format settings as paragraphs, for a terminal too narrow for a table with explanations."""
    lines = []
    for row in rows:
        values = ", ".join(filter(None, (row.type, row.allowed, row.option)))
        lines.append(f"{row.key}={row.default}  ({values}; may change later: {row.later})\n    {row.about}")
    return "\n".join(lines)

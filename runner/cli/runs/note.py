"""Add a note to a run, or list its notes: `runner note RUN "text"`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from runner.cli.base.console import PROGRAM, Parser, say
from runner.errors import FileError, UserError
from runner.rundir.custody import run_at
from runner.rundir.notes import MAX_LENGTH, add, notes
from runner.rundir.trust import reading


def parser() -> Parser:
    """Return the command's argument parser."""
    made = Parser(
        prog=f"{PROGRAM} note",
        description="Adds a note to a run, which may be training. `runner status` and `runner report` show it. Without "
        "a text, lists the notes.",
    )
    made.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    made.add_argument("text", nargs="?", metavar="TEXT", help="the note")
    made.add_argument("--json", action="store_true", help="print JSON")
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status.

    Raises:
        UserError: the run does not exist, the text is empty or too long, or the directory is not writable.
    """
    options = parser().parse_args(arguments)
    run = run_at(options.run)
    if options.text is not None:
        if not 0 < len(options.text.strip()) <= MAX_LENGTH:
            raise UserError(f"a note of {len(options.text.strip())} characters: write 1 to {MAX_LENGTH}")
        try:
            add(run, options.text.strip())
        except OSError as error:
            raise FileError(f"{error.filename or run.notes}: {error.strerror or error}") from error
    with reading(run):
        found = notes(run)
    if options.json:
        print(json.dumps([asdict(note) for note in found], indent=2))
    else:
        for note in found:
            say(f"{datetime.fromtimestamp(note.time):%Y-%m-%d %H:%M}  {note.text}")
        if not found:
            say("no notes")
    return 0

"""Protect a checkpoint from deletion: `runner pin RUN --step N|best|last`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from runner.checkpoint.files import choice
from runner.checkpoint.files.directory import Directory
from runner.checkpoint.files.pins import pin, pinned, unpin
from runner.checkpoint.files.store import step_name
from runner.cli.base.console import PROGRAM, Parser, say
from runner.cli.runs.checkpoints import checkpoints_of
from runner.errors import FileError, UserError


def parser() -> Parser:
    """Return the command's argument parser."""
    made = Parser(
        prog=f"{PROGRAM} pin",
        description="Pins checkpoints of a run: neither the run nor `checkpoints --prune` deletes them. "
        "Without --step, lists the pins.",
    )
    made.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    made.add_argument("--step", metavar="STEP", help="a step, best or last")
    made.add_argument("--remove", action="store_true", help="with --step N: remove the pin instead")
    made.add_argument("--json", action="store_true", help="print JSON")
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status.

    Raises:
        UserError: the run or the checkpoint does not exist, or the directory is not writable.
    """
    options = parser().parse_args(arguments)
    directory = checkpoints_of(options.run)
    try:
        if options.remove:
            if options.step is None or not options.step.isdigit():
                raise UserError(f"--remove needs --step N, one of {_listed(directory)}")
            unpin(directory / step_name(int(options.step)))
        elif options.step is not None:
            chosen = choice.choose(Directory(directory), options.step)
            if not pin(chosen.path):
                raise UserError(f"the checkpoint of step {chosen.step} was deleted meanwhile: pin another one")
        steps = sorted(pinned(directory))
    except OSError as error:
        raise FileError(f"{error.filename or directory}: {error.strerror or error}") from error
    if options.json:
        print(json.dumps({"pinned": steps}))
    else:
        say(f"pinned: {_listed(directory)}")
    return 0


def _listed(directory: Path) -> str:
    return ", ".join(str(step) for step in sorted(pinned(directory))) or "none"

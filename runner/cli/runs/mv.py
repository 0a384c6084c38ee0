"""Move or rename a run that is not being trained: `runner mv RUN TARGET`."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from pathlib import Path

from runner.cli.base.console import PROGRAM, Parser, say, shown, tell
from runner.cli.runs.housekeeping import refuse_inside_run, typed
from runner.errors import FileError, UserError
from runner.rundir.custody import custody, run_at
from runner.system import files

HASH = re.compile(r"-[0-9a-f]{8}$")


def parser() -> Parser:
    """Return the command's argument parser."""
    made = Parser(
        prog=f"{PROGRAM} mv",
        description="Moves or renames a run directory. The hash at the end of its name is kept, by which the same "
        "command finds the run again. A run that is being trained, or waits in a queue, is left alone.",
    )
    made.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    made.add_argument("target", metavar="TARGET", help="its new path, or an existing directory for it")
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status.

    Raises:
        UserError: the run is live, or the target exists or cannot be written.
    """
    options = parser().parse_args(arguments)
    if not options.target:  # e.g. from "$UNSET"
        raise UserError(f"the new path is empty: {PROGRAM} mv {typed(options.run)} TARGET")
    run = run_at(options.run)
    source = run.path
    target = _target(source, options.target)
    try:
        with custody(run, tell) as held:
            files.make_dirs(target.parent)
            if files.is_taken(target):
                raise UserError(f"{shown(target)} exists: choose another name")
            held.move(target)
    except OSError as error:
        if error.errno == errno.EXDEV:
            raise UserError(
                f"{shown(target)} is on another file system: pack the run with `{PROGRAM} archive {typed(source)} "
                f"{typed(target.with_name(target.name + '.tar'))}`, unpack that there, and remove the run here"
            ) from None
        raise FileError(f"{shown(source)} cannot be moved to {shown(target)} ({error.strerror or error})") from error
    say(f"moved {shown(source)} to {shown(target)}")
    if not HASH.search(target.name):  # the command that created the run still refers to the old path
        say(f"resume it: {PROGRAM} resume {typed(target)}")
    elif source.parent != target.parent:
        say(f"resume it: {PROGRAM} resume {typed(target)}, or its command with run.root={typed(target.parent)}")
    return 0


def _target(source: Path, asked: str) -> Path:
    """Return the new path of the run. Its name ends with the same hash as the old name.

    Raises:
        UserError: the path exists, or is inside a run.
    """
    target = Path(os.path.abspath(asked))
    if files.is_dir(target) or asked.endswith("/"):
        target /= source.name
    digest = HASH.search(source.name)
    if digest and not target.name.endswith(digest[0]):
        target = target.with_name(target.name + digest[0])
    if files.is_taken(target):
        raise UserError(f"{shown(target)} exists: choose another name")
    if target.is_relative_to(source):
        raise UserError(f"{shown(target)} is inside of {shown(source)}: choose another place")
    refuse_inside_run(target)
    return target

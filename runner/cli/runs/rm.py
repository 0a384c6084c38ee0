"""Remove runs that are not being trained: `runner rm RUN...`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from runner.checkpoint.files.pins import pinned
from runner.cli.base.console import PROGRAM, Parser, say, shown, tell
from runner.cli.runs.housekeeping import leftovers, remove, remove_rest
from runner.errors import FileError, UserError
from runner.metrics.progress import size
from runner.rundir.custody import check_idle, custody, run_at
from runner.rundir.paths import RunDir
from runner.system import files


def parser() -> Parser:
    """Return the command's argument parser."""
    made = Parser(
        prog=f"{PROGRAM} rm",
        description="Removes run directories with all that is in them, after a question. A run that is being trained, "
        "or waits in a queue, is left alone, and so is one with pinned checkpoints.",
    )
    made.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run directory")
    made.add_argument("--yes", action="store_true", help="do not ask")
    made.add_argument("--force", action="store_true", help="also runs with pinned checkpoints")
    made.add_argument("-n", "--dry-run", action="store_true", help="only print what would be removed")
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status.

    Raises:
        UserError: a RUN cannot be removed. Then no run is removed, unless the error occurred after the checks.
    """
    options = parser().parse_args(arguments)
    rests: list[Path] = []
    runs: list[RunDir] = []
    errors = []
    for path in dict.fromkeys(Path(os.path.abspath(path)) for path in options.runs):
        try:
            if not files.is_taken(path) and (found := leftovers(path)):
                rests += found
            else:
                runs.append(_removable(path, options.force))
        except UserError as error:
            errors.append(error)
    if errors:
        raise type(errors[0])("\n".join(f"{error}; nothing was removed" for error in errors))
    listed = [f"{shown(run.path)} ({size(_bytes(run.path))})" for run in runs]
    listed += [f"{shown(rest)} (left by a removal that was killed)" for rest in rests]
    if options.dry_run:
        say(f"would remove {', '.join(listed)}")
        return 0
    if not options.yes and not _confirmed(f"remove {', '.join(listed)}?"):
        say("nothing was removed")
        return 0
    for rest in rests:
        remove_rest(rest)
        say(f"removed {shown(rest)}")
    for run in runs:
        _remove(run, options.force)
        say(f"removed {shown(run.path)}")
    return 0


def _removable(path: Path, force: bool) -> RunDir:
    """Return the run at `path`, after all checks that do not need its leases.

    Raises:
        UserError: the run must not be removed.
    """
    run = run_at(path)
    check_idle(run)
    _check_pins(run, force)
    return run


def _check_pins(run: RunDir, force: bool) -> None:
    try:
        pins = sorted(pinned(run.checkpoints))
    except OSError as error:
        raise FileError(f"{run.checkpoints}: {error.strerror or error}") from error
    if pins and not force:
        raise UserError(
            f"{shown(run.path)} has pinned checkpoints ({', '.join(map(str, pins))}): add --force, or remove the pins"
        )


def _confirmed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise UserError(f"{question} add --yes where nobody can be asked")
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _remove(run: RunDir, force: bool) -> None:
    for rest in leftovers(run.path):
        remove_rest(rest)
    try:
        with custody(run, tell) as held:
            _check_pins(held.run, force)  # checked again, because the user may have taken an hour to answer
            aside = remove(held)
    except OSError as error:
        raise FileError(f"{shown(run.path)} cannot be removed ({error.strerror or error})") from error
    remove_rest(aside)


def _bytes(path: Path) -> int:
    """Return the total size of a run's files in bytes, including those of a checkpoint that a branch shares."""
    total = 0
    for folder, _, names in files.walk(path):
        for name in names:
            with suppress(OSError):
                total += files.lstat(Path(folder) / name).st_size
    return total

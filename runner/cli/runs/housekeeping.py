"""What the commands that move, remove and pack whole runs have in common."""

from __future__ import annotations

import re
import shlex
from contextlib import suppress
from pathlib import Path

from runner.cli.base.console import shown
from runner.errors import FileError, UserError
from runner.rundir.custody import Custody, is_run
from runner.rundir.paths import RunDir
from runner.system import files, processes

_REMOVED = re.compile(rf"\.(?P<name>.+)\.removed-{processes.TAG}")
"""The name of what is being deleted."""


def typed(path: Path) -> str:
    """`path` as one would type it in a shell, in the current directory."""
    return shlex.quote(shown(path))


def leftovers(path: Path) -> list[Path]:
    """List what a removal of the run at `path` has left, because it was killed.

    Raises:
        FileError: the directory cannot be read.
    """
    try:
        names = files.list_dir(path.parent)
    except OSError as error:
        if error.errno in files.NOT_THERE:
            return []
        raise FileError(f"{path.parent}: {error.strerror or error}") from error
    found = [(_REMOVED.fullmatch(name), path.parent / name) for name in sorted(names)]
    return [each for match, each in found if match and match["name"] == path.name]


def remove(held: Custody) -> Path:
    """Give a run a name that no command finds, under which `remove_rest` deletes it: a kill leaves a run or none.

    Raises:
        SupersededError: somebody has taken the run over; nothing was changed.
        OSError: the file system refused.
    """
    path = held.run.path
    aside = path.with_name(f".{path.name}.removed-{processes.tag()}")
    held.move(aside)
    return aside


def remove_rest(aside: Path) -> None:
    """Delete what `remove` has renamed.

    Raises:
        FileError: the file system refused; the rest is still there.
    """
    try:
        # Who renamed it may have been killed before that was durable: a power loss would bring back a part of the run.
        files.fsync_dir(aside.parent)
        with suppress(FileNotFoundError):  # another command does the same
            files.remove_tree(aside)
    except OSError as error:
        raise FileError(
            f"{aside} cannot be removed ({error.strerror or error}): the rest of the run is there; rerun the command"
        ) from error


def refuse_inside_run(target: Path) -> None:
    """Whether `target` would be in a run directory, and so a part of that run.

    Raises:
        UserError: it would.
    """
    inside = [parent for parent in target.parents if is_run(RunDir(parent))]
    if inside:
        raise UserError(f"{shown(target)} is in the run {shown(inside[0])}: choose a place outside of runs")

"""What the commands that move, remove and pack whole runs have in common."""

from __future__ import annotations

import re
import shlex
from contextlib import suppress
from pathlib import Path

from runner.cli.base.console import shown
from runner.errors import FileError, UserError
from runner.rundir.custody import Custody, give_back_if_taken_over, is_run
from runner.rundir.paths import RunDir
from runner.system import files, processes

_REMOVED = re.compile(rf"\.(?P<name>.+)\.removed-(?P<numbers>\d+-\d+)-{processes.TAG}")
"""The name of what is being deleted, with the fencing numbers by which it was renamed."""


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
    submission, lease = held.numbers
    aside = path.with_name(f".{path.name}.removed-{submission}-{lease}-{processes.tag()}")
    held.move(aside)
    return aside


def remove_rest(aside: Path) -> None:
    """Delete what `remove` has renamed, unless whoever did was killed before it saw that somebody had taken it over.

    Raises:
        SupersededError: somebody had; see `give_back_if_taken_over`.
        FileError: the file system refused; the rest is still there.
    """
    try:
        if found := _REMOVED.fullmatch(aside.name):
            submission, _, lease = found["numbers"].partition("-")
            name = aside.with_name(found["name"])
            give_back_if_taken_over(RunDir(aside), name, (int(submission), int(lease)))
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

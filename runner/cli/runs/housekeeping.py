"""Helpers for the commands that move, remove and archive runs."""

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
"""The name of a run that is being deleted. It contains the fencing numbers of the command that renamed it."""


def typed(path: Path) -> str:
    """Return `path` as you would type it in a shell in the current directory."""
    return shlex.quote(shown(path))


def leftovers(path: Path) -> list[Path]:
    """List the directories left by killed removals of the run at `path`.

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
    """Rename a run so that no command finds it. `remove_rest` then deletes it. The rename is atomic.

    Raises:
        SupersededError: another process has taken over the run, and nothing was changed.
        OSError: the rename failed.
    """
    path = held.run.path
    submission, lease = held.numbers
    aside = path.with_name(f".{path.name}.removed-{submission}-{lease}-{processes.tag()}")
    held.move(aside)
    return aside


def remove_rest(aside: Path) -> None:
    """Delete a run that `remove` has renamed.

    Another process may have taken over the run just before the renaming command was killed. Then restore the run
    instead.

    Raises:
        SupersededError: another process has taken over the run; see `give_back_if_taken_over`.
        FileError: the run cannot be deleted; the remaining files are still there.
    """
    try:
        if found := _REMOVED.fullmatch(aside.name):
            submission, _, lease = found["numbers"].partition("-")
            name = aside.with_name(found["name"])
            give_back_if_taken_over(RunDir(aside), name, (int(submission), int(lease)))
        # The renaming command may have been killed before the rename was durable. Then a power loss could bring back a
        # partly deleted run.
        files.fsync_dir(aside.parent)
        with suppress(FileNotFoundError):  # another command deletes it at the same time
            files.remove_tree(aside)
    except OSError as error:
        raise FileError(
            f"{aside} cannot be removed ({error.strerror or error}): the rest of the run is there; rerun the command"
        ) from error


def refuse_inside_run(target: Path) -> None:
    """Raise an error if `target` is inside a run directory, where it would become part of that run.

    Raises:
        UserError: `target` is inside a run directory.
    """
    inside = [parent for parent in target.parents if is_run(RunDir(parent))]
    if inside:
        raise UserError(f"{shown(target)} is in the run {shown(inside[0])}: choose a place outside of runs")

"""What the commands that move, remove and pack whole runs have in common."""

from __future__ import annotations

import errno
import re
import shlex
import sys
from contextlib import suppress
from pathlib import Path

from runner.cli.console import PROGRAM, shown
from runner.config.plain_yaml import read_plain
from runner.errors import FileError, LockedError, UserError
from runner.rundir.custody import Custody, is_run
from runner.rundir.paths import RunDir
from runner.system import files, processes
from runner.system.terminal import printable

REMOVED = re.compile(rf"\.(?P<name>.+)\.(?P<way>removed|archived)-{processes.TAG}")
"""The name of what is being deleted."""
NO_RUN = (*files.NOT_THERE, errno.EACCES, errno.EPERM, errno.EINVAL, errno.EISDIR, errno.EFBIG, errno.ENXIO)
"""What reading a config fails with where there is none, or none that this user may read: the file system has told."""


def typed(path: Path) -> str:
    """`path` as one would type it in a shell, in the current directory."""
    return shlex.quote(shown(path))


def report(message: str) -> None:
    """What a command waits for."""
    print(printable(message), file=sys.stderr, flush=True)


def branches(run: RunDir) -> tuple[list[Path], list[Path]]:
    """The branches of a run that are beside it: those that have begun, and need nothing of it, and those that wait.

    Raises:
        OSError: the file system did not tell.
    """
    begun: list[Path] = []
    waiting: list[Path] = []
    name = run.path.name.encode()
    for other in sorted(files.list_dir(run.path.parent)):
        if REMOVED.fullmatch(other):
            continue
        branch = RunDir(run.path.parent / other)
        try:
            # A machine may remember for seconds that a config was missing, unless it lists the directory.
            with suppress(PermissionError):  # one may be allowed to open it all the same
                files.list_dir(branch.path)
            named = name in files.read_regular(branch.config) or not run.path.name.isascii()
            if named and read_plain(branch.config)["fork"]["run"] == str(run.path):
                (begun if branch.newest_step() else waiting).append(branch.path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, OSError) and error.errno not in NO_RUN:
                raise
            # It is no run, or a broken one, or somebody else's.
    return begun, waiting


def refuse_waited_for(run: RunDir) -> None:
    """Whether branches wait for a checkpoint of this run.

    Raises:
        LockedError: there are some.
        OSError: the file system did not tell.
    """
    with suppress(PermissionError):  # another machine may have made a branch a moment ago
        files.look_anew(run.path.parent)
    if waiting := branches(run)[1]:
        raise LockedError(
            f"{shown(waiting[0])} waits for a checkpoint of {shown(run.path)}: start that branch first, or remove it "
            f"(`{PROGRAM} rm {typed(waiting[0])}`)"
        )


def leftovers(path: Path, *, archived: bool = False) -> list[Path]:
    """What a removal of the run at `path` has left, because it was killed.

    Args:
        path: where the run was.
        archived: only what `archive --remove` has left, which is in a file.

    Raises:
        FileError: the directory cannot be read.
    """
    ways = ("archived",) if archived else ("archived", "removed")
    try:
        names = files.list_dir(path.parent)
    except OSError as error:
        if error.errno in files.NOT_THERE:
            return []
        raise FileError(f"{path.parent}: {error.strerror or error}") from error
    found = [(REMOVED.fullmatch(name), path.parent / name) for name in sorted(names)]
    return [each for match, each in found if match and match["name"] == path.name and match["way"] in ways]


def hidden(path: Path, way: str) -> Path:
    """A name beside `path` that no command finds. `way`: why it has that, `removed`, `archived` or `refused`."""
    return path.with_name(f".{path.name}.{way}-{processes.tag()}")


def remove(held: Custody, way: str = "removed") -> Path:
    """Give a run a name that no command finds, under which `remove_rest` deletes it: a kill leaves a run or none.

    Raises:
        OSError: the file system refused.
    """
    aside = hidden(held.run.path, way)
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

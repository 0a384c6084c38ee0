"""Pack a run that is not being trained into one file, and verify the file: `runner archive RUN FILE.tar`."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tarfile
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from runner.checkpoint.files import choice
from runner.checkpoint.files.adoption import UNLINKABLE
from runner.checkpoint.files.directory import store_of
from runner.checkpoint.files.pins import pinned
from runner.checkpoint.files.store import Fence, step_name
from runner.cli.base.console import PROGRAM, Parser, say, shown, tell
from runner.cli.runs.housekeeping import refuse_inside_run, typed
from runner.errors import FileError, UserError
from runner.metrics.progress import size
from runner.rundir.custody import custody, run_at
from runner.rundir.evaluations import submitted
from runner.rundir.paths import RunDir
from runner.system import accounts, files, processes

SUFFIXES = {".tar": "w", ".tar.gz": "w:gz", ".tar.xz": "w:xz"}
KEEP = ("all", "last", "best", "none")
DIGEST_LENGTH = 64


def parser() -> Parser:
    """Return the command's argument parser."""
    made = Parser(
        prog=f"{PROGRAM} archive",
        description="Packs a run directory into one file, which is read again and compared before it gets its name. "
        "Unpacked anywhere, it is the run, and can be resumed.",
    )
    made.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    made.add_argument("file", type=Path, metavar="FILE", help=f"the new file: {', '.join(SUFFIXES)}")
    made.add_argument(
        "--checkpoints", choices=KEEP, default="all", help="which to pack, beside pinned ones (default: all)"
    )
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status.

    Raises:
        UserError: the run is live, or the file exists or cannot be written.
    """
    options = parser().parse_args(arguments)
    target = Path(os.path.abspath(options.file))
    mode = next((how for suffix, how in SUFFIXES.items() if target.name.endswith(suffix)), None)
    if mode is None:
        raise UserError(f"{options.file}: the file name must end in {', '.join(SUFFIXES)}")
    run = run_at(options.run)
    _refuse_existing(target)
    refuse_inside_run(target)
    temporary = target.with_name(f".{target.name}.tmp-{processes.tag()}")
    try:
        for left in _leftovers(target):
            files.remove(left)
        with custody(run, tell) as held:
            # A killed command may have renamed a pinned checkpoint to delete it. This restores its name.
            fence = Fence(held.lease.fence, held.lease.check_fence)
            store_of(run, fence).sweep()
            content = _pack(run.path, _members(run, _kept(run, options.checkpoints)), temporary, mode)
            packed_bytes = files.stat(temporary).st_size
            held.check()  # checked last, because the file is valid only if no other process has changed the run
            _publish(temporary, target)
    except OSError as error:
        raise FileError(f"{error.filename or options.file}: {error.strerror or error}") from error
    finally:
        _remove_temporary(temporary)
    count = sum(len(each) == DIGEST_LENGTH for each in content.values())
    say(f"packed {count} files of {shown(run.path)} into {shown(target)} ({size(packed_bytes)})")
    say(f"remove the run directory, if nobody needs it any more: {PROGRAM} rm {typed(run.path)}")
    return 0


def _remove_temporary(path: Path) -> None:
    """Remove a temporary file. If this fails, print a warning. The next archive with the same name then removes it."""
    try:
        if files.is_taken(path):  # a read-only disk refuses to remove even a missing file
            files.remove(path)
    except OSError as error:
        tell(f"warning: {shown(path)} cannot be removed ({error.strerror or error})")


def _refuse_existing(target: Path) -> None:
    if files.is_taken(target):
        raise UserError(f"{shown(target)} exists: choose another name")


def _leftovers(target: Path) -> list[Path]:
    """Return the temporary files that killed archive commands for `target` have left.

    If such a command is still running, it fails and reports that.
    """
    name = re.compile(re.escape(f".{target.name}.tmp-") + processes.TAG)
    return [target.with_name(each) for each in files.list_dir(target.parent) if name.fullmatch(each)]


def _publish(temporary: Path, target: Path) -> None:
    """Rename the file to its final name, durably, without replacing an existing file.

    Raises:
        UserError: another command has created a file with that name.
        OSError: the file cannot be renamed.
    """
    try:
        files.link(temporary, target)
    except FileExistsError:
        _refuse_existing(target)
        raise
    except OSError as error:
        if error.errno not in UNLINKABLE:
            raise
        _refuse_existing(target)
        files.rename(temporary, target)
    files.fsync_dir(target.parent)


def _members(run: RunDir, kept: Collection[str] | None) -> list[Path]:
    """Return the paths to pack, relative to the run directory. The first one is the run directory itself.

    Leases are omitted, because they belong to processes.

    Args:
        run: the run directory.
        kept: the names of the checkpoints to pack. If None, all are packed.

    Raises:
        OSError: the run directory cannot be read.
    """
    left_out = {run.lease, run.submission, *(each.path for each in submitted(run))}
    found = []

    def unreadable(error: OSError) -> None:
        raise error

    for folder, folders, names in files.walk(run.path, onerror=unreadable):
        relative = Path(folder).relative_to(run.path)
        folders[:] = [name for name in folders if Path(folder) / name not in left_out]
        if relative == Path(run.checkpoints.name) and kept is not None:
            folders[:] = [name for name in folders if name in kept]
        folders.sort()
        links = [name for name in folders if files.is_link(Path(folder) / name)]
        if relative != Path(run.checkpoints.name):  # it is complete, and its modification time is when it was saved
            for name in folders:
                if name not in links:
                    _look_anew(Path(folder) / name)
        found += [relative, *(relative / name for name in sorted([*names, *links]))]
    return found


def _look_anew(directory: Path) -> None:
    """Refresh the listing of a directory, so that files just written by a different machine are packed.

    Otherwise such a file could be missing in the archive, and then be removed with the run.

    Raises:
        OSError: the listing cannot be refreshed.
    """
    with suppress(PermissionError):  # the directory belongs to a different user
        files.look_anew(directory)


def _kept(run: RunDir, which: str) -> set[str] | None:
    """Return the names of the checkpoints to pack, or None if all should be packed.

    Raises:
        UserError: the run has no such checkpoint.
        OSError: the checkpoint directory cannot be read.
    """
    if which == "all":
        return None
    steps = pinned(run.checkpoints)
    if which != "none":
        steps.add(choice.choose(store_of(run), which).step)
    return {step_name(step) for step in steps}


class _Hashing:
    """A file object that computes a digest of the content that is read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.digest = file, hashlib.sha256()

    def read(self, count: int = -1) -> bytes:
        data = self._file.read(count)
        self.digest.update(data)
        return data


def _pack(root: Path, members: Sequence[Path], target: Path, mode: str) -> dict[str, str]:
    """Write the archive, make it durable, and read it back. Return the digest or kind of each entry, by name.

    Raises:
        OSError: a file system error occurred, or the content read differs from the content written.
    """
    written: dict[str, str] = {}
    with files.open_new(target) as out:
        # A file that has several hard links, because a branch shares it, is packed as a regular file.
        with tarfile.open(fileobj=out, mode=mode, dereference=True) as tar:  # type: ignore[call-overload]
            for member in members:
                name = str(Path(root.name) / member)
                written[name] = _add(tar, root / member, name)
        out.flush()
        files.fsync_fd(out.fileno())
    if _read_back(target) != written:
        raise OSError(None, "what was written reads back differently", str(target))
    return written


def _read_back(target: Path) -> dict[str, str]:
    """Read the archive. Return the digest or kind of each entry, by name."""
    with files.open_regular(target) as packed, tarfile.open(fileobj=packed, mode="r") as tar:
        return {entry.name: _content(tar, entry) for entry in tar}


def _add(tar: tarfile.TarFile, path: Path, name: str) -> str:
    """Add the file or directory at `path` to the archive. Return its digest or kind; see `_content`."""
    if (link := files.read_link(path)) is not None:
        entry = tarfile.TarInfo(name)
        entry.type, entry.linkname, entry.mtime = tarfile.SYMTYPE, link, int(files.lstat(path).st_mtime)
        tar.addfile(entry)
        return f"link to {link}"
    if files.is_dir(path):
        tar.addfile(_entry(name, files.stat(path)))
        return "directory"
    with files.open_regular(path) as source:
        hashing = _Hashing(source)
        tar.addfile(_entry(name, files.stat_fd(source.fileno())), hashing)
    return hashing.digest.hexdigest()


def _entry(name: str, found: os.stat_result) -> tarfile.TarInfo:
    """Return the same entry as `TarFile.gettarinfo`, which is not used because it bypasses the system layer."""
    entry = tarfile.TarInfo(name)
    entry.mode, entry.mtime = found.st_mode, found.st_mtime
    entry.uid, entry.gid, entry.uname = found.st_uid, found.st_gid, accounts.user_name(found.st_uid)
    if stat.S_ISDIR(found.st_mode):
        entry.type = tarfile.DIRTYPE
    else:
        entry.size = found.st_size
    return entry


def _content(tar: tarfile.TarFile, entry: tarfile.TarInfo) -> str:
    """Return the digest of a file entry, or the kind of any other entry."""
    if entry.issym():
        return f"link to {entry.linkname}"
    if entry.isdir():
        return "directory"
    file = tar.extractfile(entry)
    return "" if file is None else hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]

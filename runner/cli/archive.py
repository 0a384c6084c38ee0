"""`runner archive RUN FILE.tar`: pack a run that nobody trains into one file, and verify that."""

from __future__ import annotations

import hashlib
import lzma
import os
import re
import stat
import tarfile
import zlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from runner.checkpoint import choice
from runner.checkpoint import directory as checkpoint_dir
from runner.checkpoint.adoption import UNLINKABLE
from runner.checkpoint.pins import pinned
from runner.cli.console import PROGRAM, Parser, say, shown, size
from runner.cli.housekeeping import leftovers, refuse_inside_run, refuse_waited_for, remove, remove_rest, report, typed
from runner.errors import FileError, UserError
from runner.rundir.custody import custody
from runner.rundir.paths import RunDir
from runner.system import accounts, files, processes

SUFFIXES = {".tar": "w", ".tar.gz": "w:gz", ".tar.xz": "w:xz"}
KEEP = ("all", "last", "best", "none")
BLOCK_BYTES = 1 << 20
DIGEST_LENGTH = 64
NOTHING = hashlib.sha256().hexdigest()


def parser() -> Parser:
    """The arguments of the command."""
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
    made.add_argument("--remove", action="store_true", help="remove the run directory afterwards")
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the command; its exit status.

    Raises:
        UserError: the run is live, or the file exists or cannot be written.
    """
    options = parser().parse_args(arguments)
    target = Path(os.path.abspath(options.file))
    mode = next((how for suffix, how in SUFFIXES.items() if target.name.endswith(suffix)), None)
    if mode is None:
        raise UserError(f"{options.file}: the file name must end in {', '.join(SUFFIXES)}")
    rests = _removed_before(options.run, target, options.checkpoints) if options.remove else []
    if rests:
        _sync(target)
        for rest in rests:
            remove_rest(rest)
        say(f"{shown(target)} holds the run; removed {', '.join(map(shown, rests))}, the rest of its directory")
        return 0
    if not options.remove:
        _refuse_existing(target)
    refuse_inside_run(target)
    temporary = target.with_name(f".{target.name}.tmp-{processes.tag()}")
    aside = None
    try:
        for left in _leftovers(target):
            files.remove(left)
        with custody(options.run, report) as held:
            run = held.run
            if options.remove:
                refuse_waited_for(run)
            # A checkpoint that a killed command was about to delete may be pinned, and gets its name back.
            fence = checkpoint_dir.Fence(held.lease.fence, held.lease.check_fence)
            checkpoint_dir.sweep(run.checkpoints, fence)
            content = _pack(run.path, _members(run, _kept(run, options.checkpoints)), temporary, mode)
            packed_bytes = files.stat(temporary).st_size
            _refuse_new_pins(run, content)
            named = options.remove and _holds(target, content)  # a killed command has come so far already
            held.check()  # last: what was packed is the run only if nobody else has changed it meanwhile
            if named:
                _sync(target)
            else:
                _name(temporary, target)
            if options.remove:
                aside = remove(held, "archived")
    except OSError as error:
        kept = "; nothing was removed" if options.remove else ""
        raise FileError(f"{error.filename or options.file}: {error.strerror or error}{kept}") from error
    finally:
        _remove_temporary(temporary)
    count = sum(len(each) == DIGEST_LENGTH for each in content.values())
    say(f"packed {count} files of {shown(run.path)} into {shown(target)} ({size(packed_bytes)})")
    if aside is not None:
        remove_rest(aside)
        say(f"removed {shown(run.path)}")
    return 0


def _removed_before(run: Path, target: Path, which: str) -> list[Path]:
    """What a command that was killed while it removed the run has left: the file had its name by then.

    Raises:
        UserError: the file does not hold the run as it was then, or that cannot be read.
    """
    path = Path(os.path.abspath(run))
    found = leftovers(path, archived=True) if files.is_taken(target) and not files.is_taken(path) else []
    packed = _found_in(target) or {} if found else {}
    for rest in found:
        try:
            lacks = _unpacked(RunDir(rest), path.name, packed, which)
        except OSError as error:
            raise FileError(f"{error.filename or rest}: {error.strerror or error}; nothing was removed") from error
        if lacks is not None:
            raise UserError(
                f"{shown(target)} does not hold {shown(path)} as it was removed ({shown(rest / lacks)} differs): pass "
                f"the file that it was packed into, or remove what is left of it with `{PROGRAM} rm {typed(path)}`"
            )
    return found


def _unpacked(rest: RunDir, name: str, packed: Mapping[str, str], which: str) -> Path | None:
    """A file of what is left of the run `name` that the archive lacks, or holds with another content; None for none.

    Checkpoints that were not to be packed are left out, and so is what a superseded process has begun to save since.

    Raises:
        OSError: what is left cannot be read.
    """
    if f"{name}/{rest.config.name}" not in packed:
        return Path(rest.config.name)
    folder = Path(name) / rest.checkpoints.name
    kept = {Path(each).name for each in packed if Path(each).parent == folder}
    kept |= {checkpoint_dir.step_name(step) for step in pinned(rest.checkpoints)}
    for member in _members(rest, None if which == "all" else kept):
        # Who sets a pin, which is an empty file, holds no lease.
        differs = packed.get(str(Path(name) / member), NOTHING) != _content_at(rest.path / member)
        if differs and not files.is_dir(rest.path / member) and ".tmp-" not in str(member):
            return member
    return None


def _remove_temporary(path: Path) -> None:
    """What remains of it goes with the next archive of that name."""
    try:
        files.remove(path)
    except OSError as error:
        report(f"warning: {shown(path)} cannot be removed ({error.strerror or error})")


def _refuse_new_pins(run: RunDir, content: Mapping[str, str]) -> None:
    """Whether a checkpoint is pinned that was not packed, since others were packed only.

    It was pinned meanwhile; or `sweep` could not give it its name back.

    Raises:
        UserError: there is one.
        OSError: the directory of the checkpoints cannot be read.
    """
    with suppress(FileNotFoundError):
        files.look_anew(run.checkpoints)
    folder = f"{run.path.name}/{run.checkpoints.name}"
    there = {path.name.partition(".")[0] for path in checkpoint_dir.leftovers(run.checkpoints)}
    for step in sorted(pinned(run.checkpoints)):
        name = checkpoint_dir.step_name(step)
        if f"{folder}/{name}" not in content and (name in there or files.is_dir(run.checkpoints / name)):
            raise UserError(f"step {step} of {shown(run.path)} is pinned, and was not packed: rerun the command")


def _refuse_existing(target: Path) -> None:
    if files.is_taken(target):
        raise UserError(f"{shown(target)} exists: choose another name")


def _leftovers(target: Path) -> list[Path]:
    """What killed commands for the same file have left; a live one fails, and reports that."""
    name = re.compile(re.escape(f".{target.name}.tmp-") + processes.TAG)
    return [target.with_name(each) for each in files.list_dir(target.parent) if name.fullmatch(each)]


def _name(temporary: Path, target: Path) -> None:
    """Give the file its name, durably, and replace nothing.

    Raises:
        UserError: another command has made a file of that name.
        OSError: the file system refused.
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


def _sync(target: Path) -> None:
    """Make the file and its name durable: the command that made it may have been killed before it had done so.

    Raises:
        FileError: the file system refused.
    """
    try:
        with files.open_regular(target) as packed:
            files.fsync_fd(packed.fileno())
        files.fsync_dir(target.parent)
    except OSError as error:
        raise FileError(f"{target}: {error.strerror or error}; nothing was removed") from error


def _members(run: RunDir, kept: Collection[str] | None) -> list[Path]:
    """What to pack, relative to the run directory, beginning with that; leases are of processes and stay behind.

    Args:
        run: the run directory.
        kept: the names of the checkpoints to pack; None for all.

    Raises:
        OSError: the run directory cannot be read.
    """
    left_out = {run.lease.name, run.submission.name, run.evaluation_lease.name, run.evaluation_work.name}
    found = []

    def unreadable(error: OSError) -> None:
        raise error

    for folder, folders, names in files.walk(run.path, onerror=unreadable):
        relative = Path(folder).relative_to(run.path)
        if relative == Path():
            folders[:] = [name for name in folders if name not in left_out]
        if relative == Path(run.checkpoints.name) and kept is not None:
            folders[:] = [name for name in folders if name in kept]
        folders.sort()
        links = [name for name in folders if files.is_link(Path(folder) / name)]
        if relative != Path(run.checkpoints.name):  # a checkpoint is complete, and its time tells when it was saved
            for name in folders:
                if name not in links:
                    _look_anew(Path(folder) / name)
        found += [relative, *(relative / name for name in sorted([*names, *links]))]
    return found


def _look_anew(directory: Path) -> None:
    """See what another machine has just written there: what is not packed may be removed with the run.

    Raises:
        OSError: the file system refused.
    """
    with suppress(PermissionError):  # somebody else's
        files.look_anew(directory)


def _kept(run: RunDir, which: str) -> set[str] | None:
    """The names of the checkpoints to pack; None for all.

    Raises:
        UserError: there is no checkpoint of that kind.
        OSError: the directory of the checkpoints cannot be read.
    """
    if which == "all":
        return None
    steps = pinned(run.checkpoints)
    if which != "none":
        steps.add(choice.choose(run.checkpoints, which).step)
    return {checkpoint_dir.step_name(step) for step in steps}


class _Hashing:
    """A file that is read, and what it held."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.digest = file, hashlib.sha256()

    def read(self, count: int = -1) -> bytes:
        data = self._file.read(count)
        self.digest.update(data)
        return data


def _pack(root: Path, members: Sequence[Path], target: Path, mode: str) -> dict[str, str]:
    """Write the file, make it durable, and read it again; what is in it, by name.

    Raises:
        OSError: the file system refused, or what was read is not what was written.
    """
    written: dict[str, str] = {}
    with files.open_new(target) as out:
        # A file with several names, in this run and in a branch, is packed as a file.
        with tarfile.open(fileobj=out, mode=mode, dereference=True) as tar:  # type: ignore[call-overload]
            for member in members:
                name = str(Path(root.name) / member)
                written[name] = _add(tar, root / member, name)
        out.flush()
        files.fsync_fd(out.fileno())
    if _read(target) != written:
        raise OSError(None, "what was written reads back differently", str(target))
    return written


def _read(target: Path) -> dict[str, str]:
    """What is in the file, by name."""
    with files.open_regular(target) as packed, tarfile.open(fileobj=packed, mode="r") as tar:
        return {entry.name: _content(tar, entry) for entry in tar}


def _holds(target: Path, content: dict[str, str]) -> bool:
    """Whether the file is there, and has this content."""
    return _found_in(target) == content


def _found_in(target: Path) -> dict[str, str] | None:
    """What is in the file, by name; None if there is no such file, or it is no archive."""
    try:
        return _read(target)
    except (OSError, EOFError, tarfile.TarError, zlib.error, lzma.LZMAError):
        return None


def _add(tar: tarfile.TarFile, path: Path, name: str) -> str:
    """Add what is at `path`; its content, as `_content` describes it."""
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
    """What `TarFile.gettarinfo` makes of a file or a directory, which looks past the system layer."""
    entry = tarfile.TarInfo(name)
    entry.mode, entry.mtime = found.st_mode, found.st_mtime
    entry.uid, entry.gid, entry.uname = found.st_uid, found.st_gid, accounts.user_name(found.st_uid)
    if stat.S_ISDIR(found.st_mode):
        entry.type = tarfile.DIRTYPE
    else:
        entry.size = found.st_size
    return entry


def _content(tar: tarfile.TarFile, entry: tarfile.TarInfo) -> str:
    """What an entry holds: the digest of a file, or what else it is."""
    if entry.issym():
        return f"link to {entry.linkname}"
    if entry.isdir():
        return "directory"
    return _digest(tar.extractfile(entry))


def _content_at(path: Path) -> str:
    """What is at `path`, as `_content` describes it."""
    if (link := files.read_link(path)) is not None:
        return f"link to {link}"
    if files.is_dir(path):
        return "directory"
    with files.open_regular(path) as file:
        return _digest(file)


def _digest(file: IO[bytes] | None) -> str:
    digest = hashlib.sha256()
    while file is not None and (block := file.read(BLOCK_BYTES)):
        digest.update(block)
    return digest.hexdigest()

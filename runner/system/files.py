"""All access to the file system: atomic replacement, fsync, JSON, and the plain operations under them.

Code that keeps a run's records looks at, opens, changes and lists files only through here, and calls the functions
through the module (`files.rename(...)`), so that a test can replace the file system: the primitives come first, one for
each call of the kernel, and everything below them is built on them alone. Imports no torch, hydra or numpy.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_IFDIR, S_IFMT, S_IFREG, S_ISDIR, S_ISLNK, S_ISREG
from typing import Any, BinaryIO

COPY_BYTES = 1 << 20
TAIL_BYTES = 1 << 16
NO_COPY = (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)
"""Where the kernel does not copy a file: between some file systems, and on some."""

MAX_RECORD_BYTES = 64 << 20
"""The largest record that is read whole; our own are a thousand times smaller, except code.json with its diffs."""

SMALL_BYTES = 1 << 20

NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.EBADF, errno.ELOOP)
"""What a look at a path fails with where nothing is: the errors for which `Path.exists` tells False."""

NO_FILE = (*NOT_THERE, errno.ESRCH, errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENXIO, errno.EFBIG)
"""What reading a small file fails with where there is none, none that this user may read, or something else."""

PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EROFS, errno.ENOTCONN, errno.ETIMEDOUT)
"""Errors that may pass, and so decide nothing; others, such as a missing permission, do not."""

AnyPath = str | os.PathLike[str]

# The primitives. A simulated file system replaces exactly these names.


def this_thread() -> str:
    """Return `PID-thread`, for names of files that no other thread of this machine writes at the same time."""
    return f"{os.getpid()}-{threading.get_ident()}"


open_file = open
"""Open a file as the built-in `open` does."""

open_fd = os.open
"""Open a file descriptor as `os.open` does."""

as_file = os.fdopen
"""A file object that reads or writes a descriptor and closes it, as `os.fdopen` makes it."""

write_fd = os.write
"""Write to a file descriptor; returns the number of bytes written, perhaps fewer than passed."""

write_at = os.pwrite
"""Write to a file descriptor at an offset; returns the number of bytes written, perhaps fewer than passed."""

read_at = os.pread
"""Read from a file descriptor at an offset; returns at most the number of bytes asked for."""

copy_range = os.copy_file_range
"""Copy from one file descriptor to another inside the kernel; returns the number of bytes copied."""

fsync_fd = os.fsync
"""Wait until what was written to a file descriptor would survive a power loss."""


def begin_writeback(fd: int, start: int, length: int) -> None:
    """Let the disk begin to write a range of an open file; returns at once, and promises nothing."""
    with suppress(OSError, AttributeError):  # no such system, or no such file system
        # Linux begins to write what is not on the disk yet, and drops only what is.
        os.posix_fadvise(fd, start, length, os.POSIX_FADV_DONTNEED)


def append_from_now_on(fd: int) -> None:
    """Let every further write to a file descriptor go to the end of the file."""
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND | os.O_NONBLOCK)


truncate_fd = os.ftruncate
"""Cut a file to a length as `os.ftruncate` does."""

stat_fd = os.fstat
"""What the file system knows of an open file."""

close_fd = os.close
"""Close a file descriptor."""

make_dir = os.mkdir
"""Create a directory, which must not exist, with a mode."""

rename = os.replace
"""Move a file or a directory over `target` on the same file system, atomically."""

unlink = os.unlink
"""Delete a file, which must exist, or a link."""

remove_dir = os.rmdir
"""Remove an empty directory."""

remove_tree = shutil.rmtree
"""Delete a directory and everything in it."""

list_dir = os.listdir
"""The names in a directory, in no particular order."""

scan = os.scandir
"""The entries of a directory, in no particular order, with their kinds where the directory tells them."""

walk = os.walk
"""Every directory below a root: (path, names of directories, names of files)."""

make_link = os.link
"""Give a file a second name, which must not exist."""

make_symlink = os.symlink
"""(target, path): create a symbolic link, which must not exist."""

read_link_raw = os.readlink
"""The target of a symbolic link, which must be one."""

stat = os.stat
"""What the file system knows of a path, followed if it is a link."""

lstat = os.lstat
"""What the file system knows of a path itself."""

set_times = os.utime
"""Set when a file was read and modified last; now without further arguments."""

set_umask = os.umask
"""Set the permissions that this process does not give to what it creates; returns those before."""

disk_usage = shutil.disk_usage
"""The bytes of a file system: total, used and free."""


def resolve(path: AnyPath) -> Path:
    """Return the absolute path without links; missing parts at its end are kept.

    Raises:
        RuntimeError: links that lead in a circle.
    """
    return Path(path).resolve()


def has_access_list(path: Path) -> bool:
    """Check whether a POSIX access list adds to the mode of `path`; its group bits are then the list's mask."""
    try:
        os.getxattr(path, "system.posix_acl_access")
    except (OSError, AttributeError):  # none, no such file system, no such system
        return False
    return True


# What is built on them.


def exists(path: AnyPath) -> bool:
    """Check whether something is at `path`, followed if it is a link.

    Raises:
        OSError: the file system cannot answer.
    """
    return _mode(path) is not None


def is_dir(path: AnyPath) -> bool:
    """Check whether `path`, followed if it is a link, is a directory; raises as `exists` does."""
    mode = _mode(path)
    return mode is not None and S_ISDIR(mode)


def is_file(path: AnyPath) -> bool:
    """Check whether `path`, followed if it is a link, is a regular file; raises as `exists` does."""
    mode = _mode(path)
    return mode is not None and S_ISREG(mode)


def is_link(path: AnyPath) -> bool:
    """Check whether `path` is a symbolic link; raises as `exists` does."""
    mode = _mode(path, follow=False)
    return mode is not None and S_ISLNK(mode)


def _mode(path: AnyPath, *, follow: bool = True) -> int | None:
    """Return the mode of `path`, or None if nothing is there."""
    try:
        return (stat(path) if follow else lstat(path)).st_mode
    except OSError as error:
        if error.errno not in NOT_THERE:
            raise
    except ValueError:  # no file can have this name
        pass
    return None


def is_taken(path: AnyPath) -> bool:
    """Check whether a name is in use, even by a dangling link; raises as `exists` does."""
    return _mode(path, follow=False) is not None


def seems_dir(path: AnyPath) -> bool:
    """Check `is_dir` for a word that may be anything. Return False where the file system cannot answer."""
    try:
        return is_dir(path)
    except OSError:  # too long for a name, perhaps
        return False


def kinds(directory: Path) -> dict[str, int]:
    """Return the kind (`stat.S_IFREG` and so on) of each entry of a directory, links not followed; empty if missing.

    Raises:
        OSError: it cannot be read.
    """
    found = {}
    with suppress(FileNotFoundError, NotADirectoryError), scan(directory) as entries:
        for entry in entries:
            if entry.is_file(follow_symlinks=False):  # the directory itself tells, on most file systems
                found[entry.name] = S_IFREG
            elif entry.is_dir(follow_symlinks=False):
                found[entry.name] = S_IFDIR
            else:
                with suppress(FileNotFoundError):  # removed meanwhile
                    found[entry.name] = S_IFMT(lstat(entry.path).st_mode)
    return found


@dataclass(frozen=True)
class Guard:
    """The right to write to a run directory, which a newer process may have taken over at any moment.

    A file is replaced by writing a temporary file whose name contains the tag, then checking, then renaming. A newer
    holder first takes its number and then sweeps the temporary files of older tags, before it does anything else. So a
    process that was stopped anywhere in between, and wakes at any later time, either fails the check or finds that its
    temporary file is gone: its rename can never land on what the newer holder wrote.

    Attributes:
        tag: names the lease and the fencing number, `lease-00000003` for example.
        check: raises SupersededError if a newer process holds the lease.
    """

    tag: str
    check: Callable[[], None]

    def and_also(self, other: Guard) -> Guard:
        """Return a right that is lost as soon as either of the two is lost."""

        def check() -> None:
            self.check()
            other.check()

        return Guard(f"{self.tag}-{other.tag}", check)


OWNED = 0o755
"""The mode of a directory in which nobody but its owner may write, whatever the umask."""


def make_dirs(path: Path, mode: int = 0o777) -> None:
    """Create a directory and its missing parents durably; it may exist already.

    Args:
        path: the directory.
        mode: of the directory itself if it is created, minus the umask.

    Raises:
        OSError: the file system refused, or a part of the path is not a directory.
    """
    missing: list[Path] = []
    there = path
    while not is_dir(there):
        if is_taken(there):
            if is_dir(there):  # another process has made it since the first look
                break
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))
        missing.append(there)
        there = there.parent
    with suppress(OSError):  # it may be new as well, made by a process that was killed before it synced it
        fsync_dir(there.parent)
    for directory in reversed(missing):
        with suppress(FileExistsError):  # another process was faster
            make_dir(directory, mode if directory == path else 0o777)
        _sync_parent(directory)


def make_dirs_in(top: Path, path: Path) -> None:
    """Create a directory and its missing parents durably inside of `top`, which is not created, with mode `OWNED`.

    Raises:
        FileNotFoundError: `top` is gone.
        OSError: the file system refused.
    """
    there = top
    for part in path.relative_to(top).parts:
        there /= part
        with suppress(FileExistsError):
            make_dir(there, OWNED)
        _sync_parent(there)


def _sync_parent(directory: Path) -> None:
    """Make the entry of a new directory survive a power loss, unless its parent may not be opened or synced."""
    try:
        fsync_dir(directory.parent)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise


def remove(path: Path) -> None:
    """Delete a file; it may be gone already."""
    with suppress(FileNotFoundError):
        unlink(path)


def touch(path: Path) -> None:
    """Create an empty file, or update the modification time of an existing one."""
    open_append(path).close()
    set_times(path)


def look_anew(directory: Path) -> None:
    """Let the next look at a directory show what is in it now.

    A client of a network file system may show for half a minute what it listed before, without what another machine has
    made there since. It notices that when it changes something of the directory itself, such as its time.

    Raises:
        OSError: the directory is gone, or this user may not write there.
    """
    set_times(directory)


def link(source: Path, target: Path) -> None:
    """Give the file `source` a second name; it is not followed if it is a link itself.

    Raises:
        OSError: `target` exists, or the file system cannot.
    """
    make_link(source, target, follow_symlinks=False)


def symlink(link: Path, target: str) -> None:
    """Make `link` point to `target`, replacing an existing link."""
    remove(link)
    make_symlink(target, link)


def open_regular(path: str | Path, *, follow: bool = False) -> BinaryIO:
    """Open a regular file for reading, and nothing else.

    A run directory may be shared and hold anything: opening a FIFO or a device must not block, and a symbolic link
    must not lead out of the directory, so links are refused unless `follow` is set.

    Raises:
        OSError: the file is missing, not readable, or not a regular file.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    not_regular = OSError(errno.EINVAL, "not a regular file", str(path))
    try:
        fd = open_fd(path, flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            raise not_regular from None
        raise
    if not S_ISREG(stat_fd(fd).st_mode):
        close_fd(fd)
        raise not_regular
    return as_file(fd, "rb")


def open_append(path: Path) -> BinaryIO:
    """Open a regular file for appending; it is created if it is missing, writable by nobody but its owner.

    Raises:
        OSError: the file system refused, or there is something else than a regular file.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = open_fd(path, flags, 0o644)
    if not S_ISREG(stat_fd(fd).st_mode):
        close_fd(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return as_file(fd, "ab")


def open_in_place(path: Path) -> int | None:
    """Open a regular file for reading and appending; return None if a new file should replace it instead.

    That is: it is missing, a link, has a second name, under which somebody may keep it as it is, or is not writable.
    """
    try:
        fd = open_fd(path, os.O_RDWR | os.O_APPEND | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None
    found = stat_fd(fd)
    if S_ISREG(found.st_mode) and found.st_nlink == 1:
        return fd
    close_fd(fd)
    return None


def size_of(fd: int) -> int:
    """Return the size of an open file in bytes."""
    return stat_fd(fd).st_size


def open_new(path: Path) -> BinaryIO:
    """Create a file and open it for writing.

    Raises:
        FileExistsError: it exists.
    """
    return as_file(open_fd(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb")


@contextmanager
def owned() -> Iterator[None]:
    """Make files created within the block writable only by their owner, whatever the umask."""
    before = set_umask(0o022)
    set_umask(before | 0o022)
    try:
        yield
    finally:
        set_umask(before)


def read_regular(path: str | Path, *, limit: int = MAX_RECORD_BYTES, follow: bool = False) -> bytes:
    """Read a regular file of at most `limit` bytes.

    Raises:
        OSError: see `open_regular`; or the file is larger.
    """
    with open_regular(path, follow=follow) as file:
        size = size_of(file.fileno())  # 0 for what the kernel makes up
        data = file.read(min(size, limit) + 1)  # a buffer of the limit would take longer than the file
        if len(data) > size:
            data += file.read(limit + 1 - len(data))
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit} bytes", str(path))
    return data


def lines_backwards(fd: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of an open file from last to first, each with its offset; skip an incomplete last one.

    Reads only as far as it is iterated.
    """
    at, data, ended = size_of(fd), b"", False
    while at:
        length = min(at, max(TAIL_BYTES, len(data)))  # twice as far each time: a line may be long
        at -= length
        data = read_at(fd, length, at) + data
        ended = ended or b"\n" in data
        if not ended:
            continue
        end = data.rindex(b"\n") + 1
        while (start := data.rfind(b"\n", 0, end - 1) + 1) > 0:
            yield at + start, data[start:end]
            end = start
        data = data[:end]
    if ended and data:
        yield 0, data


def read_text(path: Path) -> str:
    """Read the text of a file."""
    with open_file(path) as file:
        return file.read()


def read_bytes(path: Path) -> bytes:
    """Read the content of a file."""
    with open_file(path, "rb") as file:
        return file.read()


def read_small(path: str | Path) -> str | None:
    """Read a small regular file, without surrounding white space; return None if it cannot be read."""
    with suppress(OSError):
        return read_if_there(path)
    return None


def read_if_there(path: str | Path) -> str | None:
    """Read as `read_small` does, but raise if the file may exist and cannot be read now.

    Raises:
        OSError: the disk failed, say, or too many files are open; none of `NO_FILE`.
    """
    try:
        # With a small buffer: the kernel allocates as much to answer for a file of /proc/sys, and refuses megabytes.
        return read_regular(path, limit=SMALL_BYTES, follow=True).decode(errors="replace").strip()
    except OSError as error:
        if error.errno not in NO_FILE:
            raise
        return None


def read_link(path: str | Path) -> str | None:
    """Return the target of a symbolic link; None if there is none."""
    try:
        return read_link_raw(path)
    except OSError:
        return None


def fsync_dir(directory: Path) -> None:
    """Make renames and creations in `directory` survive a power loss, if the file system can sync directories at all.

    Raises:
        OSError: the directory cannot be opened, or what is in it cannot be written to the disk.
    """
    fd = open_fd(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fsync_fd(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network and user-space file systems
            raise
    finally:
        close_fd(fd)


def replace(path: Path, content: bytes, *, durable: bool = True, guard: Guard | None = None) -> int:
    """Replace `path` by a new file: a reader sees the old one or the new one, never a part.

    Args:
        path: the file.
        content: its new content.
        durable: wait until the new file would survive a power loss. Without that, a power loss may leave it empty.
        guard: required to write to a run directory that other processes may take over.

    Returns:
        A descriptor of the new file for appending to it; after a newer process has replaced the file in turn, what is
        appended is in a file that has no name.

    Raises:
        SupersededError: by `guard`; nothing was changed.
        OSError: the file system refused; nothing is left behind, and it can be tried again.
    """
    return _replace(path, lambda fd: write_all(fd, content), durable, guard)


def replace_by_part(
    path: Path, source: int, size: int, rest: bytes = b"", *, by_kernel: bool = True, guard: Guard | None = None
) -> int:
    """Replace `path`, as `replace` does, with the first `size` bytes of an open file, and `rest`.

    Args:
        path: the file.
        source: a descriptor of the other one, or of the file itself.
        size: in bytes.
        rest: what comes after them.
        by_kernel: let the kernel copy, which shares what is on the disk where the file system can. Otherwise all is
            written anew, as this process reads it.
        guard: see `replace`.
    """

    def fill(fd: int) -> None:
        _copy(source, fd, size, by_kernel)
        write_all(fd, rest)

    return _replace(path, fill, True, guard)


def _copy(source: int, target: int, size: int, by_kernel: bool) -> None:
    done = 0
    while done < size:
        try:
            if by_kernel:
                copied = copy_range(source, target, size - done, done)
            else:
                data = read_at(source, min(COPY_BYTES, size - done), done)
                write_all(target, data)
                copied = len(data)
        except OSError as error:
            if not by_kernel or error.errno not in NO_COPY:
                raise
            by_kernel = False
            continue
        if not copied and not by_kernel:
            raise OSError(errno.EIO, f"{size - done} bytes are missing")
        by_kernel = by_kernel and copied > 0
        done += copied


def _replace(path: Path, fill: Callable[[int], None], durable: bool, guard: Guard | None) -> int:
    tag = f"{guard.tag}-" if guard else ""
    temporary = path.with_name(f"{path.name}.tmp-{tag}{this_thread()}")
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = open_fd(temporary, flags, 0o644)
    try:
        fill(fd)
        append_from_now_on(fd)  # not before: the kernel does not copy then
        if durable:
            fsync_fd(fd)
        if guard is not None:
            guard.check()
        _rename_guarded(temporary, path, guard)
        if durable:
            fsync_dir(path.parent)
    except BaseException:
        with suppress(OSError):
            close_fd(fd)
        with suppress(OSError):
            remove(temporary)
        raise
    return fd


def _rename_guarded(temporary: Path, path: Path, guard: Guard | None) -> None:
    try:
        rename(temporary, path)
    except FileNotFoundError:
        if guard is not None:
            guard.check()  # a newer holder has swept the temporary file
        raise


def write_all(fd: int, data: bytes | bytearray) -> None:
    """Write all of `data` to a file descriptor."""
    view = memoryview(data)
    while view:
        view = view[write_fd(fd, view) :]


def overwrite(fd: int, data: bytes) -> None:
    """Write all of `data` over the beginning of a file."""
    at = 0
    while at < len(data):
        at += write_at(fd, data[at:], at)


def sweep(directory: Path, lease: str, below: int) -> None:
    """Remove the temporary files of all holders of the lease named `lease` whose numbers are lower than `below`.

    Raises:
        OSError: one of them cannot be removed; the others are gone.
    """
    refused: OSError | None = None
    temporary = re.compile(rf".*\.tmp-(?:.*-)?{re.escape(lease)}-(\d+)(?:-.*)?", re.DOTALL)
    for name in list_dir(directory):
        found = temporary.fullmatch(name)
        if found and int(found[1]) < below:
            try:
                remove(directory / name)
            except OSError as error:
                refused = refused or error
    if refused is not None:
        raise refused


def write_atomic(path: Path, content: bytes | str, *, durable: bool = True, guard: Guard | None = None) -> None:
    """Replace a file that is not appended to; see `replace`."""
    close_fd(replace(path, content.encode() if isinstance(content, str) else content, durable=durable, guard=guard))


def create(path: Path, content: bytes) -> None:
    """Create `path` with `content`, durably. Of several processes that try, one succeeds.

    Raises:
        FileExistsError: it exists.
        OSError: the file system refused; nothing is left behind.
    """
    fd = open_fd(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        write_all(fd, content)
        fsync_fd(fd)
        fsync_dir(path.parent)
    except OSError:
        with suppress(OSError):
            remove(path)
        raise
    finally:
        close_fd(fd)


def write_json(path: Path, value: Any, *, durable: bool = True, guard: Guard | None = None) -> None:
    """Write `value` as indented JSON with `write_atomic`."""
    write_atomic(path, json.dumps(value, indent=2) + "\n", durable=durable, guard=guard)


def read_json(path: Path, *, follow: bool = True) -> Any | None:
    """Read the JSON value in `path`; return None if the file is missing or not valid JSON.

    Raises:
        OSError: see `read_regular`.
    """
    try:
        return json.loads(read_regular(path, follow=follow))
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None


def read_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a record of a run, no link; empty if missing or not a JSON object.

    Raises:
        OSError: see `read_regular`.
    """
    value = read_json(path, follow=False)
    return value if isinstance(value, dict) else {}


def append_line(path: Path, value: Any) -> None:
    """Append `value` as one line of JSON and fsync it; an incomplete last line is ended first."""
    fd = open_fd(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        end = size_of(fd)
        is_ended = end == 0 or read_at(fd, 1, end - 1) == b"\n"
        write_all(fd, (b"" if is_ended else b"\n") + json.dumps(value).encode() + b"\n")
        fsync_fd(fd)
    finally:
        close_fd(fd)


def read_lines(path: Path, *, limit: int | None = None, having: bytes = b"") -> Iterator[Any]:
    """Yield the JSON values of a `.jsonl` file; skip lines that are not valid JSON and an incomplete last line.

    Args:
        path: the file.
        limit: of its size, in bytes.
        having: lines without these bytes are skipped as well, unparsed.

    Raises:
        OSError: see `open_regular`; or the file is larger than `limit` bytes, or a line than MAX_RECORD_BYTES.
    """
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return
    with file:
        if limit is not None and size_of(file.fileno()) > limit:
            raise OSError(errno.EFBIG, f"larger than {limit} bytes", str(path))
        while (line := file.readline(MAX_RECORD_BYTES)).endswith(b"\n"):
            if having not in line:
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                continue
            yield value
        if len(line) == MAX_RECORD_BYTES:
            raise OSError(errno.EFBIG, f"a line is longer than {MAX_RECORD_BYTES} bytes", str(path))

"""Access the file system: atomic replacement, fsync, JSON, and primitive operations.

Code that keeps a run's records uses the file system only through this module, and calls its functions through the
module (`files.rename(...)`), so that a test can replace the file system. The primitives come first, one per system
call. All other functions use only the primitives. Imports no torch, hydra or numpy.
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
"""Errors of file systems, or pairs of them, between which the kernel does not copy a file."""

MAX_RECORD_BYTES = 64 << 20
"""The largest record that is read at once. The runner's records are far smaller, except code.json with its diffs."""

SMALL_BYTES = 1 << 20

NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.EBADF, errno.ELOOP)
"""Errors that mean that nothing is at a path: those for which `Path.exists` returns False."""

NO_FILE = (*NOT_THERE, errno.ESRCH, errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENXIO, errno.EFBIG)
"""Errors when a small file is missing, not readable for this user, or not a file."""

PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EROFS, errno.ENOTCONN, errno.ETIMEDOUT)
"""Errors that may be temporary, and so decide nothing; others, such as a missing permission, are permanent."""

AnyPath = str | os.PathLike[str]

# The primitives. A simulated file system replaces exactly these names.


def this_thread() -> str:
    """Return `PID-thread`, for file names that no other thread on this machine uses at the same time."""
    return f"{os.getpid()}-{threading.get_ident()}"


open_file = open
"""Open a file as the built-in `open` does."""

open_fd = os.open
"""Open a file descriptor as `os.open` does."""

as_file = os.fdopen
"""Return a file object that reads or writes a descriptor and closes it, as `os.fdopen` does."""

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
    """Ask the disk to begin writing a range of an open file. Return immediately, without any guarantee."""
    with suppress(OSError, AttributeError):  # not supported by the system or the file system
        # Linux begins to write dirty pages. It drops only pages that are already on the disk.
        os.posix_fadvise(fd, start, length, os.POSIX_FADV_DONTNEED)


def append_from_now_on(fd: int) -> None:
    """Make every further write to a file descriptor go to the end of the file."""
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND | os.O_NONBLOCK)


truncate_fd = os.ftruncate
"""Truncate a file to a length as `os.ftruncate` does."""

stat_fd = os.fstat
"""Return the status of an open file."""

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
"""Return the names in a directory, in no particular order."""

scan = os.scandir
"""Iterate over the entries of a directory, in no particular order, with their kinds if the directory has them."""

walk = os.walk
"""Iterate over the directories below a root: (path, names of directories, names of files)."""

make_link = os.link
"""Give a file a second name, which must not exist."""

make_symlink = os.symlink
"""(target, path): create a symbolic link, which must not exist."""

read_link_raw = os.readlink
"""Return the target of a path that must be a symbolic link."""

stat = os.stat
"""Return the status of a path, following a link."""

lstat = os.lstat
"""Return the status of a path, without following a link."""

set_times = os.utime
"""Set the times of the last access and modification of a file; the default is now."""

set_umask = os.umask
"""Set the umask, the permissions that new files do not get, and return the earlier one."""

disk_usage = shutil.disk_usage
"""Return the bytes of a file system: total, used and free."""


def resolve(path: AnyPath) -> Path:
    """Return the absolute path with links resolved. Missing trailing parts are kept.

    Raises:
        RuntimeError: the links form a cycle.
    """
    return Path(path).resolve()


def has_access_list(path: Path) -> bool:
    """Check whether `path` has a POSIX access list. If so, the group bits of its mode are the list's mask."""
    try:
        os.getxattr(path, "system.posix_acl_access")
    except (OSError, AttributeError):  # no list, or not supported by the file system or the system
        return False
    return True


# Functions built on the primitives.


def exists(path: AnyPath) -> bool:
    """Check whether `path` exists, following links.

    Raises:
        OSError: the file system cannot answer.
    """
    return _mode(path) is not None


def is_dir(path: AnyPath) -> bool:
    """Check whether `path` is a directory, following links. Raises like `exists`."""
    mode = _mode(path)
    return mode is not None and S_ISDIR(mode)


def is_file(path: AnyPath) -> bool:
    """Check whether `path` is a regular file, following links. Raises like `exists`."""
    mode = _mode(path)
    return mode is not None and S_ISREG(mode)


def is_link(path: AnyPath) -> bool:
    """Check whether `path` is a symbolic link. Raises like `exists`."""
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
    """Check whether a name is in use, even by a dangling link. Raises like `exists`."""
    return _mode(path, follow=False) is not None


def seems_dir(path: AnyPath) -> bool:
    """Check `is_dir` for any string. Return False if the file system cannot answer."""
    try:
        return is_dir(path)
    except OSError:  # for example too long for a name
        return False


def kinds(directory: Path) -> dict[str, int]:
    """Return the type (such as `stat.S_IFREG`) of each directory entry without following links; {} if missing.

    Raises:
        OSError: the directory cannot be read.
    """
    found = {}
    with suppress(FileNotFoundError, NotADirectoryError), scan(directory) as entries:
        for entry in entries:
            if entry.is_file(follow_symlinks=False):  # no further call on most file systems
                found[entry.name] = S_IFREG
            elif entry.is_dir(follow_symlinks=False):
                found[entry.name] = S_IFDIR
            else:
                with suppress(FileNotFoundError):  # removed in the meantime
                    found[entry.name] = S_IFMT(lstat(entry.path).st_mode)
    return found


@dataclass(frozen=True)
class Guard:
    """The right to write to a run directory, which a newer process may have taken over at any moment.

    A file is replaced by writing a temporary file whose name contains the tag, then checking, then renaming. A newer
    holder first takes its number and then removes the temporary files of older tags, before it does anything else. So a
    process may be suspended at any point and resume at any later time. It either fails the check or finds that its
    temporary file is gone. Its rename can never replace a file of the newer holder.

    Attributes:
        tag: name of the lease and fencing number, such as `lease-00000003`.
        check: raises SupersededError if a newer process holds the lease.
    """

    tag: str
    check: Callable[[], None]

    def and_also(self, other: Guard) -> Guard:
        """Return a guard whose check fails as soon as either guard's check fails."""

        def check() -> None:
            self.check()
            other.check()

        return Guard(f"{self.tag}-{other.tag}", check)


OWNED = 0o755
"""The mode of a directory in which only its owner may write, with any umask."""


def make_dirs(path: Path, mode: int = 0o777) -> None:
    """Create a directory and its missing parents durably. The directory may already exist.

    Args:
        path: the directory.
        mode: permissions of the new directory, minus the umask.

    Raises:
        OSError: the file system failed, or a part of the path is not a directory.
    """
    missing: list[Path] = []
    there = path
    while not is_dir(there):
        if is_taken(there):
            if is_dir(there):  # another process has just created it
                break
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))
        missing.append(there)
        there = there.parent
    with suppress(OSError):  # may be new and not synced, if its creator was killed
        fsync_dir(there.parent)
    for directory in reversed(missing):
        with suppress(FileExistsError):  # another process was faster
            make_dir(directory, mode if directory == path else 0o777)
        _sync_parent(directory)


def make_dirs_in(top: Path, path: Path) -> None:
    """Create a directory and its missing parents durably inside `top`, with mode `OWNED`. `top` must exist.

    Raises:
        FileNotFoundError: `top` is gone.
        OSError: the file system failed.
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
    """Delete a file, which may already be gone."""
    with suppress(FileNotFoundError):
        unlink(path)


def touch(path: Path) -> None:
    """Create an empty file, or update the modification time of an existing one."""
    open_append(path).close()
    set_times(path)


def look_anew(directory: Path) -> None:
    """Make the next listing of a directory show its current contents.

    A client of a network file system may show an old listing for half a minute, without files that another machine has
    since created. It notices them when it changes the directory itself, for example its modification time.

    Raises:
        OSError: the directory is gone, or this user may not write there.
    """
    set_times(directory)


def link(source: Path, target: Path) -> None:
    """Create a hard link `target` to the file `source`. If `source` is a link, it is not followed.

    Raises:
        OSError: `target` exists, or the file system does not support links.
    """
    make_link(source, target, follow_symlinks=False)


def symlink(link: Path, target: str) -> None:
    """Make `link` point to `target`, replacing an existing link."""
    remove(link)
    make_symlink(target, link)


def open_regular(path: str | Path, *, follow: bool = False) -> BinaryIO:
    """Open a regular file for reading, and nothing else.

    A run directory may be shared and contain anything. Opening a FIFO or a device must not block, and a symbolic link
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
    """Open a regular file for appending. If it is missing, create it with write permission only for its owner.

    Raises:
        OSError: the file system failed, or the path is not a regular file.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = open_fd(path, flags, 0o644)
    if not S_ISREG(stat_fd(fd).st_mode):
        close_fd(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return as_file(fd, "ab")


def open_in_place(path: Path) -> int | None:
    """Open a regular file for reading and appending. Return None if it should be replaced with a new file instead.

    Return None if the file is missing, a link or not writable, or if it has a second hard link, whose content must not
    change.
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
        FileExistsError: the file exists.
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
        OSError: see `open_regular`; or the file is larger than `limit`.
    """
    with open_regular(path, follow=follow) as file:
        size = size_of(file.fileno())  # 0 for the kernel's virtual files
        data = file.read(min(size, limit) + 1)  # a buffer of `limit` bytes would take longer than the read
        if len(data) > size:
            data += file.read(limit + 1 - len(data))
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit} bytes", str(path))
    return data


def lines_backwards(fd: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of an open file from last to first with their offsets. Skip an incomplete last line.

    The file is read only as far as you iterate.
    """
    at, data, ended = size_of(fd), b"", False
    while at:
        length = min(at, max(TAIL_BYTES, len(data)))  # double the length each time: a line may be long
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
    """Read a small regular file and strip white space. Return None if it cannot be read."""
    with suppress(OSError):
        return read_if_there(path)
    return None


def read_if_there(path: str | Path) -> str | None:
    """Read as `read_small` does, but raise if the file may exist and cannot be read now.

    Raises:
        OSError: an error not in `NO_FILE`: for example the disk failed, or too many files are open.
    """
    try:
        # With a small buffer: for a file of /proc/sys the kernel allocates as much, and refuses megabytes.
        return read_regular(path, limit=SMALL_BYTES, follow=True).decode(errors="replace").strip()
    except OSError as error:
        if error.errno not in NO_FILE:
            raise
        return None


def read_link(path: str | Path) -> str | None:
    """Return the target of a symbolic link, or None if there is no link."""
    try:
        return read_link_raw(path)
    except OSError:
        return None


def fsync_dir(directory: Path) -> None:
    """Make renames and creations in `directory` survive a power loss, if the file system can sync directories at all.

    Raises:
        OSError: the directory cannot be opened, or its entries cannot be written to the disk.
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
    """Replace `path` with a new file atomically. A reader sees the complete old or new file.

    Args:
        path: the file.
        content: its new content.
        durable: wait until the new file would survive a power loss. Otherwise a power loss may leave it empty.
        guard: required to write to a run directory that other processes may take over.

    Returns:
        A descriptor of the new file for appending. After a newer process has replaced the file, appended data goes to
            an unlinked file.

    Raises:
        SupersededError: raised by `guard`; nothing was changed.
        OSError: the file system failed; nothing is left behind, and you can try again.
    """
    return _replace(path, lambda fd: write_all(fd, content), durable, guard)


def replace_by_part(
    path: Path, source: int, size: int, rest: bytes = b"", *, by_kernel: bool = True, guard: Guard | None = None
) -> int:
    """Replace `path`, as `replace` does, with the first `size` bytes of an open file, and `rest`.

    Args:
        path: the file.
        source: descriptor of the open file, which may be `path` itself.
        size: number of bytes to copy.
        rest: bytes to append.
        by_kernel: let the kernel copy, which shares blocks on the disk where the file system can. Otherwise this
            process reads and rewrites all bytes.
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
        append_from_now_on(fd)  # not earlier: the kernel does not copy to files opened for appending
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
            guard.check()  # a newer holder may have removed the temporary file
        raise


def write_all(fd: int, data: bytes | bytearray) -> None:
    """Write all of `data` to a file descriptor."""
    view = memoryview(data)
    while view:
        view = view[write_fd(fd, view) :]


def overwrite(fd: int, data: bytes) -> None:
    """Overwrite the beginning of a file with all of `data`."""
    at = 0
    while at < len(data):
        at += write_at(fd, data[at:], at)


def sweep(directory: Path, lease: str, below: int) -> None:
    """Remove the temporary files of all holders of the lease named `lease` whose numbers are lower than `below`.

    Raises:
        OSError: a file cannot be removed; all others were removed.
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
    """Create `path` with `content` durably. If several processes try, exactly one succeeds.

    Raises:
        FileExistsError: the file exists.
        OSError: the file system failed; nothing is left behind.
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
    """Read the JSON value in `path`. Return None if the file is missing or not valid JSON.

    Raises:
        OSError: see `read_regular`.
    """
    try:
        return json.loads(read_regular(path, follow=follow))
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a run's record, which must not be a link. Return {} if missing or not an object.

    Raises:
        OSError: see `read_regular`.
    """
    value = read_json(path, follow=False)
    return value if isinstance(value, dict) else {}


def append_line(path: Path, value: Any) -> None:
    """Append `value` as a line of JSON and fsync the file. If the last line is incomplete, end it first."""
    fd = open_fd(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        end = size_of(fd)
        is_ended = end == 0 or read_at(fd, 1, end - 1) == b"\n"
        write_all(fd, (b"" if is_ended else b"\n") + json.dumps(value).encode() + b"\n")
        fsync_fd(fd)
    finally:
        close_fd(fd)


def read_lines(path: Path, *, limit: int | None = None, having: bytes = b"") -> Iterator[Any]:
    """Yield the JSON values of a `.jsonl` file. Skip invalid lines and an incomplete last line.

    Args:
        path: the file.
        limit: largest size of the file in bytes.
        having: skip lines that do not contain these bytes, without parsing them.

    Raises:
        OSError: see `open_regular`; or the file is larger than `limit`, or a line longer than MAX_RECORD_BYTES.
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

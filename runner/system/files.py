"""All access to the file system: atomic replacement, fsync, JSON, and the plain operations under them.

Code that keeps a run's records opens, changes and lists files only through here, and calls the functions through the
module (`files.rename(...)`), so that a test can replace the file system. Imports no torch, hydra or numpy.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

MAX_RECORD_BYTES = 64 << 20
"""The largest record that is read whole; our own are a thousand times smaller, except code.json with its diffs."""

open_file = open
"""Open a file as the built-in `open` does."""

open_fd = os.open
"""Open a file descriptor as `os.open` does."""

write_fd = os.write
"""Write to a file descriptor; returns the number of bytes written, perhaps fewer than passed."""

fsync_fd = os.fsync
"""Wait until what was written to a file descriptor would survive a power loss."""

truncate_fd = os.ftruncate
"""Cut a file to a length as `os.ftruncate` does."""

close_fd = os.close
"""Close a file descriptor."""

make_dir = os.mkdir
"""Create a directory, which must not exist, with a mode."""

rename = os.replace
"""Move a file or a directory over `target` on the same file system, atomically."""

list_dir = os.listdir
"""The names in a directory, in no particular order."""

walk = os.walk
"""Every directory below a root: (path, names of directories, names of files)."""

remove_tree = shutil.rmtree
"""Delete a directory and everything in it."""


def make_dirs(path: Path) -> None:
    """Create a directory and its missing parents; it may exist already."""
    path.mkdir(parents=True, exist_ok=True)


def remove(path: Path) -> None:
    """Delete a file; it may be gone already."""
    path.unlink(missing_ok=True)


def touch(path: Path) -> None:
    """Create an empty file, or update the modification time of an existing one."""
    path.touch()


def symlink(link: Path, target: str) -> None:
    """Make `link` point to `target`, replacing an existing link."""
    link.unlink(missing_ok=True)
    link.symlink_to(target)


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
        fd = os.open(path, flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            raise not_regular from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise not_regular
    return os.fdopen(fd, "rb")


def read_regular(path: str | Path, *, limit: int = MAX_RECORD_BYTES, follow: bool = False) -> bytes:
    """The content of a regular file of at most `limit` bytes.

    Raises:
        OSError: see `open_regular`; or the file is larger.
    """
    with open_regular(path, follow=follow) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit} bytes", str(path))
    return data


def read_tail(path: Path, size: int) -> bytes:
    """The last `size` bytes of a regular file.

    Raises:
        OSError: see `open_regular`.
    """
    with open_regular(path) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - size))
        return file.read(size)


def read_text(path: Path) -> str:
    """The text of a file."""
    return path.read_text()


def read_bytes(path: Path) -> bytes:
    """The content of a file."""
    return path.read_bytes()


def read_small(path: str | Path) -> str | None:
    """The text of a small regular file without surrounding white space; None if it cannot be read."""
    try:
        return read_regular(path, follow=True).decode(errors="replace").strip()
    except OSError:
        return None


def read_link(path: str | Path) -> str | None:
    """The target of a symbolic link; None if there is none."""
    try:
        return os.readlink(path)
    except OSError:
        return None


def fsync_dir(directory: Path) -> None:
    """Make renames and creations in `directory` survive a power loss."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(
    path: Path, content: bytes | str, *, durable: bool = True, check: Callable[[], None] | None = None
) -> None:
    """Replace `path` by `content`: a reader sees the old file or the new one, never a part.

    Args:
        path: the file.
        content: its new content.
        durable: wait until the new file would survive a power loss. Without that, a power loss may leave it empty.
        check: called last, right before the rename; whatever it raises leaves `path` unchanged.

    Raises:
        OSError: the file system refused; `path` is unchanged and nothing is left behind.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}-{threading.get_ident()}")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        if check is not None:
            check()
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        fsync_dir(path.parent)


def create(path: Path, content: bytes) -> None:
    """Create `path` with `content`, durably. Of several processes that try, one succeeds.

    Raises:
        FileExistsError: it exists.
        OSError: the file system refused; nothing is left behind.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        os.write(fd, content)
        os.fsync(fd)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(fd)
    fsync_dir(path.parent)


def overwrite(path: Path, content: bytes) -> None:
    """Write `content` over the first bytes of `path` in place; unlike a new file, this works on a full disk."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.write(fd, content)
    finally:
        os.close(fd)


def write_json(path: Path, value: Any, *, durable: bool = True, check: Callable[[], None] | None = None) -> None:
    """`write_atomic` of `value` as indented JSON."""
    write_atomic(path, json.dumps(value, indent=2) + "\n", durable=durable, check=check)


def read_json(path: Path, *, follow: bool = True) -> Any | None:
    """The JSON value in `path`, or None if the file is missing or not valid JSON.

    Raises:
        OSError: see `read_regular`.
    """
    try:
        return json.loads(read_regular(path, follow=follow))
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a record of a run, which may not be a link; empty if missing or not a JSON object.

    Raises:
        OSError: see `read_regular`.
    """
    value = read_json(path, follow=False)
    return value if isinstance(value, dict) else {}


def append_line(path: Path, value: Any) -> None:
    """Append `value` as one line of JSON and fsync it; an incomplete last line is ended first."""
    with open(path, "a+b") as file:
        if file.tell() and file.seek(-1, os.SEEK_END) and file.read(1) != b"\n":
            file.write(b"\n")
        file.write(json.dumps(value).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: Path, *, limit: int | None = None) -> Iterator[Any]:
    """The JSON values of a `.jsonl` file; lines that are not valid JSON and an incomplete last line are skipped.

    Raises:
        OSError: see `open_regular`; or the file is larger than `limit` bytes, or a line than MAX_RECORD_BYTES.
    """
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return
    with file:
        if limit is not None and os.fstat(file.fileno()).st_size > limit:
            raise OSError(errno.EFBIG, f"larger than {limit} bytes", str(path))
        while (line := file.readline(MAX_RECORD_BYTES)).endswith(b"\n"):
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                continue
            yield value
        if len(line) == MAX_RECORD_BYTES:
            raise OSError(errno.EFBIG, f"a line is longer than {MAX_RECORD_BYTES} bytes", str(path))

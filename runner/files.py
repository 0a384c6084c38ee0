"""Files that are whole or absent: atomic replacement, fsync, JSON.

Nothing here imports torch, hydra or numpy.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any


def fsync_dir(directory: Path) -> None:
    """Make renames and creations in `directory` survive a power loss."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: Path, content: bytes | str) -> None:
    """Replace `path` by `content`: a reader sees the old file or the new one, never a part.

    Raises:
        OSError: the file system refused; `path` is unchanged and nothing is left behind.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}-{threading.get_ident()}")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)


def write_json(path: Path, value: Any) -> None:
    """`write_atomic` of `value` as indented JSON."""
    write_atomic(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path) -> Any | None:
    """The JSON value in `path`, or None if it is missing or cut short."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError, UnicodeDecodeError):
        return None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; empty where there is none, or none that is whole."""
    value = read_json(path)
    return value if isinstance(value, dict) else {}


def append_line(path: Path, value: Any) -> None:
    """Append `value` as one line of JSON and fsync it; a last line that was cut short does not swallow it."""
    with open(path, "a+b") as file:
        if file.tell() and file.seek(-1, os.SEEK_END) and file.read(1) != b"\n":
            file.write(b"\n")
        file.write(json.dumps(value).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: Path) -> Iterator[Any]:
    """The JSON values of a `.jsonl` file; a last line that a kill cut short is left out."""
    if not path.exists():
        return
    with open(path) as file:
        for line in file:
            if not line.endswith("\n"):
                return
            with suppress(json.JSONDecodeError):
                yield json.loads(line)

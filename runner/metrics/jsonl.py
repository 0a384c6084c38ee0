"""metrics.jsonl: one JSON object per line, every step once, however often the run is killed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from runner.system import files


class JsonlWriter:
    """Appends records to one open file, each with a single write, so that SIGKILL loses no written record.

    `write` takes microseconds and does not fsync. Call `sync` before a checkpoint is committed: then a power failure
    loses no line up to the step of that checkpoint either.

    Args:
        path: the file; created if it is missing, otherwise appended to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = files.open_fd(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        files.fsync_dir(path.parent)

    def write(self, record: dict[str, Any]) -> None:
        """Append `record` as one line.

        Raises:
            OSError: the disk is full, for example; no part of the line is in the file then, and it can be written
            again.
        """
        line = (json.dumps(record) + "\n").encode()
        written = files.write_fd(self._fd, line)
        if written < len(line):
            self._write_rest(line, written)

    def _write_rest(self, line: bytes, written: int) -> None:
        try:
            while written < len(line):
                written += files.write_fd(self._fd, line[written:])
        except OSError:
            files.truncate_fd(self._fd, os.fstat(self._fd).st_size - written)
            raise

    def flush(self) -> None:
        """Nothing to do: every line was passed to the operating system when it was written."""

    def sync(self) -> None:
        """Make every line written so far durable."""
        files.fsync_fd(self._fd)

    def close(self) -> None:
        """Sync and close; closing twice is fine, writing afterwards is an error."""
        if self._fd >= 0:
            self.sync()
            files.close_fd(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def resume_jsonl(path: Path, step: int, evaluated: bool = True) -> int:
    """Truncate the records to those up to `step`, the step at which a run resumes.

    The file is replaced by a new one (a new inode), so that a frozen older process that still has the old file open
    writes to a file that nobody reads. Lines are in order of step, so only the end of the file is parsed; a last line
    that a kill left incomplete is dropped.

    Args:
        path: a `.jsonl` file whose records have `step`; it may be missing.
        step: records with a greater `step` are dropped; 0 keeps none.
        evaluated: whether the restored state is from after the evaluation of `step`. If not, that evaluation's record,
            which an attempt in between may have written, is dropped too, because it will be written again.

    Returns:
        The highest step of the complete records before; 0 if there was none.
    """
    try:
        data = files.read_bytes(path)
    except FileNotFoundError:
        return 0
    end, last = data.rfind(b"\n") + 1, 0
    while end > 0:
        start = data.rfind(b"\n", 0, end - 1) + 1
        here = _step(data[start:end])
        last = last if here is None else max(last, here)
        again = not evaluated and here == step and b'"eval_loss"' in data[start:end]
        if here is not None and here <= step and not again:
            break
        end = start
    files.write_atomic(path, data[:end])
    return last


def _step(line: bytes) -> int | None:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None

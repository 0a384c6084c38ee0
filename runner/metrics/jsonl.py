"""metrics.jsonl: one JSON object a line, every step once, whatever kills the run in between."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from runner.files import fsync_dir, write_atomic


class JsonlWriter:
    """Appends records to one open file, each with one write, so a SIGKILL loses none that was written.

    `write` costs microseconds and no fsync. Call `sync` before a checkpoint is committed: then no line up to the
    step of that checkpoint can be lost to a power failure either.

    Args:
        path: the file; made if it is missing, appended to if it is there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        fsync_dir(path.parent)

    def write(self, record: dict[str, Any]) -> None:
        """Append `record` as one line.

        Raises:
            OSError: the disk is full, say; then no part of the line is in the file, and it can be written again.
        """
        line = (json.dumps(record) + "\n").encode()
        written = os.write(self._fd, line)
        if written < len(line):
            self._write_rest(line, written)

    def _write_rest(self, line: bytes, written: int) -> None:
        try:
            while written < len(line):
                written += os.write(self._fd, line[written:])
        except OSError:
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
            raise

    def flush(self) -> None:
        """Nothing to do: every line was handed to the operating system when it was written."""

    def sync(self) -> None:
        """Put every line written so far on the disk."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Sync and close; writing afterwards is an error. Closing twice is none."""
        if self._fd >= 0:
            self.sync()
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def resume_jsonl(path: Path, step: int, evaluated: bool = True) -> int:
    """Keep only the records up to `step`, the step a run resumes from, and say how far they went before.

    The file is replaced by a new one (a new inode), so that a frozen older process that still has the old one open
    writes into a file that nobody reads. Lines are in order of step, so only the end of the file is parsed; a last
    line that a kill cut short is dropped.

    Args:
        path: a `.jsonl` file whose records have `step`; it may be missing.
        step: records with a greater `step` are dropped; 0 keeps none.
        evaluated: whether the state resumed from has the evaluation of `step` behind it; otherwise that record,
            which an attempt in between may have written, is dropped too, for it will be written again.

    Returns:
        The highest step of the whole records that were there; 0 if there was none.
    """
    try:
        data = path.read_bytes()
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
    write_atomic(path, data[:end])
    return last


def _step(line: bytes) -> int | None:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None

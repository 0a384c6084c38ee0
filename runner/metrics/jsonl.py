"""metrics.jsonl: one JSON object per line, every step once, however often the run is killed."""

from __future__ import annotations

import errno
import json
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from runner.system import files

FULL = (errno.ENOSPC, errno.EDQUOT)


class JsonlWriter:
    """Appends records to one open file, each with a single write, so that SIGKILL loses no written record.

    `write` takes microseconds and does not fsync. Call `sync` before a checkpoint is committed: then a power failure
    loses no line up to the step of that checkpoint either. Make one with `resume_jsonl`.

    Args:
        path: the file.
        fd: open for appending to it.
        size: its size in bytes.
        reached: the highest step of the complete records that were found; 0 if there was none.
        guard: the right to write to the run directory.
    """

    def __init__(self, path: Path, fd: int, size: int, reached: int, guard: files.Guard | None) -> None:
        self.path = path
        self.reached = reached
        self._fd = fd
        self._size = size
        self._guard = guard
        self._failed = False

    def write(self, record: dict[str, Any]) -> None:
        """Append `record` as one line.

        Raises:
            OSError: the disk is full, for example; it can be written again, and is in the file once then.
            SupersededError: by the guard.
        """
        self._recover()
        line = (json.dumps(record) + "\n").encode()
        try:
            files.write_all(self._fd, line)
        except OSError as error:
            self._failed = True
            if error.errno in FULL:  # there may be no space for a new file
                files.truncate_fd(self._fd, self._size)
                self._failed = False
            raise
        self._size += len(line)

    def _recover(self) -> None:
        """After an error put the lines written so far into a new file.

        What an fsync has refused once may be lost though a second one succeeds, and a descriptor may be stale for ever.
        """
        if not self._failed:
            return
        data = files.read_bytes(self.path)[: self._size]
        if len(data) < self._size:
            raise OSError(errno.EIO, f"{self._size - len(data)} bytes are missing", str(self.path))
        fd = files.replace(self.path, data, guard=self._guard)
        with suppress(OSError):
            files.close_fd(self._fd)
        self._fd, self._failed = fd, False

    def flush(self) -> None:
        """Nothing to do: every line was passed to the operating system when it was written."""

    def sync(self) -> None:
        """Make every line written so far durable.

        Raises:
            OSError: the file system refused; it can be tried again.
            SupersededError: by the guard.
        """
        self._recover()
        try:
            files.fsync_fd(self._fd)
        except OSError:
            self._failed = True
            raise

    def close(self) -> None:
        """Sync and close; closing twice is fine, writing afterwards is an error."""
        if self._fd >= 0:
            self.sync()
            fd, self._fd = self._fd, -1
            files.close_fd(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def resume_jsonl(path: Path, step: int, evaluated: bool = True, guard: files.Guard | None = None) -> JsonlWriter:
    """Keep the records up to `step`, the step at which a run resumes, and open them for appending.

    The file is replaced by a new one, and the writer appends to that very one, never to what has its name later: a
    frozen older process that still has the old file open writes to a file that nobody reads. Lines are in order of
    step, so only the end of the file is parsed; a last line that a kill left incomplete is dropped.

    Args:
        path: a `.jsonl` file whose records have `step`; it may be missing.
        step: records with a greater `step` are dropped; 0 keeps none.
        evaluated: whether the restored state is from after the evaluation of `step`. If not, that evaluation's record,
            which an attempt in between may have written, is dropped too, because it will be written again.
        guard: the right to write to the run directory.

    Raises:
        SupersededError: by `guard`; nothing was changed.
        OSError: the file cannot be read or replaced; it is unchanged.
    """
    data, last = _cut(path, step, evaluated)
    return JsonlWriter(path, files.replace(path, data, guard=guard), len(data), last, guard)


def up_to(path: Path, step: int) -> bytes:
    """The lines of a `.jsonl` file up to those of `step`; none if it is missing."""
    return _cut(path, step, True)[0]


def _cut(path: Path, step: int, evaluated: bool) -> tuple[bytes, int]:
    """The lines to keep, as for `resume_jsonl`, and the highest step of all lines that were looked at."""
    try:
        data = files.read_bytes(path)
    except FileNotFoundError:
        data = b""
    end, last = data.rfind(b"\n") + 1, 0
    while end > 0:
        start = data.rfind(b"\n", 0, end - 1) + 1
        here = _step(data[start:end])
        last = last if here is None else max(last, here)
        again = not evaluated and here == step and b'"eval_' in data[start:end]
        if here is not None and here <= step and not again:
            break
        end = start
    return data[:end], last


def _step(line: bytes) -> int | None:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None

"""Write metrics.jsonl with one JSON object per line and each step exactly once, even if the run is killed."""

from __future__ import annotations

import errno
import json
import re
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from runner.rundir.appender import announce, nobody_appends, withdraw
from runner.rundir.evaluations import EVALUATION
from runner.rundir.paths import RunDir
from runner.system import files

_LATER = re.compile(rb'\{"step": (\d{1,18}), .*\}\n')  # start and end of a line that `JsonlWriter` wrote
FULL = (errno.ENOSPC, errno.EDQUOT)
TAIL_BYTES = 1 << 20
"""Number of unsynced bytes above which `write` syncs without being asked to."""


class JsonlWriter:
    """A writer that appends each record with one write to an open file, so that SIGKILL loses no written record.

    `write` takes microseconds and seldom waits for the disk. Call `sync` before you commit a checkpoint: then a power
    failure cannot lose a line up to the checkpoint's step. Lines are also kept in memory until `sync`, because a
    network file system can accept lines, fail to store them, and lose them. While the disk is full, the file may lack
    lines after the last checkpoint. If the run is killed then, it writes them again after the resume. Create a writer
    with `resume_jsonl`.

    Args:
        path: the file.
        fd: file descriptor, open for appending.
        size: size of the file in bytes, all of them durable.
        reached: highest step of the complete records in the file; 0 if there are none.
        guard: the right to write to the run directory.
    """

    def __init__(self, path: Path, fd: int, size: int, reached: int, guard: files.Guard | None) -> None:
        self.path = path
        self.reached = reached
        self._fd = fd
        self._durable = size
        self._tail = bytearray()  # bytes written after the durable ones
        self._guard = guard
        self._failed = False
        self._in_doubt = False  # whether the tail in the file may be damaged

    def write(self, record: dict[str, Any]) -> None:
        """Append `record` as one line.

        Raises:
            OSError: the disk is full, for example. You can write the record again; the file then has it once.
            SupersededError: a newer attempt holds the lease.
        """
        if len(self._tail) > TAIL_BYTES:
            self.sync()
        self._recover()
        line = (json.dumps(record) + "\n").encode()
        try:
            files.write_all(self._fd, line)
        except OSError as error:
            self._failed = True
            if error.errno in FULL:  # there may be no space for a new file
                files.truncate_fd(self._fd, self._durable + len(self._tail))
                # A network file system may report with this write that it has lost earlier ones.
                self._failed, self._in_doubt = False, True
            raise
        self._tail += line

    def _recover(self) -> None:
        """Write the lines so far into a new file if an error has occurred.

        After a failed fsync the data may be lost even if a second fsync succeeds, and a descriptor may stay stale.
        """
        if not self._failed:
            return
        with files.open_regular(self.path) as there:
            if (missing := self._durable - files.size_of(there.fileno())) > 0:
                raise OSError(errno.EIO, f"{missing} bytes are missing", str(self.path))
            fd = files.replace_by_part(
                self.path, there.fileno(), self._durable, bytes(self._tail), by_kernel=False, guard=self._guard
            )
        with suppress(OSError):
            files.close_fd(self._fd)
        self._fd, self._failed = fd, False
        self._is_durable()

    def _is_durable(self) -> None:
        self._durable += len(self._tail)
        self._tail.clear()
        self._in_doubt = False

    def truncate(self) -> None:
        """Durably remove everything after the lines that were kept. A new file has nothing to remove.

        Raises:
            OSError: the file system refused.
        """
        if files.size_of(self._fd) > self._durable:
            files.truncate_fd(self._fd, self._durable)
            files.fsync_fd(self._fd)

    def flush(self) -> None:
        """Do nothing: each line is passed to the operating system when it is written."""

    def sync(self) -> None:
        """Make every line written so far durable.

        Raises:
            OSError: the file system returned an error. You can try again.
            SupersededError: a newer attempt holds the lease.
        """
        self._recover()
        try:
            if self._in_doubt:
                files.truncate_fd(self._fd, self._durable)
                files.write_all(self._fd, bytes(self._tail))
            files.fsync_fd(self._fd)
        except OSError:
            self._failed = True
            raise
        self._is_durable()

    def close(self) -> None:
        """Sync and close. Closing twice is allowed; writing afterwards is an error."""
        if self._fd >= 0:
            self.sync()
            fd, self._fd = self._fd, -1
            files.close_fd(fd)

    def abandon(self) -> None:
        """Close without writing anything."""
        fd, self._fd = self._fd, -1
        with suppress(OSError):
            if fd >= 0:
                files.close_fd(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def resume_records(run: RunDir, step: int, evaluated: bool = True) -> tuple[JsonlWriter, JsonlWriter]:
    """Keep the records of metrics.jsonl and timings.jsonl up to `step`, where a run resumes, and open both files.

    If no other process can have the files open for writing, they are truncated, which takes time proportional to what
    is dropped. Otherwise copies replace them. A frozen older process that wakes up then writes to files that are no
    longer read. See `runner.rundir.appender`.

    Args:
        run: the run directory, with the guard of its lease.
        step: records with a greater `step` are dropped; 0 keeps none.
        evaluated: whether the restored state is from after the evaluation of `step`. If not, that evaluation's record
            is dropped too, because the evaluation will be repeated.

    Raises:
        SupersededError: a newer attempt holds the lease; nothing was changed.
        OSError: a file cannot be read, replaced or truncated. You can try again.
    """
    in_place, opened = nobody_appends(run), []
    try:
        for path in (run.metrics, run.timings):
            found = _in_place(path, step, evaluated, run.guard) if in_place else None
            opened.append(found or resume_jsonl(path, step, evaluated, run.guard))
        announce(run)
        for writer in opened:
            writer.truncate()
    except BaseException:
        for writer in opened:
            writer.abandon()
        raise
    return opened[0], opened[1]


def _in_place(path: Path, step: int, evaluated: bool, guard: files.Guard | None) -> JsonlWriter | None:
    """Open the file for truncation. Return None if it is missing, read-only, a link, or has a second name."""
    fd = files.open_in_place(path)
    if fd is None:
        return None
    try:
        return JsonlWriter(path, fd, *_cut(fd, step, evaluated), guard)
    except BaseException:
        files.close_fd(fd)
        raise


def resume_jsonl(path: Path, step: int, evaluated: bool = True, guard: files.Guard | None = None) -> JsonlWriter:
    """Keep the records of one file up to `step` in a new file that replaces it, and open the new file for appending.

    The writer appends to that file even if a different file later replaces it at the path. Arguments and errors are
    those of `resume_records`. The file may be missing.
    """
    try:
        file = files.open_regular(path, follow=True)
    except FileNotFoundError:
        return JsonlWriter(path, files.replace(path, b"", guard=guard), 0, 0, guard)
    with file:
        size, reached = _cut(file.fileno(), step, evaluated)
        return JsonlWriter(path, files.replace_by_part(path, file.fileno(), size, guard=guard), size, reached, guard)


def copy_records(run: RunDir, other: RunDir, step: int) -> None:
    """Copy the records of another run up to `step` into a branch that has none yet.

    Raises:
        SupersededError: a newer attempt holds the lease of the branch.
        OSError: the file system refused.
    """
    for own, theirs in ((run.metrics, other.metrics), (run.timings, other.timings)):
        try:
            file = files.open_regular(theirs, follow=True)
        except FileNotFoundError:
            files.close_fd(files.replace(own, b"", guard=run.guard))
            continue
        with file:
            size, _ = _cut(file.fileno(), step, True)
            files.close_fd(files.replace_by_part(own, file.fileno(), size, guard=run.guard))
    withdraw(run)


def _cut(fd: int, step: int, evaluated: bool) -> tuple[int, int]:
    """Return the size of the part of a file that is kept, and the highest step of all lines that were read.

    Lines are in order of step, so the file is read backwards, and only the kept lines are parsed.
    """
    reached = 0
    for start, line in files.lines_backwards(fd):
        later = _LATER.match(line)
        if later and int(later[1]) > step:
            reached = max(reached, int(later[1]))
            continue
        record = _record(line)
        if record is None:
            continue
        reached = max(reached, record["step"])
        # The record of a step can contain EVALUATION as well, in the name of a source.
        again = not evaluated and record["step"] == step and EVALUATION in line and "loss" not in record
        if record["step"] <= step and not again:
            return start + len(line), reached
    return 0, reached


def _record(line: bytes) -> dict[str, Any] | None:
    """Parse a line as a record. Return None if it is damaged."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and type(record.get("step")) is int else None

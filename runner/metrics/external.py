"""Base of writers that use an external library in a background thread, so that it never delays training."""

from __future__ import annotations

import importlib.util
import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from runner.errors import SupersededError, UserError
from runner.metrics.lineage import FAILED, Lineage, Summary
from runner.metrics.media import Media
from runner.rundir.paths import RunDir
from runner.system import files

_log = logging.getLogger(__name__)

QUEUE_RECORDS = 10_000  # if more records are waiting, the logger counts as failed
CLOSE_TIMEOUT_S = 20.0  # a preempted run cannot wait longer for a network


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record by name, nested ones as `a/b`, without `step`."""
    return {
        name: float(value)
        for name, value in flattened(record, "/")
        if isinstance(value, int | float) and not isinstance(value, bool) and name != "step"
    }


def flattened(node: Mapping[str, Any], separator: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings with their names, joined by `separator`."""
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from flattened(value, separator, f"{prefix}{key}{separator}")
        else:
            yield f"{prefix}{key}", value


class ExternalWriter(ABC):
    """Base of a `Writer` whose library is imported, opened and written to in a background thread.

    `write` takes a few microseconds. If the library fails (no network, a full disk, a refused login), the failure is
    reported once and later records are dropped for it. metrics.jsonl has all of them.

    Args:
        run: the run directory.
        step: the step at which the run resumes, 0 at its start.
        report: called with a one-line message if the logger fails; by default it logs the message as a warning.

    Raises:
        UserError: the library is not installed.

    Example:
        >>> from runner.metrics.external import ExternalWriter
        >>> class Database(ExternalWriter):
        ...     name, module, package = "database", "sqlite3", "sqlite3"
        ...     def open(self):  # in the thread, before the first record
        ...         import sqlite3
        ...         self._base = sqlite3.connect(self.run.path / "metrics.sqlite")
        ...         self._base.execute("CREATE TABLE IF NOT EXISTS metrics (step, name, value, UNIQUE (step, name))")
        ...     def log(self, step, values):  # steps repeat after a kill
        ...         rows = [(step, name, value) for name, value in values.items()]
        ...         self._base.executemany("INSERT OR REPLACE INTO metrics VALUES (?, ?, ?)", rows)
        ...     def sync(self):
        ...         self._base.commit()
        ...     def end(self):
        ...         self._base.commit()
        ...         self._base.close()
    """

    name: str
    module: str
    package: str
    summarizes = False
    """Whether the library shows the last and best value of each evaluation metric, from `summary`."""

    def __init__(self, run: RunDir, step: int = 0, report: Callable[[str], None] = _log.warning) -> None:
        if importlib.util.find_spec(self.module) is None:
            raise UserError(
                f"logger {self.name} needs the package {self.package!r}, which is not installed: "
                f"pip install {self.package}, or remove the logger"
            )
        self.run = run
        self.step = step
        self._report = report
        self.lineage = Lineage()
        self.ended = FAILED
        self.reason: str | None = None
        self.is_new = False
        self._queue: queue.Queue[dict[str, Any] | Media | None] = queue.Queue(QUEUE_RECORDS)
        self._thread: threading.Thread | None = None
        self._broken = False

    @abstractmethod
    def open(self) -> None:
        """Import the library, and start or resume the logged run."""

    @abstractmethod
    def log(self, step: int, values: dict[str, float]) -> None:
        """Log the numbers of one record."""

    @abstractmethod
    def sync(self) -> None:
        """Send the records that the library has buffered."""

    @abstractmethod
    def end(self) -> None:
        """Send everything and close."""

    def show(self, media: Media) -> None:  # noqa: B027 a library without images and texts needs no method
        """Log an image or a text. By default, do nothing: the run directory has its file."""

    def behind(self) -> bool:
        """Check whether the library lacks records up to the step of the resume. Called after `open`."""
        return False

    def about(self, lineage: Lineage) -> None:
        """Receive facts about the run. Called before the first record."""
        self.lineage = lineage

    def ending(self, state: str, reason: str | None = None) -> None:
        """Set how the attempt ended (see `lineage`), and the reason if it ended early. Called before `close`."""
        self.ended, self.reason = state, reason

    def write(self, record: dict[str, Any]) -> None:
        """Pass `record` to the thread. The first record starts the thread."""
        self._send(record)

    def media(self, media: Media) -> None:
        """Pass an image or a text to the thread."""
        self._send(media)

    def _send(self, record: dict[str, Any] | Media) -> None:
        if self._broken:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"logger-{self.name}", daemon=True)
            self._thread.start()
        self._put(record)

    def flush(self) -> None:
        """Ask the thread to send its records, without waiting for it."""
        if self._thread is not None and not self._broken:
            self._put({})

    def close(self) -> None:
        """Wait until all records are sent, for at most `CLOSE_TIMEOUT_S` seconds."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        if not self._broken:
            self._put(None)
        thread.join(CLOSE_TIMEOUT_S)
        if thread.is_alive():
            self._report(f"logger {self.name} did not finish within {CLOSE_TIMEOUT_S:g} s: its last records are lost")

    def _put(self, record: dict[str, Any] | Media | None) -> None:
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._fail(f"{QUEUE_RECORDS} records are waiting")

    def _work(self) -> None:
        try:
            self._check_guard()
            self.open()
            if self.summarizes:
                self.summary = Summary(self.run, self.step, self.lineage.best)
            if self.step and self.behind():
                self._catch_up()
            while not self._broken and (record := self._queue.get()) is not None:
                self._check_guard()
                if isinstance(record, Media):
                    self.show(record)
                elif record:
                    if self.summarizes:
                        self.summary.add(record)
                    self.log(int(record["step"]), scalars(record))
                else:
                    self.sync()
            self._check_guard()
            self.end()
        except SupersededError:  # a newer attempt logs from here on; the training thread checks the guard as well
            self._broken = True
        except Exception as error:  # noqa: BLE001 an error of the library must not end the training
            self._fail(f"{type(error).__name__}: {error}".splitlines()[0])

    def _catch_up(self) -> None:
        """Log the records that the library lacks: the trunk's part of a branch, and records not sent before a kill."""
        for record in files.read_lines(self.run.metrics):
            if not isinstance(record, dict) or not isinstance(record.get("step"), int):
                continue
            if record["step"] > self.step or self._broken:
                break
            self._check_guard()
            self.log(record["step"], scalars(record))

    def _check_guard(self) -> None:
        """Check the guard before the library writes. Its files, unlike the run's records, have no later protection."""
        with suppress(OSError):
            self.run.check_guard()

    def _fail(self, reason: str) -> None:
        if not self._broken:
            self._broken = True
            self._report(f"logger {self.name} failed and is disabled from here on ({reason})")

    def identity(self, make: Callable[[], str]) -> str:
        """Return the id of this run in the library. It is created once, then read from the run directory."""
        ids = files.read_object(self.run.loggers)
        if self.name not in ids:
            self.is_new = True
            ids[self.name] = make()
            files.write_json(self.run.loggers, ids, guard=self.run.guard)
        return str(ids[self.name])

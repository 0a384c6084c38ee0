"""Loggers outside this project, behind a thread of their own: a slow or broken one never holds up training."""

from __future__ import annotations

import importlib.util
import queue
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from runner.errors import UserError
from runner.files import read_json, write_json
from runner.run_dir import RunDir

QUEUE_RECORDS = 10_000  # then records are dropped, and that is said
CLOSE_TIMEOUT_S = 20.0  # a preempted run has no more time to wait for a network


def complain(message: str) -> None:
    """One line on standard error."""
    print(f"warning: {message}", file=sys.stderr, flush=True)


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record by name, `a/b` for a number in a dictionary; `step` and everything else left out."""
    return dict(_flat(record)) if record else {}


def _flat(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and prefix + key != "step":
            yield prefix + key, float(value)


class ExternalWriter(ABC):
    """A `Writer` whose library is imported, opened and written to in a background thread.

    `write` costs a few microseconds. A fault of the library (no network, a full disk, a refused login) is reported
    once; from then on its records are dropped and training goes on, since metrics.jsonl has them all.

    Args:
        run: the run directory.
        step: the step that the run resumes from, 0 at its start.
        report: takes the one-line message of a fault.

    Raises:
        UserError: the library is not installed.
    """

    name: str
    module: str
    package: str

    def __init__(self, run: RunDir, step: int = 0, report: Callable[[str], None] = complain) -> None:
        if importlib.util.find_spec(self.module) is None:
            raise UserError(
                f"logger {self.name} needs the package {self.package!r}, which is not installed: "
                f"pip install {self.package}, or leave the logger out"
            )
        self.run = run
        self.step = step
        self._report = report
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(QUEUE_RECORDS)
        self._thread: threading.Thread | None = None
        self._broken = False

    @abstractmethod
    def open(self) -> None:
        """Import the library and start or continue the logged run."""

    @abstractmethod
    def log(self, step: int, values: dict[str, float]) -> None:
        """Log the numbers of one record."""

    @abstractmethod
    def sync(self) -> None:
        """Hand on what the library buffers."""

    @abstractmethod
    def end(self) -> None:
        """Hand on everything and end."""

    def write(self, record: dict[str, Any]) -> None:
        """Hand `record` to the thread, which starts with the first one."""
        if self._broken:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"logger-{self.name}", daemon=True)
            self._thread.start()
        self._put(record)

    def flush(self) -> None:
        """Ask the thread to hand on what it has; does not wait for it."""
        if self._thread is not None and not self._broken:
            self._put({})

    def close(self) -> None:
        """Wait for the records to be handed on, for `CLOSE_TIMEOUT_S` seconds at most."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        if not self._broken:
            self._put(None)
        thread.join(CLOSE_TIMEOUT_S)
        if thread.is_alive():
            self._report(f"logger {self.name} did not finish within {CLOSE_TIMEOUT_S:g} s: its last records are lost")

    def _put(self, record: dict[str, Any] | None) -> None:
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._fail(f"{QUEUE_RECORDS} records wait for it")

    def _work(self) -> None:
        try:
            self.open()
            while not self._broken and (record := self._queue.get()) is not None:
                if record:
                    self.log(int(record["step"]), scalars(record))
                else:
                    self.sync()
            self.end()
        except Exception as error:  # noqa: BLE001 whatever a foreign library raises must not end the training
            self._fail(f"{type(error).__name__}: {error}".splitlines()[0])

    def _fail(self, reason: str) -> None:
        if not self._broken:
            self._broken = True
            self._report(f"logger {self.name} failed and is left out from here on ({reason})")

    def identity(self, make: Callable[[], str]) -> str:
        """The id by which the library knows this run: made once, then read from the run directory."""
        ids: dict[str, str] = read_json(self.run.loggers) or {}
        if self.name not in ids:
            ids[self.name] = make()
            write_json(self.run.loggers, ids)
        return ids[self.name]

"""Show warnings from the runner's modules while an attempt trains, and record them in the status."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from runner.rundir.attempt_log import AttemptLog
from runner.system import processes

LOGGERS = ("runner", "exactdata")
"""Packages whose warnings are shown."""


class WarningHandler(logging.Handler):
    """Show log records from the runner's modules at level WARNING or above, and record them in the status."""

    def __init__(self, log: AttemptLog) -> None:
        super().__init__(logging.WARNING)
        self.warn: Callable[[str], None] = self._before_recorder
        self._log = log
        self._pid = processes.own_pid()

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if processes.own_pid() == self._pid:
            self.warn(message)
        else:  # in a loader worker, because only the parent process writes the status
            _print_warning(message)

    def remove(self) -> None:
        """Stop forwarding warnings."""
        for name in LOGGERS:
            logging.getLogger(name).removeHandler(self)

    def _before_recorder(self, message: str) -> None:
        _print_warning(message)
        self._log.warn(message)


def _print_warning(message: str) -> None:
    with suppress(OSError):  # a job's log may be on the disk that is full
        print(f"warning: {message}", file=sys.stderr, flush=True)


@contextmanager
def warnings_forwarded(log: AttemptLog | None) -> Iterator[WarningHandler | None]:
    """Yield a warning handler on the rank that has `log`. It is removed only if the `with` block fails."""
    if log is None:
        yield None
        return
    handler = WarningHandler(log)
    for name in LOGGERS:
        logging.getLogger(name).addHandler(handler)
    try:
        yield handler
    except BaseException:
        handler.remove()
        raise

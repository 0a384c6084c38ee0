"""One thread that runs one action at a time, kept between saves because starting a thread takes time."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress

from runner.system import processes

_log = logging.getLogger(__name__)


class Background:
    """Runs submitted actions in a daemon thread, which is created on first use. What an action raises is logged."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Create the thread now rather than at the first `submit`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="checkpoint", daemon=True)
            self._thread.start()
            # An interpreter that shuts down while a thread is inside torch's code aborts.
            processes.at_exit(self.join)

    def submit(self, action: Callable[[], object]) -> None:
        """Run `action`. Must not be called before the last one has ended; see `join`."""
        self._idle.clear()
        self._queue.put(action)
        self.start()

    def join(self) -> None:
        """Return when nothing is running."""
        self._idle.wait()

    def _serve(self) -> None:
        while True:
            action = self._queue.get()
            try:
                action()
            except Exception:  # noqa: BLE001 the thread must survive it, or the next save would wait forever
                with suppress(Exception):  # and so must it survive what handles the message
                    _log.exception("a save in the background failed unexpectedly")
            finally:
                del action  # it references a whole state
                self._idle.set()

"""Run one action at a time in a background thread, kept between saves because starting a thread takes time."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress

from runner.system import processes

_log = logging.getLogger(__name__)


class Background:
    """A daemon thread that runs submitted actions and logs their errors. It is created on first use."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Create the thread now, before the first `submit`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="checkpoint", daemon=True)
            self._thread.start()
            # The interpreter aborts if it shuts down while a thread is inside torch's code.
            processes.at_exit(self.join)

    def submit(self, action: Callable[[], object]) -> None:
        """Run `action` in the thread. Call this only after the previous action has ended (see `join`)."""
        self._idle.clear()
        self._queue.put(action)
        self.start()

    def join(self) -> None:
        """Wait until no action is running."""
        self._idle.wait()

    def _serve(self) -> None:
        while True:
            action = self._queue.get()
            try:
                action()
            except Exception:  # noqa: BLE001 if the thread ended, the next save would wait forever
                with suppress(Exception):  # a log handler may raise too
                    _log.exception("a save in the background failed unexpectedly")
            finally:
                del action  # it references a complete train state
                self._idle.set()

"""One thread that runs one thing at a time, kept between saves: starting a thread waits for it to run."""

from __future__ import annotations

import atexit
import queue
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress


class Background:
    """Runs what is submitted, in a daemon thread that is made at the first use. What an action raises is shown."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether something runs or is about to."""
        return not self._idle.is_set()

    def start(self) -> None:
        """Make the thread now rather than at the first `submit`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="checkpoint", daemon=True)
            self._thread.start()
            # An interpreter that shuts down under a thread that is in the middle of torch's code aborts.
            atexit.register(self.join)

    def submit(self, action: Callable[[], object]) -> None:
        """Run `action` as soon as possible; call only when not busy."""
        self._idle.clear()
        self._queue.put(action)
        self.start()

    def join(self) -> None:
        """Return when nothing runs."""
        self._idle.wait()

    def _serve(self) -> None:
        while True:
            action = self._queue.get()
            try:
                action()
            except Exception:  # noqa: BLE001 the thread must outlive it: the next save would wait for ever
                with suppress(OSError):
                    traceback.print_exc()
            finally:
                del action  # it holds a whole state
                self._idle.set()

"""The stop flag: a signal only sets it, and the training loop checks it at step boundaries.

Installed before torch is imported, so that a signal during the imports counts. Nothing here imports torch, hydra or
numpy.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)


@contextmanager
def blocked() -> Iterator[None]:
    """Hold stop signals back from this thread, and from processes that it starts until they call `STOP.install`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class StopFlag:
    """Which signal asked this process to stop, if any."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self._interrupts = 0
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        self._heard = threading.Event()  # the listener of the first signal has returned
        self._sockets: tuple[socket.socket, socket.socket] | None = None  # referenced, so that they stay open

    def __bool__(self) -> bool:
        return self.signum is not None

    @property
    def name(self) -> str:
        """`SIGTERM`, for example; empty if there was no signal."""
        return signal.Signals(self.signum).name if self.signum is not None else ""

    def install(self) -> None:
        """Handle SIGTERM, SIGUSR1, SIGUSR2 and SIGINT to this process. Only the main thread may call this."""
        self._pid = os.getpid()  # one that was forked from the process that imported this, perhaps
        for signum in STOP_SIGNALS:
            signal.signal(signum, self._on_signal)
            # Registered first, so it runs last. The interpreter then restores the default handlers while it shuts
            # down, and another signal must not change the exit status.
            atexit.register(signal.signal, signum, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # see `blocked`

    def uninstall(self) -> None:
        """Restore Python's own handlers. Only the main thread may call this."""
        for signum in STOP_SIGNALS:
            signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)

    def listen(self, first: Callable[[int], object], later: Callable[[int], object]) -> None:
        """Call `first` with the first signal and `later` with others, in a thread, whatever the main thread is doing.

        Python runs handlers in the main thread, which may be inside a compilation or a kernel for a minute. The
        interpreter writes the signal's number to a file descriptor at once (signal.set_wakeup_fd); the thread reads
        it there. Only the main thread may call this.
        """
        self._sockets = received, sent = socket.socketpair()
        sent.setblocking(False)
        self._heard = heard = threading.Event()

        def run() -> None:
            listener = first
            while byte := received.recv(1):
                if byte[0] in STOP_SIGNALS:
                    try:
                        listener(byte[0])
                    finally:
                        heard.set()
                    listener = later

        signal.set_wakeup_fd(sent.fileno(), warn_on_full_buffer=False)
        # A signal to a forked child (a loader worker) does not stop this process.
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
        if self.signum is not None:  # it came before the listener
            sent.send(bytes([self.signum]))
        self._thread = threading.Thread(target=run, name="signals", daemon=True)
        self._thread.start()

    def wait_for_listener(self) -> None:
        """If there was a signal, wait until the listener of the first one has returned."""
        if self._thread is not None and self:
            self._heard.wait()

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            return  # a forked child (a loader worker) that has not installed its own handlers yet
        # Slurm sends SIGUSR2 near the time limit and may send SIGTERM after it; the first one reveals the cause.
        if self.signum is None:
            self.signum = signum
        if signum == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                with suppress(OSError):
                    os.write(2, b"\nsecond Ctrl-C: exiting at once; only committed checkpoints are kept\n")
                os._exit(128 + signal.SIGINT)


STOP = StopFlag()

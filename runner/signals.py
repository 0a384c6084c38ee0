"""The stop flag: signals only raise it, the training loop looks at it at step boundaries.

Imported and installed before torch is, so that a signal during the imports counts. Nothing here
imports torch, hydra or numpy.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)


class StopFlag:
    """Which signal asked this process to stop, if any did."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self._interrupts = 0
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        self._bytes: tuple[socket.socket, socket.socket] | None = None  # kept open as long as this process lives

    def __bool__(self) -> bool:
        return self.signum is not None

    @property
    def name(self) -> str:
        """`SIGTERM`, say; an empty string while no signal came."""
        return signal.Signals(self.signum).name if self.signum is not None else ""

    def install(self) -> None:
        """Take over SIGTERM, SIGUSR1, SIGUSR2 and SIGINT. Only the main thread may call this."""
        for signum in STOP_SIGNALS:
            signal.signal(signum, self._on_signal)
            # Registered first, so called last: when nothing is left but the interpreter's own end, which puts the
            # default handlers back, one more signal must not change the exit status.
            atexit.register(signal.signal, signum, signal.SIG_IGN)

    def at_signal(self, listener: Callable[[int], None]) -> None:
        """Call `listener` with the first signal, in a thread of its own, whatever the main thread is doing.

        Python's handlers wait for the main thread, which may be in a compilation or a kernel of a minute; the
        bytes that the interpreter writes at once (signal.set_wakeup_fd) do not. Only the main thread may call this.
        """
        self._bytes = received, sent = socket.socketpair()
        sent.setblocking(False)

        def listen() -> None:
            while (signum := received.recv(1)[0]) not in STOP_SIGNALS:
                pass
            listener(signum)

        signal.set_wakeup_fd(sent.fileno(), warn_on_full_buffer=False)
        # A signal to a forked child (a loader worker) is none to this process.
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
        if self.signum is not None:  # it came before
            sent.send(bytes([self.signum]))
        self._thread = threading.Thread(target=listen, name="signals", daemon=True)
        self._thread.start()

    def settle(self) -> None:
        """After a signal: wait until the listener has done its work."""
        if self._thread is not None and self:
            self._thread.join()

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            return  # a forked child (a loader worker) that has not set its own handlers yet
        # Slurm sends SIGUSR2 near the time limit and may send SIGTERM after it; the first one tells the cause.
        if self.signum is None:
            self.signum = signum
        if signum == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                with suppress(OSError):
                    os.write(2, b"\nsecond Ctrl-C: leaving at once, with what was saved before\n")
                os._exit(128 + signal.SIGINT)


STOP = StopFlag()

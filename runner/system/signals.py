"""Set a stop flag when a signal arrives. The training loop checks the flag between steps.

The flag is installed before torch is imported, so that a signal during the imports is not lost. This module imports no
torch, hydra or numpy.
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
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
STDERR = 2  # the file descriptor
# These messages must be true for every command at any time, during imports, compilation, a step or a save.
FIRST_INTERRUPT = (
    "Ctrl-C: stopping; a training step in progress is completed and saved first. Press Ctrl-C again to exit at once: "
    "then only committed checkpoints are kept"
)
SECOND_INTERRUPT = "second Ctrl-C: exiting at once; only committed checkpoints are kept"
_REPLAY = b"\0"  # no signal has this number


def handled() -> list[signal.Signals]:
    """Return the stop signals that this process handles: all, but not a SIGHUP ignored at the start (`nohup`)."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signum for signum in STOP_SIGNALS if not (ignored and signum == signal.SIGHUP)]


def announce(interrupts: int) -> None:
    """Print to standard error on rank 0 what the `interrupts`-th Ctrl-C does.

    This uses a system call, because it runs in a thread while the main thread may be in the middle of a `print`.
    """
    if os.environ.get("RANK", "0") == "0":
        with suppress(OSError):
            os.write(STDERR, f"\n{FIRST_INTERRUPT if interrupts == 1 else SECOND_INTERRUPT}\n".encode())


@contextmanager
def received_by(handler: Callable[[int, FrameType | None], object]) -> Iterator[dict[signal.Signals, Any]]:
    """Let `handler` receive the stop signals within the block.

    Yield the previous handlers, which are restored afterwards.
    """
    before = {signum: signal.signal(signum, handler) for signum in handled()}
    try:
        yield before
    finally:
        for signum, earlier in before.items():
            signal.signal(signum, earlier)


@contextmanager
def blocked() -> Iterator[None]:
    """Block stop signals in this thread, and in processes started by it until they call `STOP.install`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class StopFlag:
    """The signal that asked this process to stop, if any."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self.quiet = False
        """Whether the parent process explains to the user what a Ctrl-C does."""
        self._interrupts = 0
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        self._listeners: tuple[Callable[[int], object], Callable[[int], object]] | None = None
        self._heard = threading.Event()  # the listener of the first signal has returned
        self._sockets: tuple[socket.socket, socket.socket] | None = None  # the thread reads from the first one

    def __bool__(self) -> bool:
        return self.signum is not None

    @property
    def name(self) -> str:
        """Return the name of the signal, such as `SIGTERM`, or "" if there was no signal."""
        return signal.Signals(self.signum).name if self.signum is not None else ""

    def install(self) -> None:
        """Handle SIGTERM, SIGHUP, SIGUSR1, SIGUSR2 and SIGINT in this process. Only the main thread may call this.

        A SIGHUP that is ignored stays ignored (`handled`).
        """
        self._pid = os.getpid()  # this process may be a fork of the one that imported this module
        self._open_sockets()
        for signum in handled():
            signal.signal(signum, self._on_signal)
            # Registered first, so it runs last. The interpreter then restores the default handlers while it shuts
            # down, and another signal must not change the exit status.
            atexit.register(signal.signal, signum, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # see `blocked`
        self._start_thread()  # started now, because it inherits the mask

    def uninstall(self) -> None:
        """Restore Python's own handlers. Only the main thread may call this."""
        for signum in handled():
            signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
        signal.set_wakeup_fd(-1)

    def listen(self, first: Callable[[int], object], later: Callable[[int], object]) -> None:
        """Call `first` with the first signal and `later` with later ones, in a thread, even if the main thread is busy.

        Call this after `install`, from the main thread.
        """
        assert self._sockets is not None
        self._heard = threading.Event()
        self._listeners = first, later
        if self.signum is not None:  # the signal arrived before the listener was set
            self._sockets[1].send(_REPLAY)

    def wait_for_listener(self) -> None:
        """Wait until the listener of the first signal has returned, if there was a signal."""
        if self._listeners is not None and self:
            self._heard.wait()

    def _open_sockets(self) -> None:
        """Let the interpreter write the number of each signal to a socket at once (signal.set_wakeup_fd).

        Python runs handlers in the main thread, which may be inside a compilation or a kernel for minutes.
        """
        if self._thread is None or not self._thread.is_alive():  # a fork has no threads
            if self._sockets is None:
                # A signal to a forked child (a loader worker) does not stop this process.
                os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
            for old in self._sockets or ():
                old.close()
            self._sockets = socket.socketpair()
            self._sockets[1].setblocking(False)
        assert self._sockets is not None
        signal.set_wakeup_fd(self._sockets[1].fileno(), warn_on_full_buffer=False)

    def _start_thread(self) -> None:
        """Start the thread that reads the signal numbers from the socket."""
        assert self._sockets is not None
        if self._thread is None or not self._thread.is_alive():
            read = self._sockets[0]
            self._thread = threading.Thread(target=self._read, args=(read,), name="signals", daemon=True)
            self._thread.start()

    def _read(self, received: socket.socket) -> None:
        while byte := received.recv(1):
            if byte[0] == signal.SIGINT and signal.getsignal(signal.SIGINT) == self._on_signal:
                self._interrupt()
            if byte == _REPLAY or byte[0] in STOP_SIGNALS:
                self._tell(byte[0] or self.signum or 0, replayed=byte == _REPLAY)

    def _tell(self, signum: int, replayed: bool) -> None:
        """Call the listener for a signal, if one is registered."""
        if self._listeners is None:
            return
        (first, later), heard = self._listeners, self._heard
        if not heard.is_set():
            try:
                first(signum)
            finally:
                heard.set()
        elif not replayed:
            later(signum)

    def _interrupt(self) -> None:
        """Print what a Ctrl-C does; end this process at the second one."""
        self._interrupts += 1
        if not self.quiet:
            announce(self._interrupts)
        if self._interrupts > 1:
            os._exit(128 + signal.SIGINT)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            return  # a forked child (a loader worker) that has not installed its own handlers yet
        # Slurm sends SIGUSR2 near the time limit and may send SIGTERM after it; the first one reveals the cause.
        if self.signum is None:
            self.signum = signum


STOP = StopFlag()

"""Run a command in a new terminal (a pty whose session it leads), and close the terminal as a user closes a window."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from runs import PATIENCE_S


class Window:
    """A terminal that runs a command.

    Args:
        command: the command.
        cwd: its directory.
        env: its environment variables.
        hangup_ignored: whether it ignores SIGHUP when it starts, as under `nohup`.
    """

    def __init__(self, command: Sequence[str], cwd: Path, env: Mapping[str, str], hangup_ignored: bool = False) -> None:
        self._master, slave = pty.openpty()

        def enter() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            signal.signal(signal.SIGHUP, signal.SIG_IGN if hangup_ignored else signal.SIG_DFL)

        self.process = subprocess.Popen(
            command,
            cwd=cwd,
            env=env,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=enter,  # noqa: PLW1509 a few system calls
        )
        os.close(slave)
        self.shown = ""

    def wait_until(self, moment: Callable[[], bool]) -> None:
        """Return once `moment` holds. Read the output until then."""
        deadline = time.monotonic() + PATIENCE_S
        while not moment():
            assert self.process.poll() is None, self.shown
            assert time.monotonic() < deadline, self.shown
            self.read(0.05)

    def read(self, seconds: float) -> None:
        """Read the output for up to `seconds`."""
        if select.select([self._master], [], [], seconds)[0]:
            with suppress(OSError):  # all processes in the terminal have ended
                self.shown += os.read(self._master, 1 << 16).decode(errors="replace")

    def type(self, keys: bytes) -> None:
        """Press keys. Byte 3 is Ctrl-C."""
        os.write(self._master, keys)

    def close(self) -> None:
        """Close the terminal. Its processes get SIGHUP, and their later writes to it fail."""
        os.close(self._master)

    def status(self) -> int:
        """Wait until the command has ended and return its exit status."""
        return self.process.wait(PATIENCE_S)

    def end(self) -> None:
        """Kill the remaining processes."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

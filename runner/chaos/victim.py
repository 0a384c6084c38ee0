"""What is struck: a process of this machine. A job of a cluster is in `slurm.py`."""

from __future__ import annotations

import resource
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, Any, Protocol

from runner.errors import ExitStatus
from runner.lease import process_state

TAIL_LINES = 12
STOPPING_S = 60.0  # how long a process that was asked to leave may take to save


class Victim(Protocol):
    """Attempts at one run, one after the other.

    `refusals`: the exit statuses with which a second command is turned away.
    """

    refusals: tuple[int, ...]

    def begin(self) -> None:
        """Start an attempt, or see to it that the one in the queue starts; harmless when one lives."""

    def ended(self) -> int | None:
        """Exit status of the attempt, negative if a signal ended it; None while it lives."""

    def owns(self, holder: Mapping[str, Any]) -> bool:
        """Whether this holder of a run directory is the attempt."""

    def send(self, signum: int) -> None:
        """Send a signal to the training process."""

    def freeze(self) -> bool:
        """Stop it where it is, as far as that can be done from here; False if it has ended."""

    def resume(self) -> None:
        """Let it go on."""

    def limit_files(self, size: int | None) -> None:
        """Refuse writes beyond `size` bytes of a file; None lifts the limit."""

    def another(self) -> Victim:
        """One more on the same run directory, not begun."""

    def wait(self, timeout_s: float) -> int | None:
        """Exit status, None if it still lives after `timeout_s`."""

    def stop(self) -> None:
        """Ask it to save and leave; end it if it does not."""

    def tail(self) -> str:
        """The end of what it printed."""


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C and SIGTERM back: a process must not be started and forgotten."""
    came: list[tuple[int, FrameType | None]] = []
    before = {
        signum: signal.signal(signum, lambda *received: came.append(received))
        for signum in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        if came and callable(handler := before[signal.Signals(came[0][0])]):
            handler(*came[0])


class LocalVictim:
    """Processes of this machine, one attempt each.

    Args:
        command: what starts an attempt.
        log: file to which their output is added.
    """

    refusals: tuple[int, ...] = (int(ExitStatus.LOCKED),)

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self.command = list(command)
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: deque[str] = deque(maxlen=TAIL_LINES)

    @property
    def pid(self) -> int:
        """The training process."""
        assert self._process is not None
        return self._process.pid

    def begin(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self._lines.clear()
        # A session of its own: Ctrl-C reaches the drill alone. A pipe: a refused write to a log file is not
        # what is to be tried here.
        with uninterrupted():
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        threading.Thread(target=self._pump, args=(self._process.stdout,), daemon=True).start()

    def _pump(self, output: IO[bytes]) -> None:
        with open(self.log, "ab") as log, output:
            for line in output:
                log.write(line)
                log.flush()
                self._lines.append(line.decode(errors="replace").rstrip())

    def ended(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def owns(self, holder: Mapping[str, Any]) -> bool:
        return self._process is not None and holder.get("pid") == self._process.pid

    def send(self, signum: int) -> None:
        if self._process is not None:
            self._process.send_signal(signum)

    def freeze(self) -> bool:
        self.send(signal.SIGSTOP)
        while self.ended() is None:
            state = process_state(self.pid)
            if state is not None and state[0] in "Tt":
                return True
            time.sleep(0.0002)
        return False

    def resume(self) -> None:
        self.send(signal.SIGCONT)

    def limit_files(self, size: int | None) -> None:
        """The soft limit only, so that no privilege is needed to lift it."""
        _, hard = resource.prlimit(self.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (hard if size is None else size, hard))

    def another(self) -> LocalVictim:
        return LocalVictim(self.command, self.log)

    def wait(self, timeout_s: float) -> int | None:
        assert self._process is not None
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def stop(self) -> None:
        if self.ended() is not None or self._process is None:
            return
        try:
            self.send(signal.SIGTERM)
            self.resume()
            if self.wait(STOPPING_S) is None:
                self.kill()
        except KeyboardInterrupt:  # a second Ctrl-C: not even time to save
            self.kill()
            raise

    def kill(self) -> None:
        """End it at once."""
        self.send(signal.SIGKILL)
        self.wait(STOPPING_S)

    def tail(self) -> str:
        return "\n".join(self._lines)

"""The target of faults: processes of this machine. `slurm_target` is the same for jobs of a cluster."""

from __future__ import annotations

import resource
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, Any, Protocol

from runner.errors import ExitStatus
from runner.system import clock, processes

TAIL_LINES = 12
STOPPING_S = 60.0  # how long a process that was asked to stop may take to save


class Target(Protocol):
    """Attempts at one run, one after the other.

    Attributes:
        refusals: the exit statuses with which a second command is refused.
    """

    refusals: tuple[int, ...]

    def begin(self) -> None:
        """Start an attempt, or let the queued one start; harmless if one is running."""

    def ended(self) -> int | None:
        """Exit status of the attempt, negative if a signal ended it; None while it runs."""

    def owns(self, holder: Mapping[str, Any]) -> bool:
        """Whether this holder of a run directory is the attempt."""

    def send(self, signum: int) -> None:
        """Send a signal to the training process."""

    def freeze(self) -> bool:
        """Pause it where it is, if that is possible from here; False if it has ended."""

    def unfreeze(self) -> None:
        """Let it continue."""

    def limit_files(self, size: int | None) -> None:
        """Refuse writes beyond `size` bytes of a file; None lifts the limit."""

    def another(self) -> Target:
        """A second one on the same run directory, not started."""

    def wait(self, timeout_s: float) -> int | None:
        """Exit status; None if it still runs after `timeout_s` seconds."""

    def stop(self) -> None:
        """Ask it to save and exit; kill it if it does not."""

    def tail(self) -> str:
        """The last lines of its output."""


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the end of the block: a process that was started must be known."""
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


class LocalTarget:
    """Processes of this machine, one attempt each.

    Args:
        command: starts an attempt.
        log: file that their output is appended to.
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
        # A session of its own: Ctrl-C reaches the drill alone. A pipe: `disk-full` must not refuse writes to a log.
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
            state = processes.state_of(self.pid)
            if state is not None and state[0] in "Tt":
                return True
            clock.sleep(0.0002)
        return False

    def unfreeze(self) -> None:
        self.send(signal.SIGCONT)

    def limit_files(self, size: int | None) -> None:
        """Set the soft limit only, so that no privilege is needed to lift it."""
        _, hard = resource.prlimit(self.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (hard if size is None else size, hard))

    def another(self) -> LocalTarget:
        return LocalTarget(self.command, self.log)

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
            self.unfreeze()
            if self.wait(STOPPING_S) is None:
                self.kill()
        except KeyboardInterrupt:  # a second Ctrl-C: not even time to save
            self.kill()
            raise

    def kill(self) -> None:
        """Send SIGKILL and wait for the end."""
        self.send(signal.SIGKILL)
        self.wait(STOPPING_S)

    def tail(self) -> str:
        return "\n".join(self._lines)

"""Inject faults into processes on this machine; see `slurm_target` for the jobs of a cluster."""

from __future__ import annotations

import resource
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any, Protocol

from runner.errors import ExitStatus
from runner.system import clock, files, processes
from runner.system.signals import received_by

TAIL_LINES = 12
STOPPING_S = 60.0  # the time that a process may take to save after it was asked to stop


class Target(Protocol):
    """Attempts of one run, one after the other.

    Attributes:
        refusals: the exit statuses of a second command that is correctly refused.
        ranks: the number of ranks of attempts started from now on; if None, the configuration decides.
    """

    refusals: tuple[int, ...]
    ranks: int | None

    def begin(self) -> None:
        """Start an attempt, or release the queued one. Do nothing if one is running."""

    def ended(self) -> int | None:
        """Return the exit status of the attempt, negative if a signal killed it, or None while it runs."""

    def owns(self, holder: Mapping[str, Any]) -> bool:
        """Return whether `holder`, a holder of the run directory, is this attempt."""

    def send(self, signum: int) -> None:
        """Send a signal to the training process."""

    def freeze(self) -> bool:
        """Pause the attempt where it is, if possible. Return False if it has already ended."""

    def unfreeze(self) -> None:
        """Let a paused attempt continue."""

    def limit_files(self, size: int | None) -> None:
        """Let writes beyond `size` bytes of a file fail. None removes the limit."""

    def another(self) -> Target:
        """Return a second target for the same run directory. It is not started yet."""

    def wait(self, timeout_s: float) -> int | None:
        """Return the exit status, or None if the attempt still runs after `timeout_s` seconds."""

    def stop(self) -> None:
        """Ask the attempt to save and exit, and kill it if it does not."""

    def tail(self) -> str:
        """Return the last lines of the attempt's output."""


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay signals that stop the command until the block ends, so that every started process is registered."""
    came: list[tuple[int, FrameType | None]] = []
    try:
        with received_by(lambda *received: came.append(received)) as before:
            yield
    finally:
        if came and callable(handler := before[signal.Signals(came[0][0])]):
            handler(*came[0])


class LocalTarget:
    """Attempts of a run as processes on this machine.

    With one rank, the command itself trains. With several ranks, it starts one process per rank and waits for them.
    Faults are injected into all of these processes.

    Args:
        command: the command that starts an attempt.
        log: the file to append the output to.
        ranks: the number of ranks of an attempt; if None, the configuration decides.
    """

    refusals: tuple[int, ...] = (int(ExitStatus.LOCKED),)

    def __init__(self, command: Sequence[str], log: Path, ranks: int | None = None) -> None:
        self.command = list(command)
        self.log = log
        self.ranks = ranks
        self._process: subprocess.Popen[bytes] | None = None
        self._started_ranks = False  # whether the command has started separate processes for the ranks
        self._owners: set[int] = set()
        self._lines: deque[str] = deque(maxlen=TAIL_LINES)

    @property
    def pids(self) -> list[int]:
        """Return the ids of the training processes."""
        if self._process is None:
            return []
        if not self._started_ranks:
            return [self._process.pid]
        return [pid for pid in processes.children_of(self._process.pid) if _is_rank(pid)]

    def begin(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self._lines.clear()
        self._owners.clear()
        self._started_ranks = self.ranks not in (None, 1)
        shape = [] if self.ranks is None else [f"launcher.ranks={self.ranks}"]
        # The process gets its own session, so that Ctrl-C reaches only the drill. Its output goes through a pipe,
        # because the `disk-full` fault must not block writes to the log.
        with uninterrupted():
            self._process = subprocess.Popen(
                [*self.command, *shape],
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
        pid = holder.get("pid")
        if self._process is None or not isinstance(pid, int):
            return False
        # Known owners are kept, even after the process has ended.
        if pid == self._process.pid or (pid not in self._owners and processes.parent_of(pid) == self._process.pid):
            self._owners.add(pid)
        return pid in self._owners

    def send(self, signum: int) -> None:
        """Send a signal to the training processes, or to the command if it has not started them yet."""
        if self._process is None:
            return
        pids = self.pids
        if not self._started_ranks or not pids:
            self._process.send_signal(signum)
        elif signum == signal.SIGKILL:
            self._process.send_signal(signal.SIGSTOP)  # so that the command does not notice that a rank died
            self._signal(pids, signum)
            while not all(self._is_in(pid, "ZX") for pid in pids):
                clock.sleep(0.0002)
            self._process.send_signal(signum)
        else:
            self._signal(pids, signum)

    @staticmethod
    def _signal(pids: Sequence[int], signum: int) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                processes.send_signal(pid, signum)

    @staticmethod
    def _is_in(pid: int, states: str) -> bool:
        """Return whether a process is in one of these states or has ended."""
        state = processes.state_of(pid)
        return state is None or state[0] in states

    def freeze(self) -> bool:
        pids = self.pids
        self._signal(pids, signal.SIGSTOP)
        while pids and self.ended() is None:
            if all(self._is_in(pid, "TtZX") for pid in pids):
                return not any(self._is_in(pid, "ZX") for pid in pids)
            clock.sleep(0.0002)
        return False

    def unfreeze(self) -> None:
        self.send(signal.SIGCONT)

    def limit_files(self, size: int | None) -> None:
        """Set only the soft limit, so that it can be removed without privileges."""
        for pid in self.pids:
            _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard if size is None else size, hard))

    def another(self) -> LocalTarget:
        return LocalTarget(self.command, self.log, self.ranks)

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
        except KeyboardInterrupt:  # on a second Ctrl-C, do not wait for the save
            self.kill()
            raise

    def kill(self) -> None:
        """Send SIGKILL and wait for the process to end."""
        self.send(signal.SIGKILL)
        self.wait(STOPPING_S)

    def tail(self) -> str:
        return "\n".join(self._lines)


def _is_rank(pid: int) -> bool:
    """Return whether a child process of the command is one of its ranks."""
    return "runner.training.attempt" in (files.read_small(f"/proc/{pid}/cmdline") or "")

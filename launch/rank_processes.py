"""Run the ranks of one attempt as processes on this machine, with the environment variables that torchrun sets.

When the command that started them ends, even by SIGKILL, the kernel kills them (`processes.end_with_parent`). When a
rank is lost, the remaining ranks notice it and close the run's records.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

from launch import rendezvous
from runner.errors import ExitStatus
from runner.rundir.paths import RunDir
from runner.system import clock, files, processes, signals

# How long the remaining ranks may take to exit after a rank has failed. They must notice the failure (within
# train.peer_timeout_s, 60 s by default), close the records and exit.
GRACE_S = 90.0
# After rank 0 has ended, which is normally the last to end.
AFTER_RANK_0_S = 30.0
# After rank 0 was lost, since no other rank writes records.
WITHOUT_RANK_0_S = 1.0
STDERR = 2  # the file descriptor
LAST_OUTPUT_S = 2.0  # wait to copy a rank's last output; a child that outlives the rank may keep the pipe open


class RankProcesses:
    """The processes of one attempt, one per rank. An attempt without ranks has one process.

    Args:
        command: the command to run. The run's directory is appended as its last argument.
        run: the run to train.
        count: number of ranks.
        environment: shared by all ranks; the variables of each rank are added to it.
        log: file for the output of rank 0 and the errors of the other ranks. If None, they are written to this
            process's output, usually a terminal. Every rank except 0 also has its own log file.
        grace_s: seconds that the ranks may take to exit after one has failed.
    """

    def __init__(
        self,
        command: Sequence[str],
        run: RunDir,
        count: int,
        environment: Mapping[str, str],
        log: Path | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        self._run = run
        self._log = log
        self._grace_s = grace_s
        self._since: dict[float, float] = {}  # allowed seconds to exit -> when the wait began
        self._interrupted = False
        self._killed: set[int] = set()
        self._copying: list[threading.Thread] = []
        self._processes: list[processes.Process[bytes]] = []
        with files.owned():
            files.make_dirs_in(run.path, run.logs)
        shared = {**environment, **_meeting_point(count)} if count > 1 else dict(environment)
        try:
            for rank in range(count):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if count > 1 else {}
                self._start([*command, str(run.path)], {**shared, **own})
        except OSError:
            self.kill()
            raise

    def _start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        rank = len(self._processes)
        log = self._log if rank == 0 else self._run.rank_log(rank)
        with ExitStack() as opened:
            output = None if log is None else opened.enter_context(files.open_append(log))
            # A signal waits until the rank can handle it.
            with signals.blocked():
                # Start the rank in a new session, so that a Ctrl-C at the terminal reaches it only once, by `send`.
                started = processes.start(
                    command,
                    env=processes.bound(environment),
                    stdin=processes.DEVNULL,
                    stdout=output,
                    stderr=output if rank == 0 else processes.PIPE,
                    start_new_session=True,
                )
        self._processes.append(started)
        if started.stderr is not None:
            copying = threading.Thread(target=self._copy_errors, args=(rank, started.stderr), daemon=True)
            copying.start()
            self._copying.append(copying)

    def _copy_errors(self, rank: int, errors: IO[bytes]) -> None:
        """Copy a rank's standard error to its log and to the output of rank 0."""
        with ExitStack() as opened:
            own = opened.enter_context(files.open_append(self._run.rank_log(rank))).fileno()
            shown = STDERR if self._log is None else opened.enter_context(files.open_append(self._log)).fileno()
            for line in opened.enter_context(errors):
                for fd in (own, shown):
                    with suppress(OSError):  # a full disk or a closed terminal must not block the rank
                        files.write_all(fd, line)

    def send(self, signum: int) -> None:
        """Forward a signal to every rank, so that it saves and exits. At a second Ctrl-C, kill the ranks."""
        if signum == signal.SIGINT and self._interrupted:
            self.kill()
        self._interrupted = self._interrupted or signum == signal.SIGINT
        for process in self._processes:
            process.send_signal(signum)  # does nothing if it has ended

    def poll(self) -> int | None:
        """Return rank 0's exit status as a shell reports it once all ranks have ended, and None until then."""
        ended = [process.poll() for process in self._processes]
        if all(status is not None for status in ended):
            for thread in self._copying:
                thread.join(LAST_OUTPUT_S)
            status = self._processes[0].returncode
            return status if status >= 0 else 128 - status
        self._kill_late(ended)
        return None

    def _kill_late(self, ended: Sequence[int | None]) -> None:
        """Kill ranks that take too long to exit after the first ones. `ended` has each rank's exit status, or None."""
        now = clock.monotonic()
        if any(status not in (None, ExitStatus.FINISHED, ExitStatus.INTERRUPTED) for status in ended):
            self._since.setdefault(self._grace_s, now)
        if ended[0] is not None:
            self._since.setdefault(WITHOUT_RANK_0_S if ended[0] < 0 else AFTER_RANK_0_S, now)
        if any(now - since > grace_s for grace_s, since in self._since.items()):
            self.kill()

    def wait(self) -> None:
        """Wait until every rank has ended."""
        for process in self._processes:
            process.wait()

    def kill(self) -> None:
        """Send SIGKILL to the ranks that still run."""
        for rank, process in enumerate(self._processes):
            if process.poll() is None:
                self._killed.add(rank)
                process.kill()

    def losses(self) -> list[str]:
        """Return one sentence for each rank that was killed by a signal."""
        found = []
        for rank, process in enumerate(self._processes):
            status = process.returncode
            if rank in self._killed and WITHOUT_RANK_0_S not in self._since and not self._interrupted:
                found.append(f"rank {rank} did not end after another one had, and was killed")
            elif status is not None and status < 0 and rank not in self._killed:
                name = signal.Signals(-status).name
                hint = " (the kernel sends it when memory runs out)" if name == "SIGKILL" else ""
                found.append(f"rank {rank} was ended by {name}{hint}")
        return found


def _meeting_point(count: int) -> dict[str, str]:
    """Return the environment variables that all ranks share: the world size and the address of rank 0."""
    return {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(rendezvous.free_port()),
        # Otherwise gloo listens at the address of the machine's name, which may be wrong on a laptop.
        "GLOO_SOCKET_IFNAME": "lo",
    }

"""The ranks of one attempt as processes of this machine, with the environment that torchrun would set.

They end with the command that started them, even if that is killed: the kernel sees to it
(`processes.end_with_parent`). When one of them is lost, the others notice by themselves and close the run's records.
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

# How long ranks that are still there may take. After another one has failed, to notice that (within
# train.peer_timeout_s, 60 s by default), to close the records and to exit.
GRACE_S = 90.0
# After rank 0 has ended, which ends last but for a moment.
AFTER_RANK_0_S = 30.0
# After rank 0 was lost: nobody is left to write anything.
WITHOUT_RANK_0_S = 1.0
STDERR = 2  # the file descriptor
LAST_OUTPUT_S = 2.0  # for what a rank wrote at its end; a process that it left behind may keep its output open


class RankProcesses:
    """The processes of one attempt, one for each rank; one process without ranks is an attempt as well.

    Args:
        command: makes an attempt at the run whose directory is its last argument.
        run: the run.
        count: how many ranks.
        environment: of every rank, to which the variables of its rank are added.
        log: file that rank 0 writes to, and the others their errors; None: as this process, to a terminal usually.
            All output of the others goes to a file of theirs.
        grace_s: how long the ranks may take to end after one has failed.
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
        self._since: dict[float, float] = {}  # a time to end within -> since when it runs
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
            # A signal that comes before a rank can handle it waits until it can.
            with signals.blocked():
                # A session of its own: a Ctrl-C at the terminal reaches a rank through `send` alone, once.
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
        """What a rank writes to standard error goes to its log and to where rank 0 writes."""
        with ExitStack() as opened:
            own = opened.enter_context(files.open_append(self._run.rank_log(rank))).fileno()
            shown = STDERR if self._log is None else opened.enter_context(files.open_append(self._log)).fileno()
            for line in opened.enter_context(errors):
                for fd in (own, shown):
                    with suppress(OSError):  # a full disk, a terminal that was closed: the rank must not wait for it
                        files.write_all(fd, line)

    def send(self, signum: int) -> None:
        """Pass a signal on to every rank: they save and exit; after a second Ctrl-C they are gone at once."""
        if signum == signal.SIGINT and self._interrupted:
            self.kill()
        self._interrupted = self._interrupted or signum == signal.SIGINT
        for process in self._processes:
            process.send_signal(signum)  # nothing if it has ended

    def poll(self) -> int | None:
        """The exit status once every rank has ended: that of rank 0, as a shell reports it. None: there is one left."""
        ended = [process.poll() for process in self._processes]
        if all(status is not None for status in ended):
            for thread in self._copying:
                thread.join(LAST_OUTPUT_S)
            status = self._processes[0].returncode
            return status if status >= 0 else 128 - status
        self._kill_late(ended)
        return None

    def _kill_late(self, ended: Sequence[int | None]) -> None:
        """Kill the ranks that take too long to follow those that have `ended` with these statuses."""
        now = clock.monotonic()
        if any(status not in (None, ExitStatus.FINISHED, ExitStatus.INTERRUPTED) for status in ended):
            self._since.setdefault(self._grace_s, now)
        if ended[0] is not None:
            self._since.setdefault(WITHOUT_RANK_0_S if ended[0] < 0 else AFTER_RANK_0_S, now)
        if any(now - since > grace_s for grace_s, since in self._since.items()):
            self.kill()

    def wait(self) -> None:
        """Return once every rank has ended."""
        for process in self._processes:
            process.wait()

    def kill(self) -> None:
        """Send SIGKILL to the ranks that are still there."""
        for rank, process in enumerate(self._processes):
            if process.poll() is None:
                self._killed.add(rank)
                process.kill()

    def losses(self) -> list[str]:
        """A sentence for each rank that a signal ended."""
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
    """The environment that all ranks share: how many they are, and where they find each other."""
    return {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(rendezvous.free_port()),
        # Else gloo listens where the machine's name leads, which on a laptop may be nowhere.
        "GLOO_SOCKET_IFNAME": "lo",
    }

"""Ensure that worker processes end with their main process, and do not keep it from exiting.

A scheduler sends its signals to every process of a job, so workers ignore them. SIGTERM ends a worker only after its
main process has announced its exit. The announcement is made in a multiprocessing finalizer, because a process started
with `multiprocessing.Process` runs no `atexit` functions, but waits for its children.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing import util
from typing import Any

WATCH_INTERVAL = 0.5  # seconds between a worker's checks whether its parent is alive and needs it
GRACE = 5.0  # seconds after which a worker that was asked to exit is killed

_pools: list[Shutdown] = []  # pools of this process whose workers may be alive
os.register_at_fork(after_in_child=_pools.clear)


class Shutdown:
    """A flag that asks the workers of a pool to exit, and their pids. Shared with the main process.

    Reading the flag needs no lock.
    """

    def __init__(self, context: Any, workers: int) -> None:
        self._flag = context.RawValue("b", 0)
        self._pids = context.RawArray("q", workers)
        self._owner = os.getpid()
        alive = {child.pid for child in multiprocessing.active_children()}
        _pools[:] = [pool for pool in _pools if not pool.is_set() or alive & pool.pids()]
        if not _pools:
            util.Finalize(None, end_all, exitpriority=100)  # runs before multiprocessing waits for the workers
        _pools.append(self)

    def set(self) -> None:
        """Ask the workers to exit. Has no effect in a fork of the main process, whose objects are copies."""
        if os.getpid() == self._owner:
            self._flag.value = 1

    def is_set(self) -> bool:
        return bool(self._flag.value)

    def enter(self, worker: int) -> None:
        """Register this process as a worker of the pool. Called when the worker starts."""
        self._pids[worker] = os.getpid()

    def pids(self) -> frozenset[int]:
        """Return the pids of the workers that have started."""
        return frozenset(self._pids) - {0}


def end_all() -> None:
    """End every worker of this process. Called when the process is about to exit."""
    pids: frozenset[int] = frozenset()
    for pool in _pools:
        pool.set()
        pids |= pool.pids()
    workers = [child for child in multiprocessing.active_children() if child.pid in pids]
    for worker in workers:
        worker.terminate()
    deadline = time.monotonic() + GRACE
    for worker in workers:
        worker.join(max(deadline - time.monotonic(), 0))
    stuck = [worker for worker in workers if worker.is_alive()]
    if stuck:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise an error for a killed worker
    for worker in stuck:
        worker.kill()


def ignore_signals(shutdown: Shutdown) -> None:
    """Ignore the signals that a scheduler or a terminal sends to all processes. The main process handles them."""

    def on_terminate(signum: int, frame: object) -> None:
        if shutdown.is_set():
            os._exit(0)

    signal.signal(signal.SIGTERM, on_terminate)
    for name in ("SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def exit_when_unneeded(parent: int, shutdown: Shutdown) -> None:
    """End this process when its parent has ended or set `shutdown`, even if the dataset is busy.

    torch asks its workers to exit through a queue. If the garbage collector frees the iterator, the queue is closed
    before that, and torch would wait five seconds for each worker.
    """
    while os.getppid() == parent and not shutdown.is_set():
        time.sleep(WATCH_INTERVAL)
    time.sleep(WATCH_INTERVAL if shutdown.is_set() else 0)  # most workers exit on their own within this time
    os._exit(0)

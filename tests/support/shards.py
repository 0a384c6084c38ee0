"""Simulate the ranks and worker processes of a stream loader in this process."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data._utils import worker as torch_worker

from exactdata.loading import loader as _loader
from exactdata.loading import protocols
from exactdata.loading.workers import TaskRunner

loader_module: Any = _loader  # its names are replaced


class PlayedPool:
    """A `WorkerPool` without processes. Workers take tasks in turn, `AHEAD` of them before a reply is needed."""

    AHEAD = 5

    def __init__(self, fetcher: Any, snapshot_every: int, user_init: Any, start: Any, options: dict[str, Any]) -> None:
        self.count, self.ranks = options["num_workers"], loader_module.current_ranks()
        self.states = None
        self.shutdown, self.pids, self.is_closed = threading.Event(), dict[int, int](), False
        self.runners = [
            TaskRunner(pickle.loads(pickle.dumps(fetcher)), snapshot_every, self.ranks, self.shutdown)  # type: ignore[arg-type]
            for _ in range(self.count)
        ]
        for worker, runner in enumerate(self.runners):
            runner.worker = worker

    def run(self, tasks: Iterator[Any]) -> Iterator[Any]:
        waiting: list[Any] = []
        for number, task in enumerate(tasks):
            waiting.append(self.reply(number % self.count, task))
            if len(waiting) > self.AHEAD:
                yield waiting.pop(0)
        yield from waiting

    def reply(self, worker: int, task: Any) -> Any:
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=worker, num_workers=self.count, seed=0, dataset=self.runners[worker]
        )
        before = protocols.ranks()
        protocols.set_ranks(*self.ranks)
        try:
            return self.runners[worker][task]
        finally:
            torch_worker._worker_info = None
            protocols.set_ranks(*before)

    def close(self) -> None:
        self.is_closed = True


@contextmanager
def played(rank: int, world_size: int) -> Iterator[None]:
    """Let this process be `rank` of `world_size`, and simulate the workers of its loaders."""
    before = loader_module.current_ranks, loader_module.WorkerPool
    loader_module.current_ranks, loader_module.WorkerPool = lambda: (rank, world_size), PlayedPool
    ranks_before = protocols.ranks()
    protocols.set_ranks(rank, world_size)
    try:
        yield
    finally:
        loader_module.current_ranks, loader_module.WorkerPool = before
        protocols.set_ranks(*ranks_before)

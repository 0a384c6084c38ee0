"""Run tasks in a pool of worker processes.

The pool is torch's DataLoader over a dataset whose items are tasks, either to start or to fetch a batch. A worker's
reply contains the collated batch, the worker's number, and the state of the real dataset after the batch. This relies
on only one property of torch's loader, that it assigns tasks to workers in round-robin order.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from exactdata.loading import protocols, redistribution
from exactdata.loading.fetch import Indices, MapFetcher, is_stateful
from exactdata.loading.global_draws import OF_A_STREAM_IN_WORKERS, watched
from exactdata.loading.ipc import pack, unpack
from exactdata.loading.pinning import pin
from exactdata.loading.randomness import Keys, keys_from_indices
from exactdata.loading.stream_fetch import StreamFetcher
from exactdata.loading.worker_exit import Shutdown, exit_when_unneeded, ignore_signals
from exactdata.ranks import current_ranks


@dataclass(slots=True)
class Reply:
    """The result of a task.

    Attributes:
        ticket: the ticket that identifies the task.
        worker: number of the worker.
        pid: process id of the worker.
        payload: the batch, packed or unpacked.
        count: number of samples in the batch, or -1 if there is no batch. For a map-style dataset, 0, because the
            dispatcher knows the number.
        state: the dataset's pickled state after the batch, or None if it was not saved.
        ended: whether the worker's iterable dataset has ended.
        draws: the global generators that the dataset was found to use, and the consequence.
    """

    ticket: int
    worker: int
    pid: int
    payload: Any
    count: int
    state: bytes | None
    ended: bool
    draws: tuple[str, str] = ("", "")

    def pin_memory(self, *_: Any) -> Reply:
        """Pin the batch. torch's pinning thread calls this."""
        self.payload = pin(unpack(self.payload))
        return self


@dataclass
class Task:
    """A task that does nothing. It is sent so that the next task goes to the next worker."""

    ticket: int

    def run(self, runner: TaskRunner) -> Reply:
        """Run the task in the worker process."""
        return runner.reply(self.ticket)


@dataclass
class StartTask(Task):
    """Begin an epoch: seed the generators and restore the dataset.

    Attributes:
        seed: seed of the workers. If None, torch has seeded this worker.
        saved: the dataset's pickled state. If None, start from the beginning.
        epoch: the loader's epoch.
    """

    seed: int | None
    saved: bytes | None
    epoch: int

    def run(self, runner: TaskRunner) -> Reply:
        saved = None if self.saved is None else pickle.loads(self.saved)
        # A state between epochs was saved before this epoch's seed was set, a state within an epoch after it.
        boundary = saved is not None and saved.get("boundary", False)
        if boundary:
            runner.start(saved, self.epoch)
        if self.seed is not None:
            seed_worker(self.seed, runner.worker)
        if not boundary:
            runner.start(saved, self.epoch)
        return runner.reply(self.ticket, state=self.saved if runner.continues(saved) else runner.state())


@dataclass
class FetchTask(Task):
    """Fetch a batch, using indices into a map-style dataset, or the next batch of an iterable-style dataset.

    Attributes:
        indices: indices of the batch; None for an iterable-style dataset.
        keys: the samples' keys for `sample_rng`, or the seed from which they are computed on demand.
    """

    indices: Indices
    keys: Keys | int

    def run(self, runner: TaskRunner) -> Reply:
        return runner.fetch(self)

    def sample_keys(self, batched: bool) -> Keys | Callable[[], Keys]:
        keys = self.keys
        if not isinstance(keys, int):
            return keys
        return lambda: keys_from_indices(keys, self.indices if batched else [self.indices])


def seed_worker(seed: int, worker: int) -> None:
    """Seed this process's generators as torch seeds a worker, and numpy's generator from (seed, worker)."""
    random.seed(seed + worker)
    torch.manual_seed(seed + worker)
    np.random.seed(np.random.SeedSequence([seed % 2**63, worker]).generate_state(4))


def collate_in_own_memory(samples: Any) -> Any:
    """Collate like torch's `default_collate`, but without allocating shared memory for each tensor.

    Allocating shared memory would take most of the time, and `ipc` would copy the batch out of it.
    """
    data: Any = torch.utils.data
    outside, data.get_worker_info = data.get_worker_info, lambda: None
    try:
        return default_collate(samples)
    finally:
        data.get_worker_info = outside


class TaskRunner(Dataset[Reply]):
    """Run tasks in a worker. This is the dataset that torch's loader indexes, and `runner[task]` runs the task.

    Args:
        fetcher: fetches batches of the real dataset.
        snapshot_every: number of batches after which a worker saves the state of an iterable dataset. If 0, only at the
            start. The state is also saved with the first batch of a leg, because the samples to skip are counted per
            leg.
        ranks: (rank, world size), for `exactdata.ranks` in the workers.
        shutdown: set when the workers must exit.
    """

    def __init__(
        self, fetcher: MapFetcher | StreamFetcher, snapshot_every: int, ranks: tuple[int, int], shutdown: Shutdown
    ) -> None:
        self.fetcher = fetcher
        self.snapshot_every = snapshot_every
        self.ranks = ranks
        self.shutdown = shutdown
        self.parent = os.getpid()
        self.worker = -1
        self._batches = self._legs = 0  # batches since the last state, and legs opened until that state
        self._watches = isinstance(fetcher, StreamFetcher) and fetcher.watched  # True only until the first batch
        if fetcher.collate_fn is default_collate:
            fetcher.collate_fn = collate_in_own_memory

    def __getitem__(self, task: Task) -> Reply:
        return task.run(self)

    def reply(
        self, ticket: int, payload: Any = None, count: int = -1, state: bytes | None = None, ended: bool = False
    ) -> Reply:
        return Reply(ticket, self.worker, os.getpid(), payload, count, state, ended)

    def start(self, saved: dict[str, Any] | None, epoch: int) -> None:
        """Begin an epoch, from the dataset's saved state if there is one."""
        self._batches = 0
        fetcher = self.fetcher
        if isinstance(fetcher, StreamFetcher):
            fetcher.start(None if saved is None else redistribution.own(fetcher.dataset, saved), epoch)
            self._legs = fetcher.legs
        elif saved is not None and saved["dataset"] is not None:
            fetcher.dataset.load_state_dict(saved["dataset"])

    def continues(self, saved: dict[str, Any] | None) -> bool:
        """Return whether this epoch resumed by skipping samples after a saved state of this shard.

        If so, the next state is due as in the uninterrupted run, so that both runs save states after the same batches.
        """
        fetcher = self.fetcher
        if not isinstance(fetcher, StreamFetcher) or saved is None or not saved.get("samples"):
            return False
        if tuple(saved["owner"]) != protocols.shard():
            return False
        self._batches = -(-saved["samples"] // (fetcher.batch_size or 1))
        return True

    def fetch(self, task: FetchTask) -> Reply:
        try:
            if self._watches:
                (batch, count), found = watched(partial(self._fetch, task))
                draws = found, OF_A_STREAM_IN_WORKERS
            else:
                batch, count = self._fetch(task)
                draws = getattr(self.fetcher, "draws", ""), getattr(self.fetcher, "consequence", "")
        except StopIteration:
            return self.reply(task.ticket, state=self.state_at_end(), ended=True)
        self._batches += 1
        self._watches = False
        reply = self.reply(task.ticket, pack(batch), count, self.state_if_due())
        reply.draws = draws
        return reply

    def _fetch(self, task: FetchTask) -> tuple[Any, int]:
        fetcher = self.fetcher
        if isinstance(fetcher, StreamFetcher):
            return fetcher.fetch()
        return fetcher.fetch(task.indices, task.sample_keys(fetcher.batched)), 0

    def state(self) -> bytes | None:
        """Return the dataset's state, pickled immediately because the dataset keeps modifying it."""
        fetcher = self.fetcher
        if isinstance(fetcher, StreamFetcher):
            return pickle.dumps(fetcher.state())
        if fetcher.collated or not is_stateful(fetcher.dataset):
            return None
        return pickle.dumps({"dataset": fetcher.dataset.state_dict(), "boundary": False})

    def state_if_due(self) -> bytes | None:
        """Return the state after a batch, or None if no state is due."""
        fetcher = self.fetcher
        if not isinstance(fetcher, StreamFetcher):
            return self.state()
        if fetcher.legs != self._legs:
            self._legs, self._batches = fetcher.legs, 0
            return self.state()
        due = self.snapshot_every and self._batches % self.snapshot_every == 0
        return self.state() if due and fetcher.is_stateful else None

    def state_at_end(self) -> bytes | None:
        """Return the state after the dataset has ended."""
        fetcher = self.fetcher
        return pickle.dumps(fetcher.boundary_state()) if isinstance(fetcher, StreamFetcher) else self.state()


@dataclass
class WorkerInit:
    """Prepare the worker process, call `start`, and then the user's `worker_init_fn`."""

    user_init: Callable[[int], None] | None
    start: Callable[[], None] | None = None

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        runner: Any = info.dataset
        runner.worker = worker
        object.__setattr__(info, "dataset", runner.fetcher.dataset)  # user code expects the real dataset
        protocols.set_ranks(*runner.ranks)
        runner.shutdown.enter(worker)
        ignore_signals(runner.shutdown)
        if self.start is not None:
            self.start()
        parent = os.getppid()
        if parent == 1 and runner.parent != 1:  # the parent was killed before this line
            os._exit(0)
        threading.Thread(target=exit_when_unneeded, args=(parent, runner.shutdown), daemon=True).start()
        if self.user_init is not None:
            self.user_init(worker)


@dataclass
class TaskSampler:
    """The sampler of torch's loader, over the tasks of the current epoch."""

    tasks: Iterable[Task] = ()

    def __iter__(self) -> Iterator[Task]:
        return iter(self.tasks)


def identity(reply: Any) -> Any:
    """Return the reply unchanged. Used as torch's collate function, because the worker has already collated."""
    return reply


class WorkerPool:
    """The worker processes of one loader, for one epoch or, if they persist, for all epochs.

    Args:
        fetcher: fetches batches of the dataset.
        snapshot_every: see `TaskRunner`.
        user_init: the user's `worker_init_fn`.
        start: called in each worker process when it starts.
        options: keyword arguments of torch's DataLoader.
    """

    def __init__(
        self,
        fetcher: MapFetcher | StreamFetcher,
        snapshot_every: int,
        user_init: Any,
        start: Callable[[], None] | None,
        options: dict[str, Any],
    ) -> None:
        context = options.get("multiprocessing_context") or multiprocessing
        self.shutdown = Shutdown(context, options["num_workers"])
        self._sampler = TaskSampler()
        self._loader: DataLoader[Reply] | None = DataLoader(
            TaskRunner(fetcher, snapshot_every, current_ranks(), self.shutdown),
            batch_size=None,
            sampler=self._sampler,
            collate_fn=identity,
            worker_init_fn=WorkerInit(user_init, start),
            **options,
        )
        self.pids: dict[int, int] = {}
        self.states: list[dict[str, Any]] | None = None  # states of the dataset at the end of the last epoch
        weakref.finalize(self, self.shutdown.set)

    def run(self, tasks: Iterator[Task]) -> Iterator[Reply]:
        """Iterate over the replies to `tasks`. Starts the workers if they are not running."""
        assert self._loader is not None
        self._sampler.tasks = tasks
        return iter(self._loader)

    @property
    def is_closed(self) -> bool:
        return self._loader is None

    def close(self) -> None:
        """Ask the workers to exit."""
        self.shutdown.set()
        self._loader = None

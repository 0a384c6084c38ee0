"""Worker processes: what runs in them, and the engine that feeds them.

The engine is torch's own DataLoader over a stand-in for the dataset. Every task that it sends out is a batch to
fetch (or a command), and what comes back is the collated batch with its worker's number and the state of the
dataset after it. Torch deals tasks to the workers in turn; this module relies on nothing else of it.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import random
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from runner.data import restartable
from runner.data.fetch import Indices, MapFetcher, StreamFetcher, is_stateful
from runner.data.pinning import pin
from runner.data.randomness import Keys, keys_from_indices
from runner.data.transport import collate, pack, unpack

WATCH_INTERVAL = 0.5  # seconds between a worker's looks at whether its parent lives and still wants it

_closing: weakref.WeakSet[Any] = weakref.WeakSet()


class Flag:
    """A flag in memory that the main process and its workers share; reading it takes no lock."""

    def __init__(self, context: Any) -> None:
        self._value = context.RawValue("b", 0)
        _closing.add(self)

    def set(self) -> None:
        self._value.value = 1

    def is_set(self) -> bool:
        return bool(self._value.value)


@atexit.register
def _let_workers_go() -> None:
    for flag in list(_closing):
        flag.set()


class Reply:
    """What a worker sends back for one task."""

    __slots__ = ("count", "ended", "payload", "pid", "state", "ticket", "worker")

    def __init__(
        self, ticket: int, worker: int, pid: int, payload: Any, count: int, state: bytes | None, ended: bool
    ) -> None:
        self.ticket = ticket
        self.worker = worker
        self.pid = pid
        self.payload = payload
        self.count = count  # samples in the batch; -1: there is no batch
        self.state = state  # of the dataset after the batch, pickled
        self.ended = ended

    def __reduce__(self) -> Any:
        return Reply, (
            self.ticket, self.worker, self.pid, self.payload, self.count, self.state, self.ended
        )  # fmt: skip

    def pin_memory(self, *_: Any) -> Reply:
        """Called by torch's pinning thread."""
        self.payload = pin(unpack(self.payload))
        return self


class Task:
    """One thing for a worker to do; `run` is called there."""

    def __init__(self, ticket: int) -> None:
        self.ticket = ticket

    def run(self, side: WorkerSide) -> Reply:
        """Do nothing: it keeps the turn of a worker whose batch is not wanted."""
        return side.reply(self.ticket)


class Start(Task):
    """Begin an epoch: seed, and restore the dataset."""

    def __init__(self, ticket: int, seed: int | None, saved: bytes | None) -> None:
        super().__init__(ticket)
        self.seed = seed
        self.saved = saved

    def run(self, side: WorkerSide) -> Reply:
        saved = None if self.saved is None else pickle.loads(self.saved)
        between = saved is not None and saved.get("boundary", False)
        if between:
            side.start(saved)
        if self.seed is not None:
            seed_worker(self.seed, side.worker)
        if not between:
            side.start(saved)
        return side.reply(self.ticket, state=side.state(always=True))


class Fetch(Task):
    """Fetch a batch; of a map-style dataset these indices, of an iterable-style one what comes next."""

    def __init__(self, ticket: int, indices: Indices, keys: Keys | int) -> None:
        super().__init__(ticket)
        self.indices = indices
        self.keys = keys

    def run(self, side: WorkerSide) -> Reply:
        return side.fetch(self)

    def sample_keys(self, batched: bool) -> Keys | Callable[[], Keys]:
        """The keys for `sample_rng`; from the seed they are made only if they are asked for."""
        keys = self.keys
        if not isinstance(keys, int):
            return keys
        return lambda: keys_from_indices(keys, self.indices if batched else [self.indices])


def seed_worker(seed: int, worker: int) -> None:
    """Seed this process's generators as torch seeds a worker's; numpy's from (seed, worker)."""
    random.seed(seed + worker)
    torch.manual_seed(seed + worker)
    np.random.seed(np.random.SeedSequence([seed % 2**63, worker]).generate_state(4))


class WorkerSide(Dataset[Reply]):
    """What torch's loader takes for the dataset: it runs tasks.

    Args:
        snapshot_every: batches of a worker between two states of its iterable dataset; 0: none but the first.
        send_bytes: batches may travel as bytes (they are not pinned by torch's thread).
    """

    def __init__(
        self, fetcher: MapFetcher | StreamFetcher, snapshot_every: int, ranks: tuple[int, int], closing: Flag
    ) -> None:
        self.fetcher = fetcher
        self.snapshot_every = snapshot_every
        self.ranks = ranks
        self.closing = closing
        self.parent = os.getpid()
        self.worker = -1
        self._batches = 0
        self._own = fetcher.collate_fn is default_collate
        if self._own:
            fetcher.collate_fn = collate

    def __getitem__(self, task: Task) -> Reply:
        return task.run(self)

    def reply(
        self, ticket: int, payload: Any = None, count: int = -1, state: bytes | None = None, ended: bool = False
    ) -> Reply:
        return Reply(ticket, self.worker, os.getpid(), payload, count, state, ended)

    def start(self, saved: dict[str, Any] | None) -> None:
        """Restore the dataset and begin."""
        self._batches = 0
        fetcher = self.fetcher
        if saved is not None and "deal" in saved:
            saved = deal(fetcher.dataset, saved["deal"])
        if isinstance(fetcher, StreamFetcher):
            fetcher.start(saved)
        elif saved is not None and saved["dataset"] is not None:
            fetcher.dataset.load_state_dict(saved["dataset"])

    def fetch(self, task: Fetch) -> Reply:
        fetcher = self.fetcher
        if isinstance(fetcher, MapFetcher):
            batch, count = fetcher.fetch(task.indices, task.sample_keys(fetcher.batched)), 0
        else:
            try:
                batch, count = fetcher.fetch()
            except StopIteration:
                return self.reply(task.ticket, state=self.state(always=True), ended=True)
        self._batches += 1
        return self.reply(task.ticket, pack(batch, self._own), count, self.state(always=False))

    def state(self, always: bool) -> bytes | None:
        """The dataset's state, pickled at once since the dataset goes on changing it."""
        fetcher = self.fetcher
        if isinstance(fetcher, MapFetcher):
            if fetcher.collated or not is_stateful(fetcher.dataset):
                return None
            return pickle.dumps({"dataset": fetcher.dataset.state_dict(), "boundary": False})
        due = self.snapshot_every and self._batches % self.snapshot_every == 0
        if always or (due and fetcher.is_stateful):
            return pickle.dumps(fetcher.boundary_state() if fetcher.ended and always else fetcher.state())
        return None


def deal(dataset: Any, states: list[dict[str, Any]]) -> dict[str, Any]:
    """This shard's state out of those of another number of shards, as the dataset says how."""
    shard, shards = restartable.shard()
    inner = [state["iterator"] if state["iterator"] is not None else state["dataset"] for state in states]
    mine = dataset.deaggregate_state_dict(dataset.aggregate_state_dict(inner), shard, shards)
    of_iterator = states[0]["iterator"] is not None and not callable(getattr(dataset, "__next__", None))
    return {
        "dataset": None if of_iterator else mine,
        "iterator": mine if of_iterator else None,
        "samples": 0,
        "ended": False,
        "boundary": False,
    }


class WorkerStart:
    """Prepares a worker process, then calls the user's `worker_init_fn`."""

    def __init__(self, user: Callable[[int], None] | None) -> None:
        self.user = user

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        side: Any = info.dataset
        side.worker = worker
        object.__setattr__(info, "dataset", side.fetcher.dataset)  # what the user's code expects to find there
        restartable.set_ranks(*side.ranks)
        ignore_signals(side.closing)
        parent = os.getppid()
        if parent == 1 and side.parent != 1:  # the parent was killed before this process could look
            os._exit(0)
        threading.Thread(target=watch, args=(parent, side.closing), daemon=True).start()
        if self.user is not None:
            self.user(worker)


def ignore_signals(closing: Flag) -> None:
    """Leave signals to the main process: a worker must not die of one that a scheduler sends to all."""

    def on_terminate(signum: int, frame: object) -> None:
        if closing.is_set():
            os._exit(0)

    signal.signal(signal.SIGTERM, on_terminate)
    for name in ("SIGINT", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def watch(parent: int, closing: Flag) -> None:
    """Wait until nobody wants this process any more, then end it, whatever the dataset is doing.

    Torch asks its workers to end through a queue. Where the garbage collector takes their iterator, the queue is
    closed before that, and torch would wait for five seconds for each of them.
    """
    while os.getppid() == parent and not closing.is_set():
        time.sleep(WATCH_INTERVAL)
    time.sleep(WATCH_INTERVAL if closing.is_set() else 0)  # for those who do end by themselves
    os._exit(0)


class Feed:
    """What torch's loader takes for the sampler: the tasks of the current epoch."""

    def __init__(self) -> None:
        self.tasks: Iterable[Task] = ()

    def __iter__(self) -> Iterator[Task]:
        return iter(self.tasks)


def same(reply: Any) -> Any:
    """Collate function of the engine: the worker has collated."""
    return reply


class Engine:
    """The worker processes of one loader, for one epoch or, if they persist, for all.

    Args:
        options: keyword arguments of torch's DataLoader.
    """

    def __init__(
        self, fetcher: MapFetcher | StreamFetcher, snapshot_every: int, user_init: Any, options: dict[str, Any]
    ) -> None:
        context = options.get("multiprocessing_context") or multiprocessing
        self.closing = Flag(context)
        side = WorkerSide(fetcher, snapshot_every, restartable.current_ranks(), self.closing)
        self._feed = Feed()
        self._inner: DataLoader[Reply] | None = DataLoader(
            side,
            batch_size=None,
            sampler=self._feed,
            collate_fn=same,
            worker_init_fn=WorkerStart(user_init),
            **options,
        )
        self.pids: dict[int, int] = {}
        weakref.finalize(self, self.closing.set)

    def run(self, tasks: Iterator[Task]) -> Iterator[Reply]:
        """The replies to these tasks; workers start, or start over, and take the first of them."""
        assert self._inner is not None
        self._feed.tasks = tasks
        return iter(self._inner)

    @property
    def is_closed(self) -> bool:
        return self._inner is None

    def close(self) -> None:
        """Let the workers end."""
        self.closing.set()
        self._inner = None

"""Iterate over epochs whose batches are fetched in worker processes."""

from __future__ import annotations

import pickle
import re
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from exactdata.errors import UserError
from exactdata.loading import global_draws
from exactdata.loading.epochs import Epoch, EpochPosition, IndexSource
from exactdata.loading.fetch import Indices, MapFetcher, named_sample, stopped
from exactdata.loading.index_stream import as_array
from exactdata.loading.ipc import unpack
from exactdata.loading.loader_state import DatasetStates
from exactdata.loading.protocols import BatchRecord, State
from exactdata.loading.stream_fetch import StreamFetcher, has_ended
from exactdata.loading.workers import FetchTask, Reply, StartTask, Task, WorkerPool


@dataclass
class WorkerSetup:
    """The parameters with which worker processes begin an epoch.

    Attributes:
        pool: the worker processes.
        count: number of workers.
        seed: seed of the workers. If None, torch has seeded them.
        saved: the state of the dataset in each worker, or None.
        epoch: the loader's epoch.
        first: number of the worker that fetches the first batch.
        in_order: as in torch's DataLoader.
        persistent: whether the workers are kept for the next epoch.
        wait: whether to wait until all workers have started, and raise their errors, before requesting the first batch.
    """

    pool: WorkerPool
    count: int
    seed: int | None
    saved: DatasetStates | None
    epoch: int
    first: int
    in_order: bool
    persistent: bool
    wait: bool = False


@dataclass(slots=True)
class _PendingTask:
    """A dispatched task and its batch number (-1 for a task without a batch)."""

    ticket: int
    worker: int
    batch: int = -1
    discarded: bool = False
    indices: Indices = None
    first: int = 0
    count: int = 0
    sampler_state: dict[str, Any] | None = None


class _Dispatcher(Iterator[Task]):
    """Iterate over the tasks of an epoch: a start task per worker, empty tasks up to the first worker, and the batches.

    The dispatcher keeps tasks until they are answered. It holds no reference to the iterator over the replies, so that
    freeing that iterator ends the workers immediately.
    """

    def __init__(self, setup: WorkerSetup) -> None:
        self.pending: dict[int, _PendingTask] = {}
        self._count = setup.count
        self._epoch = setup.epoch
        self._tickets = 0
        self._opening = self._start_tasks(setup.seed, setup.saved, setup.first)

    def __next__(self) -> Task:
        opening = next(self._opening, None)
        return self._fetch_task() if opening is None else opening

    def _fetch_task(self) -> FetchTask:
        return FetchTask(self._add().ticket, None, 0)

    def _start_tasks(self, seed: int | None, states: DatasetStates | None, first: int) -> Iterator[Task]:
        for worker in range(self._count):
            saved = None if states is None else pickle.dumps(states[worker])
            yield StartTask(self._add().ticket, seed, saved, self._epoch)
        yield from self._empty_tasks(first)

    def _empty_tasks(self, worker: int) -> Iterator[Task]:
        """Yield empty tasks until `worker` is the next worker to get a task."""
        while self._tickets % self._count != worker:
            yield Task(self._add().ticket)

    def _add(self) -> _PendingTask:
        ticket = self._tickets
        self._tickets = ticket + 1
        task = self.pending[ticket] = _PendingTask(ticket, ticket % self._count)
        return task


class _MapDispatcher(_Dispatcher):
    """Dispatch the batches of a map-style dataset. Can rewind to an earlier batch, even after the last batch."""

    def __init__(self, setup: WorkerSetup, source: IndexSource, position: EpochPosition) -> None:
        super().__init__(setup)
        self._source = source
        self._has_keys = hasattr(source.stream.sampler, "sample_keys")
        self._drawn = position.samples
        self._drawn_batches = position.batches
        self._base = position.base

    def _fetch_task(self) -> FetchTask:
        source, stream = self._source, self._source.stream
        indices = next(source.indices)
        count = 1 if stream.one_by_one else len(indices)
        first, batch = self._drawn, self._drawn_batches
        self._drawn, self._drawn_batches = first + count, batch + 1
        task = self._add()
        task.indices, task.count, task.first, task.batch = indices, count, first, batch
        task.sampler_state = stream.state() if stream.is_stateful else None
        keys: Any = source.keys(indices, first - self._base, count) if self._has_keys else source.seed
        return FetchTask(task.ticket, indices, keys)

    def rewind(self, reached: int, states: DatasetStates | None, next_worker: int) -> None:
        """Discard the dispatched batches that begin at sample `reached` or later, and dispatch new ones instead.

        Args:
            reached: the first sample to dispatch again.
            states: the dataset's state in each worker after the last batch yielded, from which the workers restart.
            next_worker: the worker that fetches the first new batch.
        """
        discarded = [task for task in self.pending.values() if task.batch >= 0 and task.first >= reached]
        for task in discarded:
            task.discarded = True
        self._drawn, self._drawn_batches = reached, min((task.batch for task in discarded), default=self._drawn_batches)
        empty = self._empty_tasks(next_worker if states is None else 0)
        self._opening = empty if states is None else chain(empty, self._start_tasks(None, states, next_worker))


class _WorkerEpoch(Epoch):
    """Receive replies, keep the workers' states, and explain a lost worker. Base class of both dataset styles."""

    def __init__(
        self, setup: WorkerSetup, dispatcher: _Dispatcher, dataset: Any, position: EpochPosition, *rest: Any
    ) -> None:
        super().__init__(position, *rest)
        self._setup = setup
        self._dataset = dataset
        self._pending = dispatcher.pending
        self._received = 0
        self._states: list[dict[str, Any] | None] = [None] * setup.count
        if setup.saved:
            self._states = list(setup.saved)
        elif setup.pool.states:
            self._states = list(setup.pool.states)
        setup.pool.states = None
        self._next_worker = setup.first
        self._starting = setup.count
        self._early: deque[tuple[Reply, _PendingTask]] = deque()
        self._replies = setup.pool.run(dispatcher)
        if not setup.persistent:
            weakref.finalize(self, setup.pool.shutdown.set)
        if setup.wait:
            self._await_starts()

    def __next__(self) -> Any:
        try:
            return super().__next__()
        except StopIteration:
            self._replies = iter(())  # ends the workers, unless they persist
            raise

    def _receive(self) -> tuple[Reply, _PendingTask]:
        """Return the next reply to process. With `in_order=False`, first wait until all workers have started."""
        if not self._setup.in_order:
            self._await_starts()
        reply, task = self._early.popleft() if self._early else self._take()
        self._keep_state(reply, task)
        return reply, task

    def _await_starts(self) -> None:
        while self._starting:
            reply, task = self._take()
            if task.ticket < self._setup.count:
                self._starting -= 1
                self._keep_state(reply, task)
            else:
                self._early.append((reply, task))

    def _keep_state(self, reply: Reply, task: _PendingTask) -> None:
        """Keep the state in a reply that is processed now. States in later replies are ahead of the yielded batches."""
        if reply.state is not None and not task.discarded:
            self._states[reply.worker] = {"pickled": reply.state}

    def _take(self) -> tuple[Reply, _PendingTask]:
        """Take one reply from the pool.

        Raises:
            StopIteration: there are no more replies.
            Exception: the dataset's error, or torch's error about a dead or late worker, with that worker's task.
        """
        try:
            reply = next(self._replies)
        except StopIteration as error:
            if error.args:  # torch's message about a StopIteration that the worker raised
                raise stopped(f"{type(self._dataset).__name__} or its worker") from error
            raise
        except Exception as error:
            if isinstance(error, UserError):  # torch has prepended the worker's traceback to its message
                error.args = (str(error).rpartition(f"{type(error).__name__}: ")[2].strip(),)
            if is_lost(error):
                self._explain(error)
                self.close()
                self._setup.pool.close()
            elif self._setup.in_order:
                failed = self._pending.pop(self._received, None)
                self._received += 1
                if failed is not None and failed.discarded:
                    return self._take()
                if failed is not None and failed.batch >= 0:
                    self.position.take(failed.indices, failed.count, failed.first)
            raise
        task = self._pending.pop(reply.ticket)
        self._received += 1
        self._setup.pool.pids[reply.worker] = reply.pid
        global_draws.warn(self._dataset, *reply.draws)
        return reply, task

    def _state_of(self, worker: int) -> dict[str, Any] | None:
        state = self._states[worker]
        if state is not None and "pickled" in state:
            state = self._states[worker] = pickle.loads(state["pickled"])
        return state

    def next_worker(self) -> int:
        return self._next_worker

    def close(self) -> None:
        self.closed = self.closed or not self.finished
        self._replies = iter(())

    def _explain(self, error: Exception) -> None:
        """Add the number of the worker, and the batch it was loading, to torch's error about a dead or late worker."""
        pids = {int(pid) for pid in re.findall(r"\d+", re.split("exited|is killed", str(error))[0])}
        dead = [worker for worker, pid in self._setup.pool.pids.items() if pid in pids]
        pending = [task for task in self._pending.values() if not dead or task.worker in dead]
        if pending:
            worker = pending[0].worker
            own = [self._describe(task) for task in pending if task.worker == worker]
            loading = " or ".join(dict.fromkeys(own[:3]))
            error.args = (f"{error} [worker {worker} was loading {loading}; state_dict() is still valid]",)

    def _describe(self, task: _PendingTask) -> str:
        return f"its next batch of {type(self._dataset).__name__} in epoch {self.position.epoch}"


def is_lost(error: Exception) -> bool:
    """Return whether an error is torch's error about a worker that died or timed out."""
    return isinstance(error, RuntimeError) and str(error).startswith(("DataLoader worker (pid", "DataLoader timed out"))


class WorkerMapEpoch(_WorkerEpoch):
    """Iterate over an epoch of a map-style dataset that worker processes fetch."""

    def __init__(
        self, source: IndexSource, fetcher: MapFetcher, setup: WorkerSetup, position: EpochPosition, *rest: Any
    ) -> None:
        self._source = source
        self._sampler_state = source.stream.state()
        self._dispatcher = _MapDispatcher(setup, source, position)
        super().__init__(setup, self._dispatcher, fetcher.dataset, position, *rest)

    def _follow_changes(self) -> None:
        if not self._source.rewind_if_changed():
            return
        # A worker can be rewound only if the replies are in order.
        states = self.dataset_states() if self._setup.in_order else None
        self._dispatcher.rewind(self.position.reached, states, self._next_worker if self._setup.in_order else 0)

    def _next(self) -> Any:
        while True:
            reply, task = self._receive()
            if reply.count < 0 or task.batch < 0 or task.discarded:
                continue
            self._next_worker = (reply.worker + 1) % self._setup.count
            self._sampler_state = task.sampler_state
            if self._setup.in_order:
                self.position.advance(task.indices, task.count, task.batch + 1, task.first)
            else:
                self.position.advance_unordered(task.indices, task.count, task.first)
            return unpack(reply.payload)

    def _record(self) -> BatchRecord:
        return self._source.record(self.position)

    def sampler_state(self) -> dict[str, Any] | None:
        return self._sampler_state

    def dataset_states(self) -> DatasetStates | None:
        if self.finished and not self._setup.persistent:
            return None
        states = [self._state_of(worker) for worker in range(self._setup.count)]
        if any(state is None for state in states):
            return None
        return [{**state, "boundary": self.finished} for state in states if state is not None]

    def _describe(self, task: _PendingTask) -> str:
        if task.batch < 0:
            return f"{type(self._dataset).__name__} itself"
        listed = [task.indices] if self._source.stream.one_by_one else task.indices
        array = as_array(listed)
        names = ", ".join(named_sample(self._dataset, int(i)) for i in array[:4]) if array is not None else repr(listed)
        more = f" and {len(listed) - 4} more" if len(listed) > 4 else ""
        return f"batch {task.batch} of epoch {self.position.epoch}: samples {names}{more}"


class WorkerStreamEpoch(_WorkerEpoch):
    """Iterate over an epoch of an iterable-style dataset. Every worker process has a separate iterator."""

    def __init__(self, fetcher: StreamFetcher, setup: WorkerSetup, position: EpochPosition, *rest: Any) -> None:
        self._since_state = [0] * setup.count  # samples yielded since each worker's last state
        self._ended = [False] * setup.count
        for worker, state in enumerate(setup.saved or ()):
            self._ended[worker] = "redistribute" not in state and has_ended(state)
        super().__init__(setup, _Dispatcher(setup), fetcher.dataset, position, *rest)

    def _next(self) -> Any:
        while not all(self._ended):
            reply, _ = self._receive()
            worker = reply.worker
            self._ended[worker] = self._ended[worker] or reply.ended
            if reply.count < 0:
                continue
            self._since_state[worker] = 0 if reply.state is not None else self._since_state[worker] + reply.count
            self._next_worker = (worker + 1) % self._setup.count
            self.position.advance(None, reply.count, self.position.batches + 1, self.position.samples)
            return unpack(reply.payload)
        if self._setup.persistent and all(self._states):
            self._setup.pool.states = [self._after_end(worker) for worker in range(self._setup.count)]
        raise StopIteration

    def _after_end(self, worker: int) -> State:
        return {**(self._state_of(worker) or {}), "boundary": True, "ended": True, "samples": 0, "begun": False}

    def dataset_states(self) -> DatasetStates | None:
        if self.finished and not self._setup.persistent:
            return None
        found: DatasetStates = []
        for worker in range(self._setup.count):
            state = self._state_of(worker)
            if state is None:
                return None
            if self.finished:
                state = self._after_end(worker)
            elif self._ended[worker]:
                state = {**state, "boundary": False, "ended": True, "begun": True}
            else:
                since = self._since_state[worker]
                state = {**state, "samples": state["samples"] + since, "begun": state["begun"] or since > 0}
            found.append(state)
        return found

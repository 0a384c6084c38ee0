"""Iterating one epoch: in this process, with a prefetching thread, or with worker processes.

Each iterator keeps a `Place`, which counts what was yielded and nothing that was fetched ahead.
"""

from __future__ import annotations

import atexit
import copy
import pickle
import queue
import re
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from runner.data.draws import Draws, as_array
from runner.data.fetch import Indices, MapFetcher, StreamFetcher, is_stateful, locate
from runner.data.randomness import Keys, keys_from_indices
from runner.data.transport import unpack
from runner.data.workers import Engine, Fetch, Reply, Start, Task

States = list[dict[str, Any]]


@dataclass
class Place:
    """How far an epoch has come.

    `base` is the number of samples that this iteration began at; a sampler by position counts from there.
    """

    epoch: int = 0
    batches: int = 0
    samples: int = 0
    base: int = 0
    indices: Indices | None = None
    first: int = 0
    done: list[int] = field(default_factory=list)  # batches yielded before their turn, with in_order=False
    moved: bool = False  # something was yielded since the iteration began

    def move(self, indices: Indices, count: int, batches: int, first: int) -> None:
        """A batch of `count` samples was yielded, the first of them the `first`-th of the epoch."""
        self.moved = True
        self.indices = indices
        self.first = first
        self.batches = batches
        self.samples = first + count


@dataclass
class Source:
    """What an epoch of a map-style dataset is made from."""

    draws: Draws
    indices: Iterator[Indices]
    seed: int

    @property
    def whole(self) -> bool:
        """Whether a draw is one index, and no batch of them."""
        return self.draws.batch_size is None and not self.draws.batches

    def keys(self, indices: Indices, first: int, count: int) -> Keys:
        """Keys for `sample_rng`: the sampler's own, or a hash of the epoch's seed and the index."""
        sampler = self.draws.sampler
        if hasattr(sampler, "sample_keys"):
            return sampler.sample_keys(first, count)  # type: ignore[no-any-return]
        return keys_from_indices(self.seed, [indices] if self.whole else indices)


class Epoch(Iterator[Any]):
    """One epoch's batches.

    Args:
        place: where it begins; moved on with every batch.
        on_end: called once, when the epoch has ended by itself.
        transform: applied to every batch.
        on_batch: called with the number of samples so far.
    """

    def __init__(
        self,
        place: Place,
        on_end: Callable[[Epoch], None],
        transform: Callable[[Any], Any] | None,
        on_batch: Callable[[int], None] | None = None,
    ) -> None:
        # The loader holds its epoch: held back weakly, both go, and their workers, with the last reference.
        self._on_end = weakref.WeakMethod(on_end)
        self._on_batch = None if on_batch is None else weakref.WeakMethod(on_batch)
        self.place = place
        self.finished = False
        self.broken = False
        self.successor: Epoch | None = None  # the epoch that took this one's workers
        self._transform = transform

    def __iter__(self) -> Epoch:
        return self

    def __next__(self) -> Any:
        if self.finished or self.broken:
            if not self.finished and self.successor is not None:
                return next(self.successor)
            raise StopIteration
        try:
            batch = self._next()
        except StopIteration:
            self.finished = True
            if (on_end := self._on_end()) is not None:
                on_end(self)
            raise
        if self._on_batch is not None and (on_batch := self._on_batch()) is not None:
            on_batch(self.place.samples)
        return batch if self._transform is None else self._transform(batch)

    def _next(self) -> Any:
        raise NotImplementedError

    def order_state(self) -> dict[str, Any] | None:
        """A plain sampler's own state."""
        return None

    def dataset_states(self) -> States | None:
        """The dataset's states, one a worker."""
        return None

    def next_worker(self) -> int:
        """The worker whose turn it is."""
        return 0

    def close(self) -> None:
        """Stop fetching ahead."""


class InlineMap(Epoch):
    """Map-style, fetched when asked for."""

    def __init__(self, source: Source, fetcher: MapFetcher, place: Place, *rest: Any) -> None:
        super().__init__(place, *rest)
        self._source = source
        self._fetcher = fetcher
        self._drawn_batches = place.batches
        self._drawn = place.samples
        self._whole = source.whole

    def _next(self) -> Any:
        source = self._source
        indices = next(source.indices)
        count = 1 if self._whole else len(indices)
        first = self._drawn
        self._drawn = first + count
        self._drawn_batches += 1
        base = self.place.base
        batch = self._fetcher.fetch(indices, lambda: source.keys(indices, first - base, count))
        self.place.move(indices, count, self._drawn_batches, first)
        return batch

    def order_state(self) -> dict[str, Any] | None:
        return self._source.draws.state()

    def dataset_states(self) -> States | None:
        dataset = self._fetcher.dataset
        if self._fetcher.collated or not is_stateful(dataset):
            return None
        return [{"dataset": copy.deepcopy(dataset.state_dict()), "boundary": self.finished}]


class InlineStream(Epoch):
    """Iterable-style, in this process."""

    def __init__(self, fetcher: StreamFetcher, place: Place, *rest: Any) -> None:
        super().__init__(place, *rest)
        self._fetcher = fetcher

    def _next(self) -> Any:
        first = self.place.samples
        batch, count = self._fetcher.fetch()
        self.place.move(None, count, self.place.batches + 1, first)
        return batch

    @property
    def exhausted(self) -> bool:
        """Whether the dataset has come to an end in this process."""
        return self._fetcher.exhausted

    def dataset_states(self) -> States | None:
        if self.finished:
            return [copy.deepcopy(self._fetcher.boundary_state())]
        return [copy.deepcopy(self._fetcher.state())]


class Prefetcher(threading.Thread):
    """The prefetching thread; it knows nothing of the iterator, which may go away at any time."""

    # By the identity of a dataset, which need not bear two threads, as those of two iterators of a loader would be.
    _locks: ClassVar[weakref.WeakValueDictionary[int, Any]] = weakref.WeakValueDictionary()
    _running: ClassVar[weakref.WeakSet[Prefetcher]] = weakref.WeakSet()

    def __init__(self, fetcher: MapFetcher) -> None:
        super().__init__(name="prefetch", daemon=True)
        self.todo: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._fetcher = fetcher
        self._lock = self._locks.setdefault(id(fetcher.dataset), threading.Lock())
        self._ended = False
        self._running.add(self)
        self.start()

    def run(self) -> None:
        while (task := self.todo.get()) is not None:
            indices, keys = task
            with self._lock:
                if self._ended:
                    return
                try:
                    self.done.put((self._fetcher.fetch(indices, keys), None))
                except BaseException as error:  # noqa: BLE001 (raised again where the batch is asked for)
                    self.done.put((None, error))

    def end(self) -> None:
        """Fetch nothing more, whatever was asked for."""
        self._ended = True
        self.todo.put(None)

    @classmethod
    def end_all(cls) -> None:
        """An interpreter that shuts down under a thread that is in the middle of torch's code aborts."""
        for thread in list(cls._running):
            thread.end()
            thread.join()


atexit.register(Prefetcher.end_all)


class Threaded(Epoch):
    """Map-style, fetched ahead by a thread: for datasets that gather a whole batch without Python.

    Such a gather costs a tenth of sending its result between processes.
    """

    def __init__(self, source: Source, fetcher: MapFetcher, ahead: int, place: Place, *rest: Any) -> None:
        super().__init__(place, *rest)
        self._source = source
        self._thread = Prefetcher(fetcher)
        self._waiting: list[tuple[Indices, int, int, dict[str, Any] | None]] = []
        self._ahead = ahead
        self._drawn = place.samples
        self._yielded = place.batches
        self._order = source.draws.state()
        weakref.finalize(self, self._thread.end).atexit = False
        self._fill()

    def _fill(self) -> None:
        source, draws = self._source, self._source.draws
        while len(self._waiting) < self._ahead:
            indices = next(source.indices, None)
            if indices is None:
                return
            first, count = self._drawn, len(indices)
            self._drawn += count
            base = self.place.base
            self._waiting.append((indices, first, count, draws.state() if draws.is_stateful else None))
            self._thread.todo.put((indices, lambda i=indices, f=first - base, n=count: source.keys(i, f, n)))

    def _next(self) -> Any:
        if not self._waiting:
            raise StopIteration
        batch, error = self._thread.done.get()
        indices, first, count, order = self._waiting.pop(0)
        self._fill()
        self._yielded += 1
        if error is not None:
            raise error
        self._order = order
        self.place.move(indices, count, self._yielded, first)
        return batch

    def order_state(self) -> dict[str, Any] | None:
        return self._order

    def close(self) -> None:
        self.broken = self.broken or not self.finished
        self._thread.end()
        self._thread.join()  # what comes next may change the dataset


class _Sent:
    """A task that was sent out: the batch it is for, if it is for one."""

    __slots__ = ("batch", "count", "first", "indices", "order", "ticket", "worker")

    def __init__(self, ticket: int, worker: int) -> None:
        self.ticket = ticket
        self.worker = worker
        self.batch = -1
        self.indices: Indices = None
        self.first = self.count = 0
        self.order: dict[str, Any] | None = None


@dataclass
class Workers:
    """How the worker processes of an epoch start.

    `saved` has one state a worker (or None); `first` is the worker whose turn it is; with `wait` the workers are up,
    or their error is raised, before the first batch is asked for.
    """

    engine: Engine
    count: int
    seed: int | None
    saved: States | None
    first: int
    in_order: bool
    persistent: bool
    wait: bool = False


class _Dispatch:
    """Sends out the tasks of an epoch and remembers them.

    It knows nothing of the iterator over the replies, so that dropping that one ends the workers at once.
    """

    def __init__(self, workers: Workers) -> None:
        self.sent: dict[int, _Sent] = {}
        self._count = workers.count
        self._first = workers.first
        self._seed = workers.seed
        self._saved = workers.saved
        self._tickets = 0

    def tasks(self) -> Iterator[Task]:
        """Every worker's start, then empty turns up to the worker whose turn it is, then batches."""
        for worker in range(self._count):
            saved = None if self._saved is None else pickle.dumps(self._saved[worker])
            yield Start(self._send().ticket, self._seed, saved)
        for _ in range(self._first):
            yield Task(self._send().ticket)
        yield from self._fetches()

    def _fetches(self) -> Iterator[Task]:
        while True:
            yield Fetch(self._send().ticket, None, 0)

    def _send(self) -> _Sent:
        ticket = self._tickets
        self._tickets = ticket + 1
        sent = self.sent[ticket] = _Sent(ticket, ticket % self._count)
        return sent


class _MapDispatch(_Dispatch):
    """Sends batches of indices besides."""

    def __init__(self, workers: Workers, source: Source, place: Place) -> None:
        super().__init__(workers)
        self._source = source
        self._drawn = place.samples
        self._drawn_batches = place.batches
        self._base = place.base
        self._done = set(place.done)

    def _fetches(self) -> Iterator[Task]:
        source, draws = self._source, self._source.draws
        own_keys = hasattr(draws.sampler, "sample_keys")
        for indices in source.indices:
            count = 1 if source.whole else len(indices)
            first, batch = self._drawn, self._drawn_batches
            self._drawn, self._drawn_batches = first + count, batch + 1
            if batch in self._done:
                continue
            sent = self._send()
            sent.indices, sent.count, sent.first, sent.batch = indices, count, first, batch
            sent.order = draws.state() if draws.is_stateful else None
            keys: Any = source.keys(indices, first - self._base, count) if own_keys else source.seed
            yield Fetch(sent.ticket, indices, keys)


class _WorkerEpoch(Epoch):
    """Common to both styles: taking replies, saying who failed."""

    def __init__(self, workers: Workers, dispatch: _Dispatch, dataset: Any, place: Place, *rest: Any) -> None:
        super().__init__(place, *rest)
        self._workers = workers
        self._dataset = dataset
        self._sent = dispatch.sent
        self._received = 0
        self._states: list[dict[str, Any] | None] = [None] * workers.count
        if workers.saved:
            self._states = list(workers.saved)
        self._turn = workers.first
        self._starting = workers.count
        self._early: deque[tuple[Reply, _Sent]] = deque()
        self._replies = workers.engine.run(dispatch.tasks())
        if not workers.persistent:
            weakref.finalize(self, workers.engine.closing.set)
        if workers.wait:
            self._early.extend([self._take() for _ in range(workers.count)])

    def __next__(self) -> Any:
        try:
            return super().__next__()
        except StopIteration:
            self._replies = iter(())  # ends the workers, unless they persist
            raise

    def _receive(self) -> tuple[Reply, _Sent]:
        """The next reply; all workers have started before the first batch is handed on."""
        while not self._workers.in_order and self._starting:
            reply, sent = self._take()
            if sent.ticket < self._workers.count:
                self._starting -= 1
            else:
                self._early.append((reply, sent))
        return self._early.popleft() if self._early else self._take()

    def _take(self) -> tuple[Reply, _Sent]:
        """Take one reply from the engine.

        Raises:
            StopIteration: there is nothing more to come.
            Exception: the dataset's, or torch's for a dead or late worker, saying what was being loaded.
        """
        try:
            reply = next(self._replies)
        except StopIteration:
            raise
        except Exception as error:
            if is_lost(error):
                self._explain(error)
                self.close()
                self._workers.engine.close()
            elif self._workers.in_order:
                self._sent.pop(self._received, None)
                self._received += 1
            raise
        sent = self._sent.pop(reply.ticket)
        self._received += 1
        self._workers.engine.pids[reply.worker] = reply.pid
        if reply.state is not None:
            self._states[reply.worker] = {"pickled": reply.state}
        return reply, sent

    def _state_of(self, worker: int) -> dict[str, Any] | None:
        state = self._states[worker]
        if state is not None and "pickled" in state:
            state = self._states[worker] = pickle.loads(state["pickled"])
        return state

    def next_worker(self) -> int:
        return self._turn

    def close(self) -> None:
        self.broken = self.broken or not self.finished
        self._replies = iter(())

    def _explain(self, error: Exception) -> None:
        """Add to the error of a dead or late worker which one it is and what it had been given to load."""
        pids = {int(pid) for pid in re.findall(r"\d+", re.split("exited|is killed", str(error))[0])}
        dead = [worker for worker, pid in self._workers.engine.pids.items() if pid in pids]
        waiting = [sent for sent in self._sent.values() if not dead or sent.worker in dead]
        if waiting:
            worker = waiting[0].worker
            own = [self._was_loading(sent) for sent in waiting if sent.worker == worker]
            given = " or ".join(dict.fromkeys(own[:3]))
            error.args = (f"{error} [worker {worker} was loading {given}; state_dict() is still good]",)

    def _was_loading(self, sent: _Sent) -> str:
        return f"its next batch of {type(self._dataset).__name__} in epoch {self.place.epoch}"


def is_lost(error: Exception) -> bool:
    """Whether torch says that a worker died or is late."""
    return isinstance(error, RuntimeError) and str(error).startswith(("DataLoader worker (pid", "DataLoader timed out"))


class WorkerMap(_WorkerEpoch):
    """Map-style, with worker processes."""

    def __init__(self, source: Source, fetcher: MapFetcher, workers: Workers, place: Place, *rest: Any) -> None:
        self._whole = source.whole
        self._size = source.draws.batch_size or 1  # of the batches that an earlier run has yielded
        self._orders: dict[int, tuple[int, dict[str, Any] | None]] = {}
        self._order = source.draws.state()
        super().__init__(workers, _MapDispatch(workers, source, place), fetcher.dataset, place, *rest)

    def _next(self) -> Any:
        while True:
            reply, sent = self._receive()
            if reply.count < 0 or sent.batch < 0:
                continue
            self._turn = (reply.worker + 1) % self._workers.count
            if self._workers.in_order:
                self._order = sent.order
                self.place.move(sent.indices, sent.count, sent.batch + 1, sent.first)
            else:
                self._move_out_of_order(sent)
            return unpack(reply.payload)

    def _move_out_of_order(self, sent: _Sent) -> None:
        """The place is the first batch that was not yielded; those yielded after it are listed."""
        place = self.place
        self._orders[sent.batch] = (sent.first + sent.count, sent.order)
        place.indices, place.first, place.moved = sent.indices, sent.first, True
        place.done = sorted({*place.done, sent.batch})
        while place.done and place.done[0] == place.batches:
            place.done.pop(0)
            end, order = self._orders.pop(place.batches, (place.samples + self._size, None))
            place.batches, place.samples, self._order = place.batches + 1, end, order

    def order_state(self) -> dict[str, Any] | None:
        return self._order

    def dataset_states(self) -> States | None:
        if self._fresh_at_end():
            return None
        states = [self._state_of(worker) for worker in range(self._workers.count)]
        if any(state is None for state in states):
            return None
        return [{**state, "boundary": self.finished} for state in states if state is not None]

    def _fresh_at_end(self) -> bool:
        return self.finished and not self._workers.persistent

    def _was_loading(self, sent: _Sent) -> str:
        if sent.batch < 0:
            return f"{type(self._dataset).__name__} itself"
        listed = sent.indices if not self._whole else [sent.indices]
        array = as_array(listed)
        names = ", ".join(locate(self._dataset, int(i)) for i in array[:4]) if array is not None else repr(listed)
        more = f" and {len(listed) - 4} more" if len(listed) > 4 else ""
        return f"batch {sent.batch} of epoch {self.place.epoch}: samples {names}{more}"


class WorkerStream(_WorkerEpoch):
    """Iterable-style, with worker processes, each of which has its own iterator."""

    def __init__(self, fetcher: StreamFetcher, workers: Workers, place: Place, *rest: Any) -> None:
        self._since = [0] * workers.count  # samples since the state that is known
        self._over = [False] * workers.count
        for worker, state in enumerate(workers.saved or ()):
            self._over[worker] = "deal" not in state and state["ended"] and not state["boundary"]
        super().__init__(workers, _Dispatch(workers), fetcher.dataset, place, *rest)

    def _next(self) -> Any:
        while not all(self._over):
            reply, _ = self._receive()
            worker = reply.worker
            self._over[worker] = self._over[worker] or reply.ended
            if reply.count < 0:
                continue
            self._since[worker] = 0 if reply.state is not None else self._since[worker] + reply.count
            self._turn = (worker + 1) % self._workers.count
            self.place.move(None, reply.count, self.place.batches + 1, self.place.samples)
            return unpack(reply.payload)
        raise StopIteration

    def dataset_states(self) -> States | None:
        if self.finished and not self._workers.persistent:
            return None
        found: States = []
        for worker in range(self._workers.count):
            state = self._state_of(worker)
            if state is None:
                return None
            if self.finished:
                state = {**state, "boundary": True, "ended": True, "samples": 0}
            elif self._over[worker]:
                state = {**state, "boundary": False, "ended": True}
            else:
                state = {**state, "samples": state["samples"] + self._since[worker]}
            found.append(state)
        return found

"""Prefetch in a thread, for map-style datasets that gather a batch with very little Python code."""

from __future__ import annotations

import atexit
import os
import queue
import threading
import weakref
from typing import Any, ClassVar

from exactdata.loading.epochs import Epoch, EpochPosition, IndexSource
from exactdata.loading.fetch import Indices, MapFetcher
from exactdata.loading.protocols import BatchRecord


class PrefetchThread(threading.Thread):
    """Fetch requested batches in a thread. Holds no reference to the iterator, which may be freed at any time."""

    # Locks by the id of the dataset. A dataset need not be thread-safe, and a loader may have several iterators.
    _locks: ClassVar[weakref.WeakValueDictionary[int, Any]] = weakref.WeakValueDictionary()
    _running: ClassVar[weakref.WeakSet[PrefetchThread]] = weakref.WeakSet()

    def __init__(self, fetcher: MapFetcher) -> None:
        super().__init__(name="prefetch", daemon=True)
        self.requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._fetcher = fetcher
        self._lock = self._locks.setdefault(id(fetcher.dataset), threading.Lock())
        self._stopped = False
        self._running.add(self)
        self.start()

    def run(self) -> None:
        while (request := self.requests.get()) is not None:
            indices, keys = request
            with self._lock:
                if self._stopped:
                    return
                try:
                    self.results.put((self._fetcher.fetch(indices, keys), None))
                except BaseException as error:  # noqa: BLE001 (raised again where the batch is asked for)
                    self.results.put((None, error))

    def stop(self) -> None:
        """Stop fetching, and ignore the remaining requests."""
        self._stopped = True
        self.requests.put(None)

    @classmethod
    def stop_all(cls) -> None:
        """Stop every thread, because an interpreter that exits while a thread is inside torch aborts."""
        for thread in list(cls._running):
            thread.stop()
            thread.join()


atexit.register(PrefetchThread.stop_all)
# A fork copies the locks but not the threads, and a lock may be held at the time of the fork.
os.register_at_fork(after_in_child=PrefetchThread._locks.clear)


class PrefetchedEpoch(Epoch):
    """Iterate over an epoch of a map-style dataset that a thread prefetches.

    Args:
        source: the indices of the epoch.
        fetcher: fetches a batch of indices.
        depth: number of batches to prefetch.
        position: position from which to iterate.
        rest: additional arguments for `Epoch`.
    """

    def __init__(
        self, source: IndexSource, fetcher: MapFetcher, depth: int, position: EpochPosition, *rest: Any
    ) -> None:
        super().__init__(position, *rest)
        self._source = source
        self._fetcher = fetcher
        self._depth = depth
        self._yielded = position.batches
        self._sampler_state = source.stream.state()
        self._begin(position.samples)

    def _begin(self, drawn: int) -> None:
        """Start a thread that fetches after the first `drawn` samples. Freeing the epoch stops the thread."""
        self._thread = PrefetchThread(self._fetcher)
        self._pending: list[tuple[Indices, int, int, dict[str, Any] | None]] = []
        self._drawn = drawn
        weakref.finalize(self, self._thread.stop).atexit = False
        self._fill()

    def _fill(self) -> None:
        source, stream = self._source, self._source.stream
        while len(self._pending) < self._depth:
            indices = next(source.indices, None)
            if indices is None:
                return
            first, count = self._drawn, len(indices)
            self._drawn += count
            base = self.position.base
            self._pending.append((indices, first, count, stream.state() if stream.is_stateful else None))
            self._thread.requests.put((indices, lambda i=indices, f=first - base, n=count: source.keys(i, f, n)))

    def _follow_changes(self) -> None:
        if not self._source.rewind_if_changed():
            return
        self._thread.stop()
        self._begin(self.position.reached)

    def _next(self) -> Any:
        if not self._pending:
            raise StopIteration
        batch, error = self._thread.results.get()
        indices, first, count, sampler_state = self._pending.pop(0)
        self.position.take(indices, count, first)
        self._fill()
        self._yielded += 1
        if error is not None:
            raise error
        self._sampler_state = sampler_state
        self.position.advance(indices, count, self._yielded, first)
        return batch

    def _record(self) -> BatchRecord:
        return self._source.record(self.position)

    def sampler_state(self) -> dict[str, Any] | None:
        return self._sampler_state

    def close(self) -> None:
        self.closed = self.closed or not self.finished
        self._thread.stop()
        self._thread.join()  # the caller may change the dataset next

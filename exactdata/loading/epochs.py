"""Iterating over one epoch: what every way of fetching shares.

`in_process`, `prefetch` and `worker_epochs` fetch in this process, in a thread and in worker processes. Each keeps an
`EpochPosition`, which counts the batches that were yielded, not those that were prefetched.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from exactdata.loading.fetch import Indices
from exactdata.loading.index_stream import ChangingIndices, IndexStream, as_array
from exactdata.loading.loader_state import DatasetStates
from exactdata.loading.protocols import BatchRecord
from exactdata.loading.randomness import Keys, keys_from_indices


@dataclass
class EpochPosition:
    """How much of an epoch was yielded, counted from its start.

    `base` is the number of samples at which this iteration began; a sampler by position counts from there.
    """

    epoch: int = 0
    batches: int = 0
    samples: int = 0
    base: int = 0
    indices: Indices | None = None  # of the last batch yielded
    first: int = 0  # samples before the last batch yielded
    has_yielded: bool = False  # since the iteration began
    reached: int = 0  # samples before the first one that no batch taken so far holds

    def take(self, indices: Indices, count: int, first: int) -> None:
        """Note that a batch was taken, whether it can be yielded or its dataset raised an error."""
        self.indices, self.first = indices, first
        self.reached = max(self.reached, first + count)

    def reached_from_base(self) -> int:
        """Samples of this iteration that were taken."""
        return self.reached - self.base

    def advance(self, indices: Indices, count: int, batches: int, first: int) -> None:
        """Count a batch of `count` samples, which follows the first `first` samples of the epoch."""
        self.take(indices, count, first)
        self.has_yielded = True
        self.batches = batches
        self.samples = first + count

    def advance_unordered(self, indices: Indices, count: int, first: int) -> None:
        """Count a batch that was yielded before or after its turn: only how many were yielded is then known."""
        self.take(indices, count, first)
        self.has_yielded = True
        self.batches += 1
        self.samples += count


@dataclass
class IndexSource:
    """The indices of an epoch of a map-style dataset, with the samples' keys and the batches' records."""

    stream: IndexStream
    indices: Iterator[Indices]
    seed: int
    position: EpochPosition

    def __post_init__(self) -> None:
        self._changing = self.indices if isinstance(self.indices, ChangingIndices) else None
        self._version = 0
        if self._changing is not None:
            self._changing.follow(self.position.reached_from_base)
            self._version = self._changing.version

    def rewind_if_changed(self) -> bool:
        """If the order has changed, go back to the first sample that no batch taken so far holds.

        Returns:
            Whether it has: what was drawn ahead must be discarded.
        """
        if self._changing is None or self._changing.version == self._version:
            return False
        self._version = self._changing.version
        self._changing.seek(self.position.reached_from_base())
        return True

    def keys(self, indices: Indices, first: int, count: int) -> Keys:
        """Keys for `sample_rng`: from the sampler if it has any, else a hash of the epoch's seed and the index."""
        sampler = self.stream.sampler
        if hasattr(sampler, "sample_keys"):
            return sampler.sample_keys(first, count)  # type: ignore[no-any-return]
        return keys_from_indices(self.seed, [indices] if self.stream.one_by_one else indices)

    def record(self, position: EpochPosition) -> BatchRecord:
        """The record of the last batch yielded."""
        indices, positions = as_array(position.indices), None
        sampler = self.stream.sampler
        if indices is not None and hasattr(sampler, "positions"):
            positions = np.asarray(sampler.positions(position.first - position.base, len(indices)))
        return BatchRecord(indices, positions, position.epoch)


class Epoch(Iterator[Any]):
    """The batches of one epoch.

    Args:
        position: where it begins; advanced with every batch.
        on_end: called once, when the epoch has been iterated to its end.
        transform: applied to every batch.
        on_batch: called after every batch with the number of samples so far.
    """

    def __init__(
        self,
        position: EpochPosition,
        on_end: Callable[[Epoch], None],
        transform: Callable[[Any], Any] | None,
        on_batch: Callable[[int], None] | None = None,
    ) -> None:
        # Weak, since the loader refers to its epoch: a cycle would keep both, and their workers, alive.
        self._on_end = weakref.WeakMethod(on_end)
        self._on_batch = None if on_batch is None else weakref.WeakMethod(on_batch)
        self.position = position
        self.finished = False
        self.closed = False
        self.successor: Epoch | None = None  # the epoch that took over the persistent workers
        self._transform = transform

    def __iter__(self) -> Epoch:
        return self

    def __next__(self) -> Any:
        if self.finished or self.closed:
            if not self.finished and self.successor is not None:
                return next(self.successor)
            raise StopIteration
        self._follow_changes()
        try:
            batch = self._next()
        except StopIteration:
            self.finished = True
            if (on_end := self._on_end()) is not None:
                on_end(self)
            raise
        if self._on_batch is not None and (on_batch := self._on_batch()) is not None:
            on_batch(self.position.samples)
        return batch if self._transform is None else self._transform(batch)

    def _next(self) -> Any:
        raise NotImplementedError

    def _follow_changes(self) -> None:
        """Discard what was fetched ahead if the order has changed since."""

    def recorded(self) -> Iterator[tuple[Any, BatchRecord]]:
        """The same batches, each with its record."""
        return map(self._with_record, self)

    def _with_record(self, batch: Any) -> tuple[Any, BatchRecord]:
        epoch = self
        while epoch.closed and not epoch.finished and epoch.successor is not None:
            epoch = epoch.successor
        return batch, epoch._record()

    def _record(self) -> BatchRecord:
        return BatchRecord(None, None, self.position.epoch)

    def sampler_state(self) -> dict[str, Any] | None:
        """A plain sampler's own state."""
        return None

    def dataset_states(self) -> DatasetStates | None:
        """The states of the dataset, one per worker."""
        return None

    def next_worker(self) -> int:
        """The worker that fetches the next batch."""
        return 0

    def close(self) -> None:
        """Stop prefetching."""

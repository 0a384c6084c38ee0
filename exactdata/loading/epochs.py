"""Iterate over one epoch. Base class of all ways to fetch batches."""

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
    """The part of an epoch that was yielded, counted from the start of the epoch.

    `base` is the number of samples before this iteration. Samplers with `state_dict_at` count from there.
    """

    epoch: int = 0
    batches: int = 0
    samples: int = 0
    base: int = 0
    indices: Indices | None = None  # indices of the last batch yielded
    first: int = 0  # number of samples before the last batch yielded
    has_yielded: bool = False  # whether a batch was yielded since the iteration started
    reached: int = 0  # number of samples before the first one not yet in any batch taken

    def take(self, indices: Indices, count: int, first: int) -> None:
        """Record that a batch was taken. It may then be yielded, or its dataset may raise an error."""
        self.indices, self.first = indices, first
        self.reached = max(self.reached, first + count)

    def reached_from_base(self) -> int:
        """Return the number of samples taken in this iteration."""
        return self.reached - self.base

    def advance(self, indices: Indices, count: int, batches: int, first: int) -> None:
        """Record that a batch of `count` samples was yielded, after the first `first` samples of the epoch."""
        self.take(indices, count, first)
        self.has_yielded = True
        self.batches = batches
        self.samples = first + count

    def advance_unordered(self, indices: Indices, count: int, first: int) -> None:
        """Record a batch yielded out of order. Only the number of samples is then known, not their position."""
        self.take(indices, count, first)
        self.has_yielded = True
        self.batches += 1
        self.samples += count


@dataclass
class IndexSource:
    """The indices of an epoch of a map-style dataset, with keys for the samples and records for the batches."""

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
        """If the order has changed, rewind to the first sample that is not yet in any batch taken.

        Returns:
            Whether the order has changed. Prefetched batches must then be discarded.
        """
        if self._changing is None or self._changing.version == self._version:
            return False
        self._version = self._changing.version
        self._changing.seek(self.position.reached_from_base())
        return True

    def keys(self, indices: Indices, first: int, count: int) -> Keys:
        """Return keys for `sample_rng`, from the sampler or else by hashing the epoch's seed and the index."""
        sampler = self.stream.sampler
        if hasattr(sampler, "sample_keys"):
            return sampler.sample_keys(first, count)  # type: ignore[no-any-return]
        return keys_from_indices(self.seed, [indices] if self.stream.one_by_one else indices)

    def record(self, position: EpochPosition) -> BatchRecord:
        """Return the record of the last batch yielded."""
        indices, positions = as_array(position.indices), None
        sampler = self.stream.sampler
        if indices is not None and hasattr(sampler, "positions"):
            positions = np.asarray(sampler.positions(position.first - position.base, len(indices)))
        return BatchRecord(indices, positions, position.epoch)


class Epoch(Iterator[Any]):
    """Iterate over the batches of one epoch.

    Args:
        position: position from which to iterate. It advances with every batch.
        on_end: called once, after the last batch.
        transform: function applied to every batch.
        on_batch: called after every batch with the number of samples yielded so far.
    """

    def __init__(
        self,
        position: EpochPosition,
        on_end: Callable[[Epoch], None],
        transform: Callable[[Any], Any] | None,
        on_batch: Callable[[int], None] | None = None,
    ) -> None:
        # Use weak references, because the loader refers to its epoch. A cycle would keep the loader, the epoch and its
        # workers alive.
        self._on_end = weakref.WeakMethod(on_end)
        self._on_batch = None if on_batch is None else weakref.WeakMethod(on_batch)
        self.position = position
        self.finished = False
        self.closed = False
        self.successor: Epoch | None = None  # the epoch that now uses the persistent workers
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
        """Discard prefetched batches if the order has changed since they were drawn."""

    def recorded(self) -> Iterator[tuple[Any, BatchRecord]]:
        """Iterate over the batches, and yield each with its record."""
        return map(self._with_record, self)

    def _with_record(self, batch: Any) -> tuple[Any, BatchRecord]:
        epoch = self
        while epoch.closed and not epoch.finished and epoch.successor is not None:
            epoch = epoch.successor
        return batch, epoch._record()

    def _record(self) -> BatchRecord:
        return BatchRecord(None, None, self.position.epoch)

    def sampler_state(self) -> dict[str, Any] | None:
        """Return the state of a sampler without `state_dict_at` and `set_skip`."""
        return None

    def dataset_states(self) -> DatasetStates | None:
        """Return the states of the dataset, one per worker."""
        return None

    def next_worker(self) -> int:
        """Return the number of the worker process that fetches the next batch."""
        return 0

    def close(self) -> None:
        """Stop prefetching."""

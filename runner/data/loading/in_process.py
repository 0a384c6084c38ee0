"""Fetching each batch in this process when it is asked for."""

from __future__ import annotations

import copy
from typing import Any

from runner.data.loading.epochs import Epoch, EpochPosition, IndexSource
from runner.data.loading.fetch import MapFetcher, StreamFetcher, is_stateful
from runner.data.loading.loader_state import DatasetStates
from runner.data.loading.protocols import BatchRecord


class MapEpoch(Epoch):
    """An epoch of a map-style dataset, in this process."""

    def __init__(self, source: IndexSource, fetcher: MapFetcher, position: EpochPosition, *rest: Any) -> None:
        super().__init__(position, *rest)
        self._source = source
        self._fetcher = fetcher
        self._drawn_batches = position.batches
        self._drawn = position.samples
        self._one_by_one = source.stream.one_by_one

    def _next(self) -> Any:
        source = self._source
        indices = next(source.indices)
        count = 1 if self._one_by_one else len(indices)
        first = self._drawn
        self._drawn = first + count
        self._drawn_batches += 1
        base = self.position.base
        batch = self._fetcher.fetch(indices, lambda: source.keys(indices, first - base, count))
        self.position.advance(indices, count, self._drawn_batches, first)
        return batch

    def _record(self) -> BatchRecord:
        return self._source.record(self.position)

    def sampler_state(self) -> dict[str, Any] | None:
        return self._source.stream.state()

    def dataset_states(self) -> DatasetStates | None:
        dataset = self._fetcher.dataset
        if self._fetcher.collated or not is_stateful(dataset):
            return None
        return [{"dataset": copy.deepcopy(dataset.state_dict()), "boundary": self.finished}]


class StreamEpoch(Epoch):
    """An epoch of an iterable-style dataset, in this process."""

    def __init__(self, fetcher: StreamFetcher, position: EpochPosition, *rest: Any) -> None:
        super().__init__(position, *rest)
        self._fetcher = fetcher

    def _next(self) -> Any:
        first = self.position.samples
        batch, count = self._fetcher.fetch()
        self.position.advance(None, count, self.position.batches + 1, first)
        return batch

    @property
    def exhausted(self) -> bool:
        """Whether the dataset has ended at least once in this process."""
        return self._fetcher.exhausted

    def dataset_states(self) -> DatasetStates | None:
        if self.finished:
            return [copy.deepcopy(self._fetcher.boundary_state())]
        return [copy.deepcopy(self._fetcher.state())]

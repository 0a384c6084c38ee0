"""Fetch each batch in the main process when it is requested."""

from __future__ import annotations

import copy
from typing import Any

from exactdata.loading import global_draws
from exactdata.loading.epochs import Epoch, EpochPosition, IndexSource
from exactdata.loading.fetch import MapFetcher, is_stateful
from exactdata.loading.loader_state import DatasetStates
from exactdata.loading.protocols import BatchRecord
from exactdata.loading.stream_fetch import StreamFetcher


class MapEpoch(Epoch):
    """Iterate over an epoch of a map-style dataset in the main process."""

    def __init__(self, source: IndexSource, fetcher: MapFetcher, position: EpochPosition, *rest: Any) -> None:
        super().__init__(position, *rest)
        self._source = source
        self._fetcher = fetcher
        self._drawn_batches = position.batches
        self._drawn = position.samples
        self._one_by_one = source.stream.one_by_one
        self._has_states = source.stream.is_stateful or (not fetcher.collated and is_stateful(fetcher.dataset))
        self._before_error: tuple[dict[str, Any] | None, DatasetStates | None] | None = None

    def _next(self) -> Any:
        before = (self.sampler_state(), self.dataset_states()) if self._has_states else None
        try:
            batch = self._fetch_next()
        except StopIteration:
            raise
        except BaseException:  # includes KeyboardInterrupt
            self._before_error = before
            raise
        self._before_error = None
        if self._fetcher.draws:
            global_draws.warn(self._fetcher.dataset, self._fetcher.draws, self._fetcher.consequence)
        return batch

    def _fetch_next(self) -> Any:
        source = self._source
        indices = next(source.indices)
        count = 1 if self._one_by_one else len(indices)
        first, base = self._drawn, self.position.base
        self._drawn += count
        self._drawn_batches += 1
        self.position.take(indices, count, first)
        batch = self._fetcher.fetch(indices, lambda: source.keys(indices, first - base, count))
        self.position.advance(indices, count, self._drawn_batches, first)
        return batch

    def _record(self) -> BatchRecord:
        return self._source.record(self.position)

    def sampler_state(self) -> dict[str, Any] | None:
        return self._source.stream.state() if self._before_error is None else self._before_error[0]

    def dataset_states(self) -> DatasetStates | None:
        dataset = self._fetcher.dataset
        if self._before_error is not None:
            return self._before_error[1]
        if self._fetcher.collated or not is_stateful(dataset):
            return None
        return [{"dataset": copy.deepcopy(dataset.state_dict()), "boundary": self.finished}]


class StreamEpoch(Epoch):
    """Iterate over an epoch of an iterable-style dataset in the main process."""

    def __init__(self, fetcher: StreamFetcher, position: EpochPosition, *rest: Any) -> None:
        super().__init__(position, *rest)
        self._fetcher = fetcher
        self._watches = fetcher.watched  # True only until the first batch was fetched

    def _next(self) -> Any:
        first = self.position.samples
        fetcher = self._fetcher
        if self._watches:
            self._watches = False
            (batch, count), draws = global_draws.watched(fetcher.fetch)
            global_draws.warn(fetcher.dataset, draws, global_draws.OF_A_STREAM)
        else:
            batch, count = fetcher.fetch()
        self.position.advance(None, count, self.position.batches + 1, first)
        return batch

    @property
    def exhausted(self) -> bool:
        """Return whether the dataset has reached its end at least once in this process."""
        return self._fetcher.exhausted

    def dataset_states(self) -> DatasetStates | None:
        if self.finished:
            return [copy.deepcopy(self._fetcher.boundary_state())]
        return [copy.deepcopy(self._fetcher.state())]

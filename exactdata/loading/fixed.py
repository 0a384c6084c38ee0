"""Fetch the same batches at every iteration, in this process. Used for evaluations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from torch.utils.data import default_collate

from exactdata.loading import global_draws
from exactdata.loading.fetch import MapFetcher
from exactdata.loading.randomness import keys_from_indices


class FixedBatches:
    """Iterate over fixed batches of a map-style dataset. Random draws depend only on the seed and the sample's index.

    Args:
        dataset: the map-style dataset.
        batches: the indices of each batch.
        collate_fn: as in torch's DataLoader.
        seed: seed of `sample_rng()`, and of the global generators while a sample is fetched.
    """

    def __init__(
        self, dataset: Any, batches: Iterable[list[int]], collate_fn: Callable[[Any], Any] | None, seed: int
    ) -> None:
        self.dataset = dataset
        self.batches = batches
        self.collate_fn = collate_fn
        self.seed = seed

    def __iter__(self) -> Iterator[Any]:
        own = self.collate_fn is not None
        fetcher = MapFetcher(self.dataset, self.collate_fn or default_collate, True, own, seeded=True)
        for indices in self.batches:
            yield fetcher.fetch(indices, partial(keys_from_indices, self.seed, indices))
            global_draws.warn(self.dataset, fetcher.draws, fetcher.consequence)

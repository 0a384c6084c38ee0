"""Define the kinds of sampler: what a program needs to know of a sampler whose kind is a setting.

A new kind that draws whole epochs is a class here, named at the end, and a file in `conf/sampler/` that has this name
as its `kind`. Imports neither torch nor numpy: a sampler is imported when it is created.
"""

from __future__ import annotations

from enum import Enum
from fractions import Fraction
from importlib import import_module
from typing import Any, Protocol


class Kind(Protocol):
    """A kind of sampler.

    Attributes:
        elastic: the order is a function of the position, not of ranks and batches; samples may be excluded, and
            sources capped.
        mixes: weights and temperatures, also those of phases, affect the order.
        several: it takes several sources.
        is_own: the user's class, which `sampler._target_` names. It may use any setting.
        sampler: dotted name of the class, for a kind that draws whole epochs. Its `of_sources` creates a sampler from
            samples by source, their weights and a temperature.
    """

    elastic: bool = False
    mixes: bool = True
    several: bool = True
    is_own: bool = False
    sampler: str = ""

    def samples_of(self, epochs: Fraction, total: int, world_size: int, batch_size: int, drop_last: bool) -> int:
        """Return the number of samples over all ranks in `epochs` epochs.

        Args:
            epochs: number of epochs.
            total: samples of all sources.
            world_size: number of ranks.
            batch_size: samples per micro-batch of one rank.
            drop_last: as the sampler's argument.
        """
        return int(epochs * total)

    def drawn_sizes(self, sizes: dict[str, int]) -> list[int]:
        """Return the sizes of the parts that are dealt out to the ranks separately in each epoch."""
        return list(sizes.values())

    def make(self, sizes: dict[str, int], weights: list[float], temperature: float, **common: Any) -> Any:
        """Create the sampler of a rank, for a kind that draws whole epochs.

        Args:
            sizes: samples by source.
            weights: one per source.
            temperature: temperature of the mixture.
            common: num_replicas, rank, shuffle, seed and drop_last.
        """
        module, _, name = self.sampler.rpartition(".")
        return getattr(import_module(module), name).of_sources(sizes, weights, temperature, **common)


class Distributed(Kind):
    mixes = several = False
    sampler = "exactdata.sampler.DistributedSampler"

    def samples_of(self, epochs: Fraction, total: int, world_size: int, batch_size: int, drop_last: bool) -> int:
        rank = total // world_size if drop_last else -(-total // world_size)
        batches = rank // batch_size  # per epoch: the loader drops an incomplete batch
        return int(epochs * batches) * batch_size * world_size

    def drawn_sizes(self, sizes: dict[str, int]) -> list[int]:
        return [sum(sizes.values())]


class Mixture(Kind):
    sampler = "exactdata.sampler.MixtureSampler"


class Elastic(Kind):
    elastic = True


class Own(Kind):
    mixes = False
    is_own = True


class SamplerKind(Enum):
    """The kinds by name: the values of `sampler.kind`."""

    distributed = Distributed()
    mixture = Mixture()
    elastic = Elastic()
    own = Own()

"""Define the kinds of sampler that a setting can select, with the properties that a program needs to know.

To add a kind that draws complete epochs, define a class here, name it in `SamplerKind`, and add a file to
`conf/sampler/` with that name as its `kind`. This module imports neither torch nor numpy. A sampler class is imported
when a sampler is created.
"""

from __future__ import annotations

from enum import Enum
from fractions import Fraction
from importlib import import_module
from typing import Any, Protocol


class Kind(Protocol):
    """Properties of a kind of sampler.

    Attributes:
        elastic: whether the order depends only on the position, not on ranks and batches. Samples can then be excluded,
            and sources capped.
        mixes: whether weights and temperatures, including those of phases, affect the order.
        several: whether the sampler accepts several sources.
        is_own: whether the sampler is a user's class, named by `sampler._target_`. It may use any setting.
        sampler: dotted name of the class, for a kind that draws complete epochs. Its `of_sources` creates a sampler
            from the sizes of the sources, their weights and a temperature.
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
            total: number of samples in all sources.
            world_size: number of ranks.
            batch_size: samples per micro-batch of one rank.
            drop_last: as for the sampler.
        """
        return int(epochs * total)

    def drawn_sizes(self, sizes: dict[str, int]) -> list[int]:
        """Return the sizes of the parts that are split over the ranks separately in each epoch."""
        return list(sizes.values())

    def make(self, sizes: dict[str, int], weights: list[float], temperature: float, **common: Any) -> Any:
        """Create the sampler of a rank, for a kind that draws complete epochs.

        Args:
            sizes: number of samples by source.
            weights: one weight per source.
            temperature: temperature of the mixture.
            common: the arguments num_replicas, rank, shuffle, seed and drop_last.
        """
        module, _, name = self.sampler.rpartition(".")
        return getattr(import_module(module), name).of_sources(sizes, weights, temperature, **common)


class Distributed(Kind):
    mixes = several = False
    sampler = "exactdata.sampler.DistributedSampler"

    def samples_of(self, epochs: Fraction, total: int, world_size: int, batch_size: int, drop_last: bool) -> int:
        rank = total // world_size if drop_last else -(-total // world_size)
        batches = rank // batch_size  # per epoch; the loader drops an incomplete batch
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
    """The kinds of sampler by name. The names are the values of `sampler.kind`."""

    distributed = Distributed()
    mixture = Mixture()
    elastic = Elastic()
    own = Own()

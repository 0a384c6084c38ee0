"""The kinds of sampler: what a program asks of one whose kind is a setting.

A new kind that draws whole epochs is a class here, named at the end, and a file in `conf/sampler/` that has this name
as its `kind`. Imports neither torch nor numpy: a sampler is imported when it is made.
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
        mixes: weights and temperatures concern it, those of phases, too.
        several: it takes several sources.
        is_own: the user's class, which `sampler._target_` names; it may make use of any setting.
        sampler: of one that draws whole epochs, the dotted name of its class, whose `of_sources` makes it from samples
            by source, their weights and a temperature.
    """

    elastic: bool = False
    mixes: bool = True
    several: bool = True
    is_own: bool = False
    sampler: str = ""

    def samples_of(self, epochs: Fraction, total: int, world_size: int, batch_size: int, drop_last: bool) -> int:
        """The samples over all ranks that so many epochs have.

        Args:
            total: samples of all sources.
            batch_size: samples per micro-batch of one rank.
        """
        return int(epochs * total)

    def drawn_sizes(self, sizes: dict[str, int]) -> list[int]:
        """The sizes of what is dealt out to the ranks by itself in each epoch."""
        return list(sizes.values())

    def make(self, sizes: dict[str, int], weights: list[float], temperature: float, **common: Any) -> Any:
        """The sampler of a rank, of a kind that draws whole epochs.

        Args:
            sizes: samples by source.
            weights: one per source.
            common: num_replicas, rank, shuffle, seed and drop_last.
        """
        module, _, name = self.sampler.rpartition(".")
        return getattr(import_module(module), name).of_sources(sizes, weights, temperature, **common)


class Distributed(Kind):
    mixes = several = False
    sampler = "exactdata.sampler.DistributedSampler"

    def samples_of(self, epochs: Fraction, total: int, world_size: int, batch_size: int, drop_last: bool) -> int:
        rank = total // world_size if drop_last else -(-total // world_size)
        batches = rank // batch_size  # those that the loader yields in an epoch: an incomplete one is dropped
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
    """The kinds by name: what `sampler.kind` may be."""

    distributed = Distributed()
    mixture = Mixture()
    elastic = Elastic()
    own = Own()

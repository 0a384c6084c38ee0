"""Select the held-out samples of an evaluation, split them into batches, and assign the batches to ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, count, islice
from typing import Any

from torch.utils.data import IterableDataset

from exactdata.datasets import collate as default_collate
from exactdata.loading.fixed import FixedBatches
from exactdata.loading.protocols import Acting
from runner.config.schema import Config, EvalSetConfig
from runner.errors import UserError
from runner.system.distributed import World
from runner.training.data.epoch_steps import EpochSteps
from runner.training.data.sources import join_sources, make_collate, open_sources
from runner.training.model import build
from runner.training.step.tasks import Batch

Turn = tuple[int | None, Batch]
"""The number of a batch within its source, and the batch. The number is None if this rank computes the batch only
because the other ranks need it to take part in the forward pass."""


@dataclass(frozen=True)
class HeldOut:
    """A source's samples for an evaluation, split into batches and over ranks.

    Attributes:
        samples: number of samples in the source, at least 1.
        batch_size: samples per batch. The last batch may have fewer.
        limit: maximum number of batches.
        first: first index of the source in the concatenation of all sources.
    """

    samples: int
    batch_size: int
    limit: int
    first: int = 0

    @property
    def batches(self) -> int:
        return min(-(-self.samples // self.batch_size), self.limit)

    def indices(self, batch: int) -> list[int]:
        """Return the dataset indices of the samples in a batch."""
        start = batch * self.batch_size
        return [self.first + index for index in range(start, min(start + self.batch_size, self.samples))]

    def turns(self, world: World) -> range:
        """Return the numbers of the batches that this rank computes. Every rank has the same number of batches.

        With FSDP, all ranks take part in every forward pass. A rank whose last number is `batches` or more repeats one
        of the first batches, and the result is ignored.
        """
        return range(world.rank, -(-self.batches // world.size) * world.size, world.size)


@dataclass(frozen=True)
class RankBatches:
    """Iterate over the sample indices of this rank's batches, for a DataLoader."""

    held_out: HeldOut
    world: World

    def __iter__(self) -> Iterator[list[int]]:
        return (self.held_out.indices(turn % self.held_out.batches) for turn in self.held_out.turns(self.world))


@dataclass(frozen=True)
class MapSource:
    """A held-out source with a length. `batches` are ordered as in `held_out.turns` and can be iterated repeatedly."""

    held_out: HeldOut
    batches: Iterable[Batch]

    def turns(self, world: World) -> Iterator[Turn]:
        for number, batch in zip(self.held_out.turns(world), self.batches, strict=True):
            yield (number if number < self.held_out.batches else None), batch


@dataclass(frozen=True)
class StreamSource:
    """A held-out stream. Every rank reads all of it and computes its part. Each pass iterates `batches` again."""

    batches: Iterable[Batch]
    limit: int

    def turns(self, world: World) -> Iterator[Turn]:
        batches = islice(iter(self.batches), self.limit)
        first = 0
        while group := list(islice(batches, world.size)):
            mine = first + world.rank if world.rank < len(group) else None
            yield mine, group[world.rank if mine is not None else 0]
            first += len(group)


@dataclass(frozen=True)
class StreamBatches:
    """Iterate over an iterable dataset in batches, as a single shard. Each iteration starts from the beginning.

    Raises:
        UserError: the dataset is an iterator, which cannot be restarted.
    """

    dataset: Any
    batch_size: int
    collate: Callable[[Any], Any]
    seed: int = 0  # seeds the random numbers of the dataset

    def __iter__(self) -> Iterator[Batch]:
        build.seed_everything(self.seed)
        with Acting((0, 1), 0):
            items = iter(self.dataset)
        if items is self.dataset:
            raise UserError(
                f"{type(self.dataset).__name__} in data.eval_sources is its own iterator, but each evaluation starts "
                "again: write __iter__ as a generator, or return a new iterator"
            )
        for number in count(1):
            build.seed_everything(self.seed, number)  # code between two batches may draw random numbers
            with Acting((0, 1), 0):
                samples = list(islice(items, self.batch_size))
            if not samples:
                return
            yield self.collate(samples)


@dataclass(frozen=True)
class EvaluationSet:
    """Sources that are evaluated together, with results in total and for each source.

    Attributes:
        name: name of the set. Empty for the set of all sources.
        sources: sources by name.
        every_steps: evaluate at multiples of this step. If 0, the step does not trigger evaluations.
        completes_epoch: function that returns True for a step that completes the cadence's number of epochs.
        at_start: evaluate before the first step.
    """

    name: str
    sources: dict[str, MapSource | StreamSource]
    every_steps: int
    completes_epoch: Callable[[int], bool] = lambda step: False
    at_start: bool = False

    def due(self, step: int) -> bool:
        """Check whether the set is due after `step` completed steps."""
        if step == 0:
            return self.at_start
        return (self.every_steps > 0 and step % self.every_steps == 0) or self.completes_epoch(step)

    @property
    def prefix(self) -> str:
        return f"eval_{self.name}_" if self.name else "eval_"


def evaluation_sets(config: Config, world: World, epochs: EpochSteps | None = None) -> list[EvaluationSet]:
    """Open the set of all held-out sources and the sets in `eval.sets`. Sets that are never evaluated are omitted.

    Args:
        config: config of the run.
        world: the ranks.
        epochs: converts between steps and epochs of the training data. None if no set is due by epochs.

    Raises:
        UserError: a source cannot be read, or no source of a set has samples.
    """
    if not config.evaluates:
        return []
    make, usual = _Sources(config, world), config.evaluation_interval
    every, completes = config.eval.every_epochs, lambda step: False
    if epochs is not None and every is not None:
        completes = partial(epochs.completes, every)
    found = []
    for name, one in {"": EvalSetConfig(), **config.eval.sets}.items():
        inherits = one.every_steps is None
        interval = usual if one.every_steps is None else one.every_steps
        if interval or (inherits and every is not None):
            by_epochs = completes if inherits else lambda step: False
            found.append(EvaluationSet(name, make.of_set(one), interval, by_epochs, config.eval.at_start))
    return found


class _Sources:
    """Open the held-out sources once, for all sets."""

    def __init__(self, config: Config, world: World) -> None:
        self._config, self._world = config, world
        self._datasets = open_sources(config, "eval_sources", streams=True)
        self._collate = make_collate(config)
        mapped = {name: one for name, one in self._datasets.items() if not isinstance(one, IterableDataset)}
        sizes = [len(one) for one in mapped.values()]
        self._joined = join_sources(mapped, self._collate) if any(sizes) else None
        self._starts = dict(zip(mapped, accumulate(sizes, initial=0), strict=False))

    def of_set(self, options: EvalSetConfig) -> dict[str, MapSource | StreamSource]:
        batch_size = options.batch_size or self._config.eval.batch_size or self._config.train.batch_size
        limit = options.batches or self._config.eval.batches
        names = options.sources or list(self._datasets)
        found = {name: source for name in names if (source := self._source(name, batch_size, limit)) is not None}
        if not found:
            raise UserError(
                f"data.eval_sources ({', '.join(names)}) has 0 samples: an evaluation needs 1 or more; give it more "
                "data, or set eval.every_steps=0"
            )
        return found

    def _source(self, name: str, batch_size: int, limit: int) -> MapSource | StreamSource | None:
        dataset = self._datasets[name]
        if isinstance(dataset, IterableDataset):
            return StreamSource(
                StreamBatches(dataset, batch_size, self._collate or default_collate, self._config.seed), limit
            )
        if not len(dataset):
            return None
        held_out = HeldOut(len(dataset), batch_size, limit, self._starts[name])
        batches = RankBatches(held_out, self._world)
        return MapSource(held_out, FixedBatches(self._joined, batches, self._collate, self._config.seed))

"""Evaluation during training: the same samples each time, without touching random generators or data order.

A result depends on the weights, the held-out samples and `eval.batch_size`, and not on the ranks: a batch always holds
the same samples of one source, one rank computes it whole, and results are added in the order of the batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from runner.checkpoint import get_rng_state, set_rng_state
from runner.data.datasets import collate
from runner.data.loading.protocols import Acting
from runner.errors import UserError
from runner.system.distributed import World
from runner.training.eval_metrics import EvaluationMetric
from runner.training.step import Forward
from runner.training.tasks import FOR_METRICS, Batch, per_sample

Turn = tuple[int | None, Batch]
"""The number of a batch within its source, None where it is computed for the sake of the other ranks; and the batch."""


@dataclass(frozen=True)
class HeldOut:
    """Which samples of a source an evaluation takes, and which rank computes them.

    Attributes:
        samples: the size of the source, 1 or more.
        batch_size: samples per batch; the last batch may have fewer.
        limit: batches at most.
        first: where the source begins in the dataset that holds all of them.
    """

    samples: int
    batch_size: int
    limit: int
    first: int = 0

    @property
    def batches(self) -> int:
        return min(-(-self.samples // self.batch_size), self.limit)

    def indices(self, batch: int) -> list[int]:
        """The samples of a batch."""
        start = batch * self.batch_size
        return [self.first + index for index in range(start, min(start + self.batch_size, self.samples))]

    def turns(self, world: World) -> range:
        """The numbers of the batches that this rank passes through the model, one in each turn, as many on every rank.

        FSDP's ranks need each other in every forward pass. A rank whose number in the last turn is `batches` or more
        repeats one of the first batches, and the result does not count.
        """
        return range(world.rank, -(-self.batches // world.size) * world.size, world.size)


@dataclass(frozen=True)
class RankBatches:
    """The samples of this rank's turns, for a DataLoader."""

    held_out: HeldOut
    world: World

    def __iter__(self) -> Iterator[list[int]]:
        return (self.held_out.indices(turn % self.held_out.batches) for turn in self.held_out.turns(self.world))


@dataclass(frozen=True)
class MapSource:
    """A held-out source with a length. `loader` gives the batches of `held_out.turns`, iterated anew each time."""

    held_out: HeldOut
    loader: Iterable[Batch]

    def turns(self, world: World) -> Iterator[Turn]:
        for number, batch in zip(self.held_out.turns(world), self.loader, strict=True):
            yield (number if number < self.held_out.batches else None), batch


@dataclass(frozen=True)
class StreamSource:
    """A held-out stream: every rank reads all of it and computes its part. `batches` is iterated anew each time."""

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
    """An iterable dataset in batches, read as one shard from its start at each iteration.

    Raises:
        UserError: the dataset is its own iterator, which cannot start again.
    """

    dataset: Any
    batch_size: int

    def __iter__(self) -> Iterator[Batch]:
        with Acting((0, 1), 0):
            items = iter(self.dataset)
        if items is self.dataset:
            raise UserError(
                f"{type(self.dataset).__name__} in data.eval_sources is its own iterator, but each evaluation starts "
                "again: write __iter__ as a generator, or return a new iterator"
            )
        while True:
            with Acting((0, 1), 0):
                samples = list(islice(items, self.batch_size))
            if not samples:
                return
            yield collate(samples)


@dataclass(frozen=True)
class EvaluationSet:
    """Sources that are evaluated together, and each by itself, every `every_steps` steps.

    Attributes:
        name: of the set; empty for the one of all sources.
        sources: by name.
    """

    name: str
    sources: dict[str, MapSource | StreamSource]
    every_steps: int

    def due(self, step: int) -> bool:
        """Whether to evaluate after `step` complete steps."""
        return self.every_steps > 0 and step > 0 and step % self.every_steps == 0

    @property
    def prefix(self) -> str:
        return f"eval_{self.name}_" if self.name else "eval_"


@dataclass
class Evaluation:
    """All sets, and the metrics that are computed of each."""

    forward: Forward
    sets: Sequence[EvaluationSet]
    metrics: Sequence[EvaluationMetric] = ()

    def due(self, step: int) -> bool:
        """Whether to evaluate any set after `step` complete steps."""
        return any(each.due(step) for each in self.sets)

    def complete(self, step: int) -> bool:
        """Whether every set is evaluated after `step` complete steps."""
        return all(each.due(step) for each in self.sets)

    def run(self, step: int, stop: Callable[[], bool]) -> dict[str, Any] | None:
        """The results of the sets that are due, over all ranks: `eval_loss`, `eval_accuracy`, `eval_SET_loss`, ….

        Returns:
            None if `stop()`, agreed across ranks and asked before each turn, is true.

        Raises:
            UserError: the task or a metric does not fit; or a stream is empty.
        """
        results: dict[str, Any] = {}
        with self._undisturbed():
            for each in self.sets:
                if not each.due(step):
                    continue
                found = _Pass(self.forward, each, self.metrics).run(stop)
                if found is None:
                    return None
                results |= found
        return results

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """The model in evaluation mode, without gradients; random generators and the mode are put back."""
        rng = get_rng_state()
        self.forward.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.forward.model.train()
            set_rng_state(rng)


@dataclass
class _Pass:
    """One evaluation of one set."""

    forward: Forward
    of: EvaluationSet
    metrics: Sequence[EvaluationMetric]
    _sums: dict[str, dict[str, list[float]]] = field(default_factory=dict)  # by name and source: sum, samples

    def run(self, stop: Callable[[], bool]) -> dict[str, Any] | None:
        several = len(self.of.sources) > 1
        scopes = [None, *self.of.sources] if several else [None]
        accumulated = {metric.name: {scope: metric.fresh() for scope in scopes} for metric in self.metrics}
        for source, data in self.of.sources.items():
            parts: list[tuple[int, dict[str, list[float]]]] = []
            for number, batch in data.turns(self.forward.world):
                if stop():
                    return None
                outputs = self.forward.evaluate(batch)
                values = self._values(outputs, batch)
                if number is not None:
                    parts.append(
                        (number, {name: [part.double().sum().item(), len(part)] for name, part in values.items()})
                    )
                for metric in self.metrics:
                    if not metric.is_per_sample:
                        into = [accumulated[metric.name][scope] for scope in ([None, source] if several else [None])]
                        metric.update(into, None if number is None else (outputs, batch), self.forward)
            self._add(source, parts)
        return self._results(accumulated)

    def _values(self, outputs: Any, batch: Batch) -> dict[str, torch.Tensor]:
        values = per_sample(self.forward.task.name, outputs, None)
        for metric in self.metrics:
            if metric.is_per_sample:
                values[metric.name] = metric.values(
                    outputs, batch, self.forward.model, len(values["loss"]), self.forward.device
                )
        return values

    def _add(self, source: str, parts: list[tuple[int, dict[str, list[float]]]]) -> None:
        """Add the sums of a source's batches, in their order, whichever rank computed them."""
        everywhere = sorted(
            (part for rank in self.forward.world.gather(parts) for part in rank), key=lambda part: part[0]
        )
        for _, sums in everywhere:
            for name, (total, samples) in sums.items():
                into = self._sums.setdefault(name, {}).setdefault(source, [0.0, 0])
                into[0] += total
                into[1] += samples

    def _results(self, accumulated: dict[str, dict[str | None, Any]]) -> dict[str, Any]:
        results: dict[str, Any] = {}
        if not self._sums:
            raise UserError(f"data.eval_sources ({', '.join(self.of.sources)}) gave no samples: check the stream")
        for name, by_source in self._sums.items():
            sums = list(by_source.values())
            results[name] = sum(total for total, _ in sums) / sum(samples for _, samples in sums)
            if len(self.of.sources) > 1:
                results[f"{name}_by_source"] = {
                    source: total / samples for source, (total, samples) in by_source.items()
                }
        for metric in self.metrics:
            if not metric.is_per_sample:
                results |= metric.results(accumulated[metric.name], self.forward.world)
        return {self.of.prefix + name: value for name, value in results.items() if name not in FOR_METRICS}

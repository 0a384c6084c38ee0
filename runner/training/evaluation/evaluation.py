"""Evaluate the same samples each time, without affecting random generators or the data order.

A result depends on the weights, the held-out samples and `eval.batch_size`, but not on the number of ranks. Each batch
always has the same samples from one source. A single rank computes it, and results are added in batch order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch

from exactdata import generators
from runner.checkpoint.files.manifest import BEST_METRIC
from runner.config.schema import Config
from runner.errors import UserError, nearest
from runner.training.data.epoch_steps import EpochSteps
from runner.training.evaluation.held_out import EvaluationSet, evaluation_sets
from runner.training.evaluation.metrics import EvaluationMetric, build_metrics
from runner.training.model import build
from runner.training.model.average import Average
from runner.training.step.step import Forward
from runner.training.step.tasks import FOR_METRICS, Batch, check_weights, per_sample


@dataclass
class Evaluation:
    """Evaluate the held-out sets of a run and compute their metrics."""

    forward: Forward
    sets: Sequence[EvaluationSet]
    metrics: Sequence[EvaluationMetric] = ()
    seed: int = 0  # seeds the random numbers of the task and the metrics
    best_metric: str = BEST_METRIC  # the result that ranks checkpoints
    needs_best: bool = False  # evaluations must compute `best_metric`
    at_end: bool = False  # evaluate the last step even if no evaluation is due

    @staticmethod
    def open(config: Config, forward: Forward, average: Average | None, epochs: EpochSteps) -> Evaluation | None:
        """Open the config's held-out data, or return None if there are none. Averaged weights take precedence.

        Args:
            config: config of the run.
            forward: the model and the task's computation.
            average: averaged weights, which are evaluated instead of the model's weights, or None.
            epochs: converts between steps and epochs of the training data.

        Raises:
            UserError: the data, the task or a metric cannot be used.
        """
        build.seed_everything(config.seed)  # held-out data and metrics may draw random numbers when created
        if average is not None:
            forward = replace(forward, model=average.module)
        sets = evaluation_sets(config, forward.world, epochs)
        if sets:
            forward.task.check_evaluation()
        metrics = build_metrics(config, forward.device)
        best, needs_best = config.checkpoint.best.metric, config.checkpoint.keep_best > 0
        at_end = config.eval.at_end and config.evaluates_every_set
        return Evaluation(forward, sets, metrics, config.seed, best, needs_best, at_end) if sets else None

    def due(self, step: int) -> bool:
        """Check whether any set is due after `step` completed steps."""
        return any(each.due(step) for each in self.sets)

    def complete(self, step: int) -> bool:
        """Check whether every set is due after `step` completed steps."""
        return all(each.due(step) for each in self.sets)

    def run(
        self, step: int, stop: Callable[[], bool], every_set: bool = False, turns: int | None = None
    ) -> dict[str, Any] | None:
        """Evaluate the due sets. Return the results over all ranks: `eval_loss`, `eval_accuracy`, `eval_SET_loss`, ….

        Args:
            step: number of completed steps.
            stop: function that returns True to abort, the same on every rank. Called before each batch.
            every_set: also evaluate sets that are not due.
            turns: number of batches that each rank computes for each source, or None for all.

        Returns:
            The results by name, or None if `stop()` returned True.

        Raises:
            UserError: the task or a metric cannot be used, or a stream is empty.
        """
        results: dict[str, Any] = {}
        with self._undisturbed():
            for each in self.sets:
                if not (every_set or each.due(step)):
                    continue
                found = _Pass(self.forward, each, self.metrics, self.seed, turns).run(stop)
                if found is None:
                    return None
                if twice := sorted(results.keys() & found.keys()):
                    raise UserError(
                        f"two results of the evaluation are called {twice[0]}: rename eval.sets.{each.name}"
                    )
                results |= found
        return results

    def judge(self, step: int, results: dict[str, Any]) -> float | None:
        """Return the metric that ranks the checkpoint of `step`, or None if it is not in `results`.

        Raises:
            UserError: the metric is not in `results`, although the best checkpoints are kept and every set was
                evaluated.
        """
        if self.needs_best and self.complete(step):
            check_name("checkpoint.best.metric", self.best_metric, results)
        number = results.get(self.best_metric)
        return number if isinstance(number, float) else None

    def check_names(self, judged: Mapping[str, str | None]) -> None:
        """Evaluate one batch of each source and check that the results have the named metrics.

        This reports a wrong name before training, not hours later. A compiled model is not checked, because the shapes
        of the first inputs may affect how it is compiled.

        Args:
            judged: maps a setting to the name of the result that it requires, or None.

        Raises:
            UserError: there is no such result, or the task or a metric cannot be used.
        """
        named = {key: name for key, name in judged.items() if name not in (None, "eval_loss")}
        if named and not hasattr(self.forward.model, "_orig_mod"):
            results = self.run(0, lambda: False, every_set=True, turns=1)
            for key, name in named.items():
                check_name(key, str(name), results or {})

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Set the model to evaluation mode and disable gradients. Restore the mode and the generators afterwards."""
        self.forward.model.eval()
        try:
            with generators.lent(), torch.no_grad():
                yield
        finally:
            self.forward.model.train()


def check_name(key: str, name: str, results: Mapping[str, Any]) -> None:
    """Check that evaluations compute the result that a setting names, as a number.

    Raises:
        UserError: there is no such result.
    """
    numbers = [each for each, value in results.items() if isinstance(value, int | float)]
    if name not in numbers:
        error = UserError(
            f"{key}={name}{nearest(name, numbers)} is not a number that an evaluation gives: choose one of "
            f"{', '.join(each for each in numbers if each != 'step')}"
        )
        error.everywhere = True  # the results are the same on every rank
        raise error


@dataclass
class _Pass:
    """A single evaluation of a single set."""

    forward: Forward
    of: EvaluationSet
    metrics: Sequence[EvaluationMetric]
    seed: int
    turns: int | None
    _sums: dict[str, dict[str, list[float]]] = field(default_factory=dict)  # [sum, weight] by name and source

    def run(self, stop: Callable[[], bool]) -> dict[str, Any] | None:
        several = len(self.of.sources) > 1
        scopes = [None, *self.of.sources] if several else [None]
        accumulated = {metric.name: {scope: metric.fresh() for scope in scopes} for metric in self.metrics}
        for place, (source, data) in enumerate(self.of.sources.items()):
            parts: list[tuple[int, dict[str, list[float]]]] = []
            for number, batch in islice(data.turns(self.forward.world), self.turns):
                if stop():
                    return None
                build.seed_everything(self.seed, place, number or 0)  # the same random numbers on any rank
                outputs = self.forward.evaluate(batch)
                sums = self._sums_of(outputs, batch)
                if number is not None:
                    parts.append((number, sums))
                for metric in self.metrics:
                    if not metric.is_per_sample:
                        into = [accumulated[metric.name][scope] for scope in ([None, source] if several else [None])]
                        metric.update(into, None if number is None else (outputs, batch), self.forward)
            self._add(source, parts)
        return self._results(accumulated)

    def _sums_of(self, outputs: Any, batch: Batch) -> dict[str, list[float]]:
        """Sum the weighted values of a batch and their weights, by name. Values of a metric function have weight 1."""
        given = per_sample(self.forward.task.name, outputs, None)
        samples = len(given.values["loss"])
        weight = torch.ones(samples).double() if given.weight is None else given.weight.double().cpu()
        check_weights(self.forward.task.name, weight.numpy())
        everything = weight.sum().item()
        sums = {
            name: [(value.double().cpu() * weight).sum().item(), everything] for name, value in given.values.items()
        }
        for metric in self.metrics:
            if metric.is_per_sample:
                found = metric.values(outputs, batch, self.forward.model, samples, self.forward.device)
                sums[metric.name] = [found.double().sum().item(), samples]
        return sums

    def _add(self, source: str, parts: list[tuple[int, dict[str, list[float]]]]) -> None:
        """Add the sums of a source's batches from all ranks, in batch order."""
        everywhere = sorted(
            (part for rank in self.forward.world.gather(parts) for part in rank), key=lambda part: part[0]
        )
        for _, sums in everywhere:
            for name, (total, weight) in sums.items():
                into = self._sums.setdefault(name, {}).setdefault(source, [0.0, 0])
                into[0] += total
                into[1] += weight

    def _results(self, accumulated: dict[str, dict[str | None, Any]]) -> dict[str, Any]:
        results: dict[str, Any] = {}
        if not self._sums:
            raise UserError(f"data.eval_sources ({', '.join(self.of.sources)}) gave no samples: check the stream")
        for name, by_source in self._sums.items():
            sums = list(by_source.values())
            everything = sum(weight for _, weight in sums)
            if not everything:
                raise UserError(
                    f"{self.forward.task.name}: the weights of all samples of data.eval_sources "
                    f"({', '.join(self.of.sources)}) sum to 0 (are all labels masked?): evaluate other data"
                )
            results[name] = sum(total for total, _ in sums) / everything
            if len(self.of.sources) > 1:
                results[f"{name}_by_source"] = {
                    source: total / weight for source, (total, weight) in by_source.items() if weight
                }
        for metric in self.metrics:
            if not metric.is_per_sample:
                results |= metric.results(accumulated[metric.name], self.forward.world)
        return {self.of.prefix + name: value for name, value in results.items() if name not in FOR_METRICS}

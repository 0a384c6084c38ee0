"""Compute metrics. A metric is an object with `update` and `compute`, as in torchmetrics, or a function of a batch.

The arguments of `update` are looked up by name in the output of the task's evaluation step, then in the batch. A metric
with a state is updated on rank 0 with every batch, in order. So its value does not depend on the number of ranks, even
if the metric cannot merge states.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from runner.config.schema import Config
from runner.config.targets import bind, instantiate, named
from runner.errors import UserError
from runner.system.distributed import World
from runner.training.step.step import Forward, to_device
from runner.training.step.tasks import Batch

VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def build_metrics(config: Config, device: torch.device) -> list[EvaluationMetric]:
    """Create the metrics in `eval.metrics`.

    Raises:
        UserError: a metric cannot be created, or is neither a metric nor a function.
    """
    return [
        _metric(name, node, device)
        for name, node in config.eval.metrics.items()
        if node is not None  # removed on the command line
    ]


def _metric(name: str, node: dict[str, Any], device: torch.device) -> EvaluationMetric:
    key = f"eval.metrics.{name}"
    takes = node.get("takes") or {}
    if not isinstance(takes, Mapping):
        raise UserError(f"{key}.takes={takes} must name an entry for each argument: {{value: loss}}")
    node = {option: value for option, value in node.items() if option != "takes"}
    where = f"{key} ({node['_target_']})"
    if not inspect.isclass(named(key, node)):
        made = bind(key, node)
        return EvaluationMetric(name, where, made, dict(takes), _arguments(where, made), True)
    metric = instantiate(key, node)
    if not all(callable(getattr(metric, method, None)) for method in ("update", "compute")):
        if isinstance(metric, nn.Module) or not callable(metric):
            raise UserError(f"{where} has no update(...) and compute(): it must have both, or be a function")
        return EvaluationMetric(name, where, metric, dict(takes), _arguments(where, metric), True)
    if isinstance(metric, nn.Module):
        metric.to(device)
        for module in metric.modules():
            if hasattr(module, "distributed_available_fn"):
                setattr(module, "distributed_available_fn", _not_available)  # noqa: B010 only rank 0 has a state
    return EvaluationMetric(name, where, metric, dict(takes), _arguments(where, metric.update), False)


def _not_available() -> bool:
    return False


def _arguments(where: str, function: Any) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(function).parameters)
    except (ValueError, TypeError):
        raise UserError(f"{where} does not say its arguments: wrap it in a function that names them") from None


@dataclass(frozen=True)
class EvaluationMetric:
    """A metric from the config, with the names of its arguments.

    Attributes:
        name: name in the config. The result is named `eval_NAME`.
        where: config key and target, for messages.
        made: the created metric object or function.
        takes: maps an argument to the entry that is passed to it, if the names differ.
        arguments: names of the arguments of `update` or of the function.
        is_per_sample: True for a function that returns one value per sample.
    """

    name: str
    where: str
    made: Any
    takes: dict[str, str]
    arguments: dict[str, inspect.Parameter]
    is_per_sample: bool

    def fresh(self) -> Any:
        """Return a copy of the metric without state, or None for a function."""
        return None if self.is_per_sample else copy.deepcopy(self.made)

    def values(self, outputs: Any, batch: Batch, model: nn.Module, samples: int, device: torch.device) -> torch.Tensor:
        """Return the metric function's values for a batch, shape (B,)."""
        batch = to_device(batch, device)
        more = {"model": model, "batch": batch, "outputs": outputs}
        found = self._call(self.made, self._chosen(outputs, batch, more))
        if not isinstance(found, torch.Tensor) or found.shape != (samples,):
            shape = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            raise UserError(f"{self.where} gave {shape}: return one value per sample, shape ({samples},), as a tensor")
        return found

    def update(self, metrics: Sequence[Any], data: tuple[Any, Batch] | None, forward: Forward) -> None:
        """Update `metrics` on rank 0 with the batch of each rank. All ranks must call this together.

        Args:
            metrics: copies of the metric: one for all sources, and one for this source.
            data: outputs and batch of this rank, or None if they are to be ignored.
            forward: provides the ranks and the device.
        """
        chosen = None if data is None else self._chosen(*data, {})
        if forward.world.size > 1:
            everywhere = forward.world.gather_on_main(to_device(chosen, torch.device("cpu")))
        else:
            everywhere = [chosen]

        def update() -> None:
            for arguments in everywhere:
                if arguments is not None:
                    here = to_device(arguments, forward.device)
                    for metric in metrics:
                        self._call(metric.update, here)

        forward.world.run_on_main(update)

    def results(self, metrics: dict[str | None, Any], world: World) -> dict[str, Any]:
        """Return the values by name, and by source if there are several sources. All ranks get the same values."""

        def compute() -> dict[str, Any]:
            found: dict[str, Any] = dict(self._floats(self._call(metrics[None].compute, {})))
            by_source = {
                source: self._floats(self._call(metric.compute, {}))
                for source, metric in metrics.items()
                if source is not None
            }
            for name in list(found) if by_source else ():
                found[f"{name}_by_source"] = {source: own[name] for source, own in by_source.items() if name in own}
            return found

        return world.run_on_main(compute)

    def _chosen(self, outputs: Any, batch: Batch, more: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of `update` by name."""
        named = dict(outputs) if isinstance(outputs, Mapping) else {"loss": outputs}
        entries = {**more, **(batch if isinstance(batch, Mapping) else {}), **named}
        chosen: dict[str, Any] = {}
        for argument, parameter in self.arguments.items():
            if parameter.kind in VARIABLE:
                chosen |= {name: value for name, value in named.items() if name in ("preds", "target")}
                continue
            entry = self.takes.get(argument, argument)
            if entry in entries:
                chosen[argument] = entries[entry]
            elif parameter.default is inspect.Parameter.empty or argument in self.takes:
                there = ", ".join(map(str, {**named, **(batch if isinstance(batch, Mapping) else {})}))
                raise UserError(
                    f"{self.where} needs {entry!r}, which neither the task's evaluation nor the batch has: "
                    f"there are {there}; return it, or name another entry: eval.metrics.{self.name}.takes.{argument}=…"
                )
        return chosen

    def _call(self, function: Any, arguments: dict[str, Any]) -> Any:
        try:
            return function(**arguments)
        except (ValueError, TypeError, RuntimeError, IndexError, NotImplementedError) as error:
            shapes = ", ".join(
                f"{name} {tuple(value.shape)}" for name, value in arguments.items() if isinstance(value, torch.Tensor)
            )
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise UserError(f"{self.where}: {reason}" + (f" (called with {shapes})" if shapes else "")) from error

    def _floats(self, value: Any) -> dict[str, float]:
        """Convert the result of `compute` to numbers by name. A mapping or vector gives several numbers."""
        if isinstance(value, Mapping):
            parts = {f"{self.name}_{key}": part for key, part in value.items()}
        elif isinstance(value, torch.Tensor) and value.ndim == 1:
            parts = {f"{self.name}_{number}": part for number, part in enumerate(value)}
        else:
            parts = {self.name: value}
        try:
            return {name: float(part) for name, part in parts.items()}
        except (TypeError, ValueError, RuntimeError):
            raise UserError(
                f"{self.where}: compute() gave {type(value).__name__}"
                f"{f' of shape {tuple(value.shape)}' if isinstance(value, torch.Tensor) else ''}: "
                "it must give a number, a vector, or a mapping of numbers"
            ) from None

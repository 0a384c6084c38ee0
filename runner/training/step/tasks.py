"""Create the task, which is the user's computation for training and evaluation, and check its results."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from runner.checkpoint.tensors.staging import snapshot
from runner.checkpoint.tensors.state import Stateful
from runner.config.schema import Config, Strategy
from runner.config.targets import bind, check_call, instantiate, named
from runner.errors import CheckpointError, UserError, nearest

Batch = Any
Compute = Callable[[nn.Module, Batch], Any]
TakeStep = Callable[[Any], None]
"""Function called with a `runner.training.step.step.Step`. It is not named here because its module imports this one."""
METHODS = ("training_step", "evaluation_step", "take_step")
WEIGHT = "weight"
"""Key under which a task returns the weights of its samples, e.g. numbers of tokens."""
FOR_METRICS = ("preds", "target")
"""Keys of an evaluation's output that are passed to the metrics, with any shape, and are not averaged."""
RESERVED = ("step", "lr", "samples_seen", "tokens_seen", "grad_norm", "skipped", "digest", "sources")
"""Keys of a step's record that a task may not use."""


@dataclass(frozen=True)
class Task:
    """The computation from a model and a batch.

    Attributes:
        name: name of the class or function, for messages.
        training_step: function that maps (model, batch) to losses (B,), or to a mapping with `loss` (B,) and further
            values (B,). The values are averaged with `weight` (B,) if the mapping has this key. None if the task has
            `take_step`.
        evaluation_step: the same for held-out data. The mapping may contain further tensors for metrics. None if the
            task cannot be evaluated.
        take_step: function that performs complete steps, including updates. If None, a step is forward, backward and
            one update.
        state: the object whose state is saved and restored with the run, or None if the task has no state.
    """

    name: str
    training_step: Compute | None
    evaluation_step: Compute | None
    take_step: TakeStep | None = None
    state: Stateful | None = None

    def check_state(self) -> None:
        """Check that the task's state can be saved in a checkpoint.

        Raises:
            UserError: the state cannot be saved. The message names the entry.
        """
        if self.state is None:
            return
        try:
            snapshot(self.state.state_dict(), "the state")
        except CheckpointError as error:
            raise UserError(f"{self.name}: {error}") from error
        except Exception as error:
            raise UserError(f"{self.name}: state_dict() raised {type(error).__name__}: {error}") from error

    def check_evaluation(self) -> None:
        """Check that the task has an evaluation step.

        Raises:
            UserError: the task has no evaluation step.
        """
        if self.evaluation_step is None:
            raise UserError(f"{self.name} has no evaluation_step(model, batch): define it, or set eval.every_steps=0")

    def restore(self, states: Sequence[dict[str, Any]], rank: int) -> None:
        """Restore the state that this rank saved. A new rank gets the state of rank 0.

        Raises:
            UserError: the task does not accept the state.
        """
        if self.state is None or not states:
            return
        try:
            self.state.load_state_dict(states[rank if rank < len(states) else 0])
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise UserError(
                f"{self.name} cannot load the state that it saved ({type(error).__name__}: {error}): "
                "its load_state_dict must take what state_dict gives"
            ) from error

    @staticmethod
    def of(compute: Compute, name: str = "the loss") -> Task:
        """Create a task from a function (model, batch), which is used for both training and evaluation."""
        return Task(name, compute, compute)


def build_task(config: Config) -> Task:
    """Create the config's task: `train.loss` if it names a function, otherwise `task`.

    Raises:
        UserError: the task cannot be created, lacks a required method, or cannot be trained with the strategy.
    """
    key, node = ("train.loss", config.train.loss) if config.train.loss else ("task", config.task)
    if not node.get("_target_"):
        raise UserError(f"{key} has no _target_: name a function (model, batch), or a class; or choose task=next_token")
    name = f"{key} ({node['_target_']})"
    if inspect.isclass(named(key, node)):
        task = _task_of(name, instantiate(key, node))
        if task.take_step is not None and config.strategy is Strategy.fsdp:
            raise UserError(f"{name} has take_step, which needs the whole model on each rank: use strategy=ddp")
        return task
    made = bind(key, node)
    check_call(made, name, "(model, batch)", None, None)
    return Task.of(made, name)


def _task_of(name: str, made: Any) -> Task:
    if isinstance(made, nn.Module) and next(made.parameters(), None) is not None:
        raise UserError(f"{name} holds parameters, which no optimizer would train: make them part of the model")
    found = {method: getattr(made, method, None) for method in METHODS}
    compute = found["training_step"] or (made if callable(made) else None)
    if compute is None and found["take_step"] is None:
        others = [method for method in dir(made) if not method.startswith("_") and callable(getattr(made, method))]
        close = nearest("training_step", others)
        raise UserError(f"{name} has no training_step(model, batch){close} and no take_step(step): define one of them")
    evaluate = found["evaluation_step"] or compute
    for function in (compute, found["evaluation_step"]):
        if function is not None:
            where = f"{name}.{getattr(function, '__name__', '__call__')}"
            check_call(partial(function), where, "(model, batch)", None, None)
    halves = [method for method in ("state_dict", "load_state_dict") if callable(getattr(made, method, None))]
    if len(halves) == 1:
        raise UserError(
            f"{name} has {halves[0]} alone: define both state_dict() and load_state_dict(state), or neither"
        )
    return Task(name, compute, evaluate, found["take_step"], made if halves else None)


@dataclass(frozen=True)
class PerSample:
    """The values of each sample from a task's output.

    Attributes:
        values: tensors of shape (B,) by name, `loss` first.
        weight: weights of the samples, shape (B,), detached. If None, each weight is 1.
    """

    values: dict[str, torch.Tensor]
    weight: torch.Tensor | None = None

    def weighted_sum(self) -> torch.Tensor:
        """Return the weighted sum of the losses, in at least float32 precision."""
        assert self.weight is not None
        loss = self.values["loss"]
        kind = torch.promote_types(loss.dtype, torch.float32)
        return (loss.to(kind) * self.weight.to(kind)).sum()


def per_sample(name: str, outputs: Any, samples: int | None) -> PerSample:
    """Return the values of each sample from a task's output.

    Args:
        name: name of the task, for messages.
        outputs: losses, or a mapping with `loss`. Tensors with more dimensions, and keys in `FOR_METRICS`, are skipped.
        samples: B, if known.

    Raises:
        UserError: there is no loss, or a value is not a tensor of shape (B,).
    """
    named = outputs if isinstance(outputs, Mapping) else {"loss": outputs}
    if "loss" not in named:
        there = ", ".join(map(str, named)) or "nothing"
        raise UserError(f"{name} returned {there} and no 'loss': return one loss per sample, shape (B,), as 'loss'")
    loss = named["loss"]
    _check_values(name, "loss", loss, samples)
    values, weight = {"loss": loss}, None
    if named.get(WEIGHT) is not None:
        _check_values(name, WEIGHT, named[WEIGHT], len(loss))
        weight = named[WEIGHT].detach()
    for key, value in named.items():
        extra = isinstance(value, torch.Tensor) and value.ndim > 1 and len(value) == len(loss)
        if key not in ("loss", WEIGHT, *FOR_METRICS) and not extra:
            check_name(name, str(key))
            _check_values(name, str(key), value, len(loss))
            values[str(key)] = value.detach()
    return PerSample(values, weight)


def check_weights(name: str, weights: np.ndarray) -> None:
    """Check the weights that a task returned, once they are on the CPU.

    Args:
        name: name of the task, for messages.
        weights: float64, of any shape.

    Raises:
        UserError: a weight is negative or not finite.
    """
    wrong = weights[~((weights >= 0) & np.isfinite(weights))]
    if wrong.size:
        raise UserError(f"{name} returned a weight of {wrong[0]:g}: return finite numbers of at least 0")


def check_name(name: str, key: str) -> None:
    """Check that a task may log a metric named `key`.

    Args:
        name: name of the task, for messages.
        key: name of the value.

    Raises:
        UserError: the name is not printable, or the runner's records already use it.
    """
    if not key.isprintable() or not key.strip():
        raise UserError(f"{name} gave a value named {key!r}: choose a printable name")
    if key in RESERVED or key.startswith("eval_") or key.endswith(("_by_source", "_by_optimizer")):
        raise UserError(f"{name} gave a value named {key!r}, which the runner's own records use: choose another name")


def _check_values(name: str, key: str, value: Any, samples: int | None) -> None:
    wanted = f"return one value per sample, shape ({'B' if samples is None else samples},)"
    if not isinstance(value, torch.Tensor):
        raise UserError(f"{name} returned {key} as {type(value).__name__}: {wanted}, as a tensor")
    if value.ndim != 1 or (samples is not None and len(value) != samples):
        means = " (with reduction='none', a loss function of torch does)" if value.ndim == 0 else ""
        raise UserError(f"{name} returned {key} of shape {tuple(value.shape)}: {wanted}{means}")
    if value.is_complex():
        raise UserError(f"{name} returned {key} of type {value.dtype}: return real numbers")
    if key == "loss" and not value.is_floating_point():
        raise UserError(f"{name} returned loss of type {value.dtype}: return floating-point numbers")

"""Manage the optimizers of a run, their schedules and, for float16, the gradient scaler.

`Optimizers` has the attributes of an optimizer that a checkpoint needs (`param_groups`, `state`, `class_name`). So a
single optimizer and several optimizers are saved and restored in the same way, by parameter name.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from runner.config.optimizers import SINGLE
from runner.errors import MismatchError, TrainingError
from runner.training.ranks.parallel import total_norm


class Schedulers:
    """The learning-rate schedulers of all optimizers. All of them advance once per training step."""

    def __init__(self, made: Mapping[str, LRScheduler]) -> None:
        self._made = dict(made)

    def step(self) -> None:
        """Advance all schedulers, even after a step whose update was skipped.

        Raises:
            TrainingError: a torch scheduler has reached its last step.
        """
        for name, scheduler in self._made.items():
            # torch warns if a scheduler's first step comes before an update. Here, that update was skipped.
            scheduler.optimizer._opt_called = True  # type: ignore[attr-defined]
            try:
                scheduler.step()
            except ValueError as error:
                raise TrainingError(f"the scheduler of {name} ({type(scheduler).__name__}): {error}") from error

    def state_dict(self) -> dict[str, Any]:
        return {name: scheduler.state_dict() for name, scheduler in self._made.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.keys() != self._made.keys():
            raise MismatchError(
                f"the train state has schedulers of {', '.join(state)}, and this run has optimizers "
                f"{', '.join(self._made)}: use the optimizers that it was saved with"
            )
        for name, scheduler in self._made.items():
            scheduler.load_state_dict(state[name])


class Optimizers:
    """One or several optimizers for disjoint parameters of a model.

    Args:
        model: the model, wrapped for training.
        made: optimizers by name. The name of a single optimizer is `SINGLE`.
        schedulers: a scheduler for each optimizer, under the same names.
        scaler: multiplies losses so that float16 gradients do not underflow. None if not needed.
    """

    def __init__(
        self,
        model: nn.Module,
        made: Mapping[str, Optimizer],
        schedulers: Mapping[str, LRScheduler],
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self._made = dict(made)
        self.schedulers = Schedulers(schedulers)
        self.scaler = scaler
        # In the order of the model, because norms of gradients are added in this order.
        self._parameters = {name: _parameters(model, optimizer) for name, optimizer in self._made.items()}
        self._unscaled: set[str] = set()
        # The initial options, before anything is restored. See `restart`.
        self._options = [{key: each for key, each in group.items() if key != "params"} for group in self.param_groups]
        self._schedules = copy.deepcopy(self.schedulers.state_dict())

    @staticmethod
    def of_one(model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler) -> Optimizers:
        """Wrap a single optimizer and its scheduler."""
        return Optimizers(model, {SINGLE: optimizer}, {SINGLE: scheduler})

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._made)

    def __getitem__(self, name: str) -> Optimizer:
        return self._made[name]

    def parameters(self, name: str) -> list[nn.Parameter]:
        """Return the parameters of one optimizer, in the order of the model."""
        return self._parameters[name]

    def lr(self, name: str | None = None) -> float:
        """Return the current learning rate of an optimizer's first group. The default is the first optimizer."""
        return float(self._made[self.names[0] if name is None else name].param_groups[0]["lr"])

    # A training step

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss for the backward pass: `loss`, multiplied by the scale if gradients are scaled."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def apply(
        self,
        name: str,
        clip_norm: float | None = None,
        *,
        allowed: bool = True,
        waiting: bool = False,
        factor: float = 1.0,
    ) -> tuple[float, bool]:
        """Update the parameters of an optimizer if its gradients are finite, then discard the gradients.

        Args:
            name: name of the optimizer.
            clip_norm: clip the norm of the gradients to this value.
            allowed: if False, discard the gradients without an update, e.g. because the loss is not finite.
            waiting: True if scaled gradients for a later update are stored outside of the parameters.
            factor: multiplies the gradients before clipping.

        Returns:
            The 2-norm of the gradients before clipping, without the scale, and whether the update was applied.
        """
        optimizer, parameters = self._made[name], self._parameters[name]
        if self.scaler is not None:
            self._unscale(self.scaler, name)
        if factor != 1.0:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        norm = total_norm(parameters)
        grad_norm = norm.item()
        applied = allowed and math.isfinite(grad_norm)
        if applied:
            if clip_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(parameters, clip_norm, norm)
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if self.scaler is not None:
            self._update_scale(self.scaler, waiting)
        return grad_norm, applied

    def _unscale(self, scaler: torch.amp.GradScaler, name: str) -> None:
        if not any(parameter.grad is not None for parameter in self._parameters[name]):
            return
        if name in self._unscaled:  # a second update while gradients of a different optimizer still have this scale
            scaler._per_optimizer_states.pop(id(self._made[name]), None)
        scaler.unscale_(self._made[name])
        self._unscaled.add(name)

    def _update_scale(self, scaler: torch.amp.GradScaler, waiting: bool) -> None:
        """Lower the scale after an overflow, or raise it periodically, unless scaled gradients are still to be used."""
        waiting = waiting or any(p.grad is not None for parameters in self._parameters.values() for p in parameters)
        if self._unscaled and not waiting:
            scaler.update()
            self._unscaled.clear()

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the train state's entries for schedulers and scaler. A checkpoint saves the optimizers separately."""
        scaler = {} if self.scaler is None else {"scaler": self.scaler.state_dict()}
        return {"schedulers": self.schedulers.state_dict(), **scaler}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._restore_scaling(state)
        self.schedulers.load_state_dict(state["schedulers"])

    def _restore_scaling(self, state: Mapping[str, Any]) -> None:
        if ("scaler" in state) != (self.scaler is not None):
            then, now = ("was" if "scaler" in state else "was not"), ("is" if self.scaler is not None else "is not")
            raise MismatchError(
                f"the train state {then} saved with train.precision=float16, and this run {now} trained with it: "
                "restore the precision, or start a new run in another directory (run.name or run.dir)"
            )
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])

    def restart(self, state: Mapping[str, Any], step: int) -> None:
        """Apply the options and schedules of this config to optimizers restored from a different config.

        Args:
            state: `state_dict` of the optimizers with the other config. Only its scaler state is used.
            step: number of completed steps, to which the schedules are advanced.

        Raises:
            MismatchError: only one of the two configs scales gradients.
        """
        self._restore_scaling(state)
        for group, options in zip(self.param_groups, self._options, strict=True):
            group.update(options)
        self.schedulers.load_state_dict(self._schedules)
        for _ in range(step):
            self.schedulers.step()

    @property
    def class_name(self) -> str:
        """Return the class name of a single optimizer, or the names and class names of several."""
        classes = {name: type(optimizer).__name__ for name, optimizer in self._made.items()}
        if self.names == (SINGLE,):
            return classes[SINGLE]
        return ", ".join(f"{name}: {kind}" for name, kind in classes.items())

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups of all optimizers, in the order of the optimizers."""
        return [group for optimizer in self._made.values() for group in optimizer.param_groups]

    @property
    def state(self) -> MutableMapping[torch.Tensor, Any]:
        """Return the states of all parameters of all optimizers."""
        if len(self._made) == 1:
            return next(iter(self._made.values())).state
        return _JoinedState(list(self._made.values()))


class _JoinedState(MutableMapping[torch.Tensor, Any]):
    """The states of several optimizers, joined into a single mapping."""

    def __init__(self, optimizers: list[Optimizer]) -> None:
        self._states = [optimizer.state for optimizer in optimizers]
        self._owner = {
            parameter: optimizer.state
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    def __getitem__(self, parameter: torch.Tensor) -> Any:
        return self._owner[parameter][parameter]

    def __setitem__(self, parameter: torch.Tensor, value: Any) -> None:
        self._owner[parameter][parameter] = value

    def __delitem__(self, parameter: torch.Tensor) -> None:
        del self._owner[parameter][parameter]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (parameter for state in self._states for parameter in state)

    def __len__(self) -> int:
        return sum(len(state) for state in self._states)

    def clear(self) -> None:
        for state in self._states:
            state.clear()


def _parameters(model: nn.Module, optimizer: Optimizer) -> list[nn.Parameter]:
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [parameter for parameter in model.parameters() if id(parameter) in own]

"""Create the learning-rate scheduler of an optimizer: a built-in schedule, a user's function, or a torch class."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from runner.config.schedule import (
    PLATEAU,
    PhaseSchedule,
    SchedulerConfig,
    learning_rate,
    learning_rate_factor,
    lr_scales_refused,
)
from runner.config.targets import bind, named
from runner.errors import TrainingError, UserError


class LearningRateScheduler(LambdaLR):
    """A LambdaLR whose learning rate is a pure function of its step index, even directly after a resume.

    `load_state_dict` sets the learning rate with the *current* factor. So a run that resumes with a longer schedule
    follows the new schedule from its first step. The state contains only numbers (not the factor), so it loads with
    weights_only=True.

    Args:
        optimizer: the optimizer. The `lr` of its groups are the base learning rates.
        factor: function that maps the step index (completed steps, from 0) to a factor. See
            `runner.config.schedule.learning_rate_factor`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, factor: Callable[[int], float]) -> None:
        def plain(step: int) -> float:  # a function, because LambdaLR saves the attributes of callable objects
            return float(factor(step))

        super().__init__(optimizer, plain)

    def step(self, epoch: int | None = None) -> None:
        """Advance to the next step index, or to `epoch`. Call this even after a skipped update."""
        self._step_count += 1
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        self._apply()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(dict(state_dict))
        self._apply()

    def _apply(self) -> None:
        pairs = zip(self.lr_lambdas, self.base_lrs, self.optimizer.param_groups, strict=True)
        for function, base, group in pairs:
            value = base * function(self.last_epoch)
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(value)
            else:
                group["lr"] = value
        self._last_lr = [float(group["lr"]) for group in self.optimizer.param_groups]


def make_scheduler(
    key: str, options: SchedulerConfig, optimizer: Optimizer, steps: int, phases: PhaseSchedule
) -> LRScheduler:
    """Create the scheduler that the config describes at `key`.

    Args:
        key: key in the config, for messages.
        options: a built-in schedule, or a `_target_`. A target is a function (step, **options) that returns a factor of
            the base learning rate, a class whose instances are such functions, or a class of torch.optim.lr_scheduler.
        optimizer: the optimizer. The `lr` of its groups are the base learning rates.
        steps: length of the run.
        phases: the phases. Their `lr_scale` multiplies the factor.

    Raises:
        UserError: the target cannot be used, does not accept its options, or sets the learning rate although a phase
            scales it.
    """
    if options.target is None:
        return LearningRateScheduler(optimizer, learning_rate_factor(learning_rate(options, steps), phases))
    target = named(key, {"_target_": options.target})
    bound = bind(key, options.node(_parameters_of(target)))
    made = partial(target, *bound.args, **bound.keywords)
    if inspect.isclass(target) and issubclass(target, LRScheduler):
        if issubclass(target, ReduceLROnPlateau):
            raise UserError(f"{key}._target_={options.target} {PLATEAU}")
        if line := lr_scales_refused(key, phases.by_name):
            raise UserError(line)
        return _called(key, options.target, made, optimizer)  # type: ignore[no-any-return]
    function: Callable[[int], Any] = made
    if inspect.isclass(target):
        function = _called(key, options.target, made)
        if not callable(function):
            raise UserError(
                f"{key}._target_={options.target} is neither a function (step) -> factor nor a class of such, nor a "
                "class of torch.optim.lr_scheduler"
            )
    factor = _checked(key, options.target, function)
    factor(0)
    return LearningRateScheduler(optimizer, learning_rate_factor(factor, phases))


def _parameters_of(target: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(target).parameters)
    except (ValueError, TypeError):  # some functions written in C have no signature
        return []


def _called(key: str, target: str, made: partial[Any], *arguments: Any) -> Any:
    try:
        return made(*arguments)
    except (TypeError, ValueError) as error:
        raise UserError(f"{key} ({target}): {error}: check the options under {key}") from error


def _checked(key: str, target: str, function: Callable[[int], Any]) -> Callable[[int], float]:
    """Wrap `function` with a check of the values that it returns."""
    bare = function if isinstance(function, partial) else partial(function)
    try:
        inspect.signature(bare.func).bind(*bare.args, 0, **bare.keywords)
    except ValueError:  # some functions written in C have no signature
        pass
    except TypeError as error:
        raise UserError(f"{key} ({target}) cannot be called as factor(step) with its options: {error}") from None

    def factor(step: int) -> float:
        value = function(step)
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not (math.isfinite(number) and number >= 0):
            raise TrainingError(
                f"{key} ({target}) returned {value!r:.60} at step {step}: a factor must be a finite number, 0 or more"
            )
        return number

    return factor

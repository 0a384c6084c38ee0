"""Optimizer and learning-rate scheduler that start fast and resume exactly.

`torch.optim.Optimizer` wraps its methods so that torch.compile does not trace them, and the wrappers import
`torch._dynamo` when first called: most of a second at every start, even in a run that compiles nothing. The classes
here call the same methods without the wrappers, unless something else has imported `torch._dynamo`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection
from typing import Any, cast

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from runner.errors import UserError


def _direct(function: Callable[..., Any]) -> Callable[..., Any]:
    """The method behind torch's wrappers; the method itself in a version of torch that has none."""
    return cast(Callable[..., Any], inspect.unwrap(function))


def _compiling() -> bool:
    """Whether torch.compile is (or may be) in use: then the wrappers are needed, and their import has happened."""
    return "torch._dynamo" in sys.modules


_Optimizer = torch.optim.Optimizer
_add_param_group = _direct(_Optimizer.add_param_group)
_zero_grad = _direct(_Optimizer.zero_grad)
_state_dict = _direct(_Optimizer.state_dict)
_load_state_dict = _direct(_Optimizer.load_state_dict)
_step = _direct(torch.optim.AdamW.step)


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW`, bit for bit and with the same state, that does not import `torch._dynamo`.

    Takes the same arguments. With torch.compile it is torch's own optimizer in every respect.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if _compiling():
            super().add_param_group(param_group)
        else:
            _add_param_group(self, param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if _compiling():
            super().zero_grad(set_to_none)
        else:
            _zero_grad(self, set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() if _compiling() else _state_dict(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if _compiling():
            super().load_state_dict(state_dict)
        else:
            _load_state_dict(self, state_dict)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if _compiling():
            return _WRAPPED_STEP(self, closure)
        with torch.set_grad_enabled(bool(self.defaults["differentiable"])):
            return _step(self, closure)


def _without_profiler(step: Callable[..., Any]) -> Callable[..., Any]:
    # Creating torch's AdamW wraps the class's step in the profiler's hook; the step of this AdamW is wrapped as well.
    return cast(Any, step).__wrapped__ if getattr(step, "hooked", False) else step


_WRAPPED_STEP = _without_profiler(torch.optim.AdamW.step)


def decay_groups(
    model: nn.Module, weight_decay: float, among: Collection[nn.Parameter] | None = None
) -> list[dict[str, Any]]:
    """Parameter groups with weight decay for matrices only, not for biases, norms and embeddings.

    Decay is meant for weights whose scale hardly affects the loss; pulling norms and biases to 0 changes the function,
    and an embedding would decay in every step but learn only in those where its token occurs.

    Args:
        model: only parameters that require a gradient are included; a tied embedding counts as an embedding.
        weight_decay: that of the matrices, 0 or more.
        among: only these of its parameters; None: all.

    Raises:
        UserError: a negative weight_decay, or nothing to train.
    """
    if not weight_decay >= 0:
        raise UserError(f"optimizer.weight_decay={weight_decay} must be 0 or more")
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    trained = [p for p in (model.parameters() if among is None else among) if p.requires_grad]
    if not trained:
        raise UserError(f"model {type(model).__name__} has no parameter that requires a gradient: nothing to train")
    matrices = [p for p in trained if p.ndim >= 2 and id(p) not in embeddings]
    others = [p for p in trained if p.ndim < 2 or id(p) in embeddings]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


class LearningRateScheduler(LambdaLR):
    """LambdaLR whose learning rate is a pure function of its step index, also right after a resume.

    `load_state_dict` sets the learning rate of the *current* factor: a run resumed with a longer schedule follows that
    from its first step. The state contains only numbers (the factor is not saved), so it loads with weights_only=True.

    Args:
        optimizer: its groups' `lr` are the base learning rates.
        factor: step index (complete steps, from 0) -> factor; see `runner.config.schedule.learning_rate_factor`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, factor: Callable[[int], float]) -> None:
        def plain(step: int) -> float:  # LambdaLR would save the attributes of a callable object
            return float(factor(step))

        super().__init__(optimizer, plain)

    def step(self, epoch: int | None = None) -> None:
        """Advance to the next step index, or to `epoch`; steps whose optimizer step was skipped count as well."""
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

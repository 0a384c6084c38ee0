"""Provide an AdamW that starts fast; configs name it `runner.training.optim.AdamW`.

`torch.optim.Optimizer` wraps its methods so that torch.compile does not trace them. The wrappers import `torch._dynamo`
at their first call, which takes most of a second at every start, even in a run that compiles nothing. This class calls
the same methods without the wrappers, unless `torch._dynamo` is already imported.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any, cast

import torch


def _direct(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method behind torch's wrappers, or the method itself in a version of torch without wrappers."""
    return cast(Callable[..., Any], inspect.unwrap(function))


def _compiling() -> bool:
    """Check whether torch.compile may be in use: it needs the wrappers, and has paid for their import."""
    return "torch._dynamo" in sys.modules


_Optimizer = torch.optim.Optimizer
_add_param_group = _direct(_Optimizer.add_param_group)
_zero_grad = _direct(_Optimizer.zero_grad)
_state_dict = _direct(_Optimizer.state_dict)
_load_state_dict = _direct(_Optimizer.load_state_dict)
_step = _direct(torch.optim.AdamW.step)


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` without the import of `torch._dynamo`; bit for bit the same, with the same state.

    It takes the same arguments. With torch.compile it calls torch's own methods.
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
    # Creating torch's AdamW wraps the step of the class in the profiler's hook. The step of this AdamW has its own
    # hook.
    return cast(Any, step).__wrapped__ if getattr(step, "hooked", False) else step


_WRAPPED_STEP = _without_profiler(torch.optim.AdamW.step)

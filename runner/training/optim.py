"""Provide an AdamW that starts fast. Its name in configs is `runner.training.optim.AdamW`.

`torch.optim.Optimizer` wraps its methods so that torch.compile does not trace them. At their first call, the wrappers
import `torch._dynamo`. This takes most of a second at every start, even in runs without torch.compile. This class calls
the same methods without the wrappers, unless `torch._dynamo` is already imported.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any, cast

import torch


def _direct(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method that torch has wrapped, or `function` in a version of torch without wrappers."""
    return cast(Callable[..., Any], inspect.unwrap(function))


def _compiling() -> bool:
    """Check whether torch.compile may be in use. It needs the wrappers, and has already imported `torch._dynamo`."""
    return "torch._dynamo" in sys.modules


_Optimizer = torch.optim.Optimizer
_add_param_group = _direct(_Optimizer.add_param_group)
_zero_grad = _direct(_Optimizer.zero_grad)
_state_dict = _direct(_Optimizer.state_dict)
_load_state_dict = _direct(_Optimizer.load_state_dict)
_step = _direct(torch.optim.AdamW.step)


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` without the import of `torch._dynamo`. Results and state are bitwise identical.

    The arguments are the same. With torch.compile, the class calls torch's methods.
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
    # Creating an AdamW of torch wraps the class's `step` in the profiler's hook. This AdamW's `step` has a separate
    # hook.
    return cast(Any, step).__wrapped__ if getattr(step, "hooked", False) else step


_WRAPPED_STEP = _without_profiler(torch.optim.AdamW.step)

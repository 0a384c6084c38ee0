"""What a model keeps from one forward pass to the next, which rank-invariant training needs to stay as it is.

That are the weights, the persistent buffers, and what modules save beside them (`get_extra_state`). What no checkpoint
holds is not looked at: a cache may grow, and a run that depends on such a state does not resume exactly either.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import nn

from runner.errors import UserError

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class Unchanged:
    """Finds out whether the forward passes of a step change `model`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before: dict[str, Any] = {}
        self._changed: str | None = None

    def remember(self) -> None:
        """Before the first one."""
        self._before = self._kept()

    def compare(self) -> None:
        """After the last one."""
        now = self._kept()
        changed = (name for name, value in self._before.items() if not same(value, now.get(name)))
        self._changed = self._changed or next(changed, None)

    def check(self) -> None:
        """Check that nothing has changed.

        Raises:
            UserError: something has.
        """
        if self._changed is not None:
            raise UserError(
                f"the model's {self._changed} changes in the forward pass, as running statistics of a batch norm do, "
                "so that training would depend on which rank computed which micro-batch: use a layer without (a group "
                "norm or layer norm, or track_running_stats=False), keep that layer in eval mode, or set "
                "train.rank_invariant=false"
            )

    def _kept(self) -> dict[str, Any]:
        """By what it is called; of a weight a checksum, as there may be no memory for another copy."""
        found: dict[str, Any] = {f"parameter {name}": _checksum(p) for name, p in self._model.named_parameters()}
        for prefix, module in self._model.named_modules():
            within = f"{prefix}." if prefix else ""
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    found[f"buffer {within}{name}"] = buffer.detach().clone()
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                found[f"extra state of {prefix or type(module).__name__}"] = deepcopy(module.get_extra_state())
        return found


def _checksum(parameter: torch.Tensor) -> int:
    """The sum of its bits, taken as integers."""
    values = parameter.detach().reshape(-1)
    return int(values.view(_WORDS.get(values.element_size(), torch.int64)).sum())


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal, NaN for NaN."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return (
            one.shape == other.shape
            and one.dtype == other.dtype
            and torch.equal(one.isnan(), other.isnan())
            and (bool(((one == other) | one.isnan()).all()))
        )
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(np.array_equal(one, other, equal_nan=isinstance(one, float | np.ndarray)))

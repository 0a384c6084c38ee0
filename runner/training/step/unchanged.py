"""What a model keeps from one forward pass to the next, which rank-invariant training needs to stay as it is.

That are the weights, the persistent buffers, and what modules save beside them (`get_extra_state`). What no checkpoint
holds is not looked at: a cache may grow, and a run that depends on such a state does not resume exactly either.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from runner.checkpoint.compare import nested_differences
from runner.checkpoint.staging import snapshot
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
        changed = (name for name, value in self._before.items() if any(nested_differences(value, now.get(name), name)))
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
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        for name, value in self._model.state_dict().items():
            *path, last = name.split(".")
            if last == "_extra_state":
                prefix = ".".join(path)
                found[f"extra state of {prefix or type(self._model).__name__}"] = snapshot(value, name)
            elif name not in parameters:
                found[f"buffer {name}"] = snapshot(value, name)
        return found


def _checksum(parameter: torch.Tensor) -> int:
    """The sum of its bits, taken as integers."""
    values = parameter.detach().reshape(-1)
    return int(values.view(_WORDS.get(values.element_size(), torch.int64)).sum())

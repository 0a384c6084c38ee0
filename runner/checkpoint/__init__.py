"""Save and load checkpoints: train state, random generators and atomic commits.

Submodules are imported on first use, so that importing this package is fast and does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runner.checkpoint.cadence import AdaptiveInterval, Cadence
    from runner.checkpoint.manager import TrainStateManager
    from runner.checkpoint.tensors.state import (
        build_train_state,
        get_rng_state,
        restore_train_state,
        set_rng_state,
    )

_HOMES = {
    "AdaptiveInterval": "cadence",
    "Cadence": "cadence",
    "TrainStateManager": "manager",
    "build_train_state": "tensors.state",
    "get_rng_state": "tensors.state",
    "restore_train_state": "tensors.state",
    "set_rng_state": "tensors.state",
}

__all__ = [
    "AdaptiveInterval",
    "Cadence",
    "TrainStateManager",
    "build_train_state",
    "get_rng_state",
    "restore_train_state",
    "set_rng_state",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value

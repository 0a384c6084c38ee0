"""Does a checkpoint fit this run? Asked before anything of the run is touched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from runner.checkpoint.archive import Archive
from runner.checkpoint.staging import MODEL, Tensors
from runner.errors import CheckpointError

_MOST = 3


def check_fingerprint(saved: Mapping[str, Any], present: Mapping[str, Any], where: str) -> None:
    """Compare the parts that both name; a run that leaves a part out accepts any.

    Raises:
        CheckpointError: naming each value that differs.
    """
    faults: list[str] = []
    for key in present:
        if key in saved:
            _compare(saved[key], _as_json(present[key]), key, faults)
    if faults:
        raise CheckpointError(
            f"{where} belongs to another run: {_some(faults)}; restore these settings, or start a new run in "
            "another directory (run.name or run.dir)"
        )


def _as_json(value: Any) -> Any:
    """`value` as it comes back out of JSON."""
    if isinstance(value, Mapping):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    return value


def _compare(saved: Any, present: Any, path: str, faults: list[str]) -> None:
    if isinstance(saved, dict) and isinstance(present, dict):
        for key in sorted({*saved, *present}):
            if key not in saved:
                faults.append(f"{path}.{key} is new here")
            elif key not in present:
                faults.append(f"{path}.{key} is missing here")
            else:
                _compare(saved[key], present[key], f"{path}.{key}", faults)
    elif saved != present:
        faults.append(f"{path} was {_short(saved)} and is {_short(present)} here")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _some(faults: list[str]) -> str:
    more = len(faults) - _MOST
    return ", ".join(faults[:_MOST]) + (f" and {more} more" if more > 0 else "")


def check_model(archive: Archive, tensors: Tensors, where: str) -> None:
    """Every tensor of the model must be there with its shape and dtype, and no other.

    Raises:
        CheckpointError: naming what differs.
    """
    saved = archive.names(MODEL)
    faults = [f"it lacks {name!r}" for name in tensors if name not in saved]
    faults += [f"it has {name!r}, which the model lacks" for name in saved if name not in tensors]
    for name, tensor in tensors.items():
        if name not in saved:
            continue
        if tuple(tensor.shape) != saved[name].size:
            faults.append(f"{name!r} is {saved[name].size} there and {tuple(tensor.shape)} here")
        elif tensor.dtype != saved[name].dtype:
            faults.append(f"{name!r} is {saved[name].dtype} there and {tensor.dtype} here")
    if faults:
        raise CheckpointError(
            f"{where} is of another model: {_some(faults)}; use the model settings it was saved with, or start a "
            "new run in another directory (run.name or run.dir)"
        )


def check_optimizer(
    saved: Mapping[str, Any] | None, optimizer: Optimizer, present: Mapping[str, Any], where: str
) -> None:
    """The optimizer must be of the same class and hold the same parameters in the same groups.

    Raises:
        CheckpointError: naming what differs.
    """
    fault = None
    if saved is None:
        fault = f"it was saved without an optimizer, and this run has {type(optimizer).__name__}"
    elif saved["class"] != present["class"]:
        fault = f"it was saved with {saved['class']}, and this run has {present['class']}"
    else:
        there = [sorted(group["params"]) for group in saved["param_groups"]]
        here = [sorted(group["params"]) for group in present["param_groups"]]
        if len(there) != len(here):
            fault = f"it has {len(there)} parameter groups, and this run has {len(here)}"
        elif there != here:
            number = next(n for n, (old, new) in enumerate(zip(there, here, strict=True)) if old != new)
            odd = sorted(set(there[number]) ^ set(here[number]))
            fault = f"parameter group {number} differs in {_some([repr(name) for name in odd])}"
    if fault:
        raise CheckpointError(
            f"{where} does not fit the optimizer: {fault}; use the optimizer settings it was saved with, or start a "
            "new run in another directory (run.name or run.dir)"
        )

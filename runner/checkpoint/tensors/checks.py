"""Check that a checkpoint matches this run, before any state of the run is changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from runner.checkpoint.tensors.compare import unlike
from runner.checkpoint.tensors.reader import CheckpointReader
from runner.checkpoint.tensors.staging import AVERAGE, AVERAGE_COUNT, MODEL, Tensors, collect
from runner.checkpoint.tensors.state import Averaged, OptimizerLike, OptimizerState, TrainState
from runner.errors import MismatchError

_MAX_NAMED = 3
_REMEDY = "or start a new run in another directory (run.name or run.dir)"


def check_fingerprint(saved: Mapping[str, Any], present: Mapping[str, Any], where: str) -> None:
    """Compare the values of the keys that both fingerprints have.

    Raises:
        MismatchError: values differ. The message lists them.
    """
    differences: list[str] = []
    for key in present:
        if key in saved:
            _compare(saved[key], _as_json(present[key]), key, differences)
    if not differences:
        return
    if all(difference.startswith(("size of source ", "content of source ", "file ")) for difference in differences):
        raise MismatchError(
            f"{where}: the data have changed since it was saved: {_joined(differences)}; put the data back as they "
            "were, accept other content of the same length with run.allow_data_change=true, or start a new run"
        )
    raise MismatchError(f"{where} is of another run: {_joined(differences)}; restore these settings, {_REMEDY}")


def _as_json(value: Any) -> Any:
    """Return `value` as it would be after a round trip through JSON."""
    if isinstance(value, Mapping):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    return value


def _compare(saved: Any, present: Any, path: str, differences: list[str]) -> None:
    if isinstance(saved, dict) and isinstance(present, dict):
        for key in sorted({*saved, *present}):
            if key not in saved:
                differences.append(f"{path}.{key} is new")
            elif key not in present:
                differences.append(f"{path}.{key} is missing now")
            else:
                _compare(saved[key], present[key], f"{path}.{key}", differences)
    elif isinstance(saved, list) and isinstance(present, list) and len(saved) == len(present):
        for number, (old, new) in enumerate(zip(saved, present, strict=True)):
            _compare(old, new, f"{path}.{number}", differences)
    elif saved != present:
        differences.append(f"{path} was {_short(saved)} and is {_short(present)} now")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _joined(differences: list[str]) -> str:
    more = len(differences) - _MAX_NAMED
    return ", ".join(differences[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def check_fit(
    reader: CheckpointReader,
    state: TrainState,
    model: nn.Module,
    optimizer: OptimizerLike | None,
    averaged: Averaged | None,
    where: str,
) -> None:
    """Check that a checkpoint matches the model, the optimizer and the averaged weights that it will be loaded into.

    Raises:
        MismatchError: they differ. The message lists the differences.
    """
    collected = collect(model, optimizer, averaged)
    check_model(reader, collected.nested["model"], where)
    if averaged is not None or optimizer is not None:  # without either, only the weights are loaded
        check_average(reader, collected.nested.get("ema"), where)
    if collected.optimizer is not None:
        check_optimizer(state.optimizer, collected.optimizer, where)


def check_model(reader: CheckpointReader, tensors: Tensors, where: str, prefix: str = MODEL) -> None:
    """Compare the names, shapes and dtypes of the saved tensors with the model's.

    Raises:
        MismatchError: they differ. The message lists the differences.
    """
    saved = reader.names(prefix)
    differences = [f"it lacks {name!r}" for name in tensors if name not in saved]
    differences += [f"it has {name!r}, which the model lacks" for name in saved if name not in tensors]
    for name, tensor in tensors.items():
        if name not in saved:
            continue
        if tuple(tensor.shape) != saved[name].size:
            differences.append(f"{name!r} was {saved[name].size} and is {tuple(tensor.shape)} now")
        elif tensor.dtype != saved[name].dtype:
            differences.append(f"{name!r} was {saved[name].dtype} and is {tensor.dtype} now")
    if differences:
        raise MismatchError(
            f"{where} is of another model: {_joined(differences)}; use the model settings it was saved with, {_REMEDY}"
        )


def check_average(reader: CheckpointReader, tensors: Tensors | None, where: str) -> None:
    """Compare the saved averaged weights with this run's `tensors`, which are None if the run averages no weights.

    Raises:
        MismatchError: exactly one of the checkpoint and the run has averaged weights, or the weights differ.
    """
    saved = AVERAGE_COUNT in reader.entries
    if saved and tensors is None:
        raise MismatchError(
            f"{where} has averaged weights, and this run has none: set train.ema_decay as it was, {_REMEDY}"
        )
    if tensors is not None and not saved:
        raise MismatchError(
            f"{where} has no averaged weights, and this run has train.ema_decay: set it to null, {_REMEDY}"
        )
    if tensors is not None:
        check_model(reader, tensors, where, AVERAGE)


def check_optimizer(saved: OptimizerState | None, present: OptimizerState, where: str) -> None:
    """Compare the class, groups and parameters of the saved and the current optimizer.

    Raises:
        MismatchError: they differ. The message lists the differences.
    """
    if difference := optimizer_difference(saved, present):
        raise MismatchError(
            f"{where} does not fit the optimizer: {difference}; use the optimizer settings it was saved with, {_REMEDY}"
        )


def optimizer_difference(saved: OptimizerState | None, present: OptimizerState) -> str | None:
    """Describe how the class, groups or parameters of the saved and the current optimizer differ, or return None."""
    difference = None
    if saved is None:
        difference = f"it was saved without an optimizer, and this run has {present.class_name}"
    elif saved.class_name != present.class_name:
        difference = f"it was saved with {saved.class_name}, and this run has {present.class_name}"
    else:
        then = [sorted(group["params"]) for group in saved.param_groups]
        now = [sorted(group["params"]) for group in present.param_groups]
        if len(then) != len(now):
            difference = f"it has {len(then)} parameter groups, and this run has {len(now)}"
        elif then != now:
            index = next(n for n, (old, new) in enumerate(zip(then, now, strict=True)) if old != new)
            names = sorted(set(then[index]) ^ set(now[index]))
            difference = f"parameter group {index} differs in {_joined([repr(name) for name in names])}"
        else:
            options = [{key: float(v) if type(v) is int else v for key, v in g.items()} for g in present.param_groups]
            difference = unlike(saved.param_groups, options, "param_groups")
    return difference

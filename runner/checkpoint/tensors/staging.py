"""Collect the tensors and values of a model and an optimizer, under names that do not depend on wrappers or ranks.

The names are the same for a plain module and with DistributedDataParallel, FSDP2 (`fully_shard`) or `torch.compile`. An
optimizer's state is keyed by parameter name instead of index. The planner of torch.distributed.checkpoint assigns the
tensors to ranks. All other values (hyperparameters, counters, module extras) are saved in train_state.pt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from runner.checkpoint.tensors.state import Averaged, OptimizerLike, OptimizerState
from runner.errors import CheckpointError

Tensors = dict[str, torch.Tensor]

MODEL = "model."
OPTIMIZER = "optimizer.state."
AVERAGE = "ema."
AVERAGE_COUNT = "ema_updates"
"""Flat name of the tensor that counts updates of the averaged weights."""

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


@dataclass
class Collected:
    """References to all tensors and values of the model and optimizer that a checkpoint contains.

    Attributes:
        tensors: all tensors, by flat name.
        nested: the same tensors in the form that torch.distributed.checkpoint expects: {"model": ..., "optimizer":
            ...}, and {"ema": ...} for averaged weights.
        model_extra: entries of the model's state dict that are not tensors, or None if there are none.
        optimizer: the optimizer's values that are not tensors, or None without an optimizer.
    """

    tensors: Tensors
    nested: dict[str, Any]
    model_extra: dict[str, Any] | None
    optimizer: OptimizerState | None = None


def bare(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel, or `model` if it is not wrapped."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def plain_name(name: str) -> str:
    """Return a parameter's name without the components that wrappers insert."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def model_state(model: nn.Module) -> tuple[Tensors, dict[str, Any]]:
    """Return a module's persistent tensors, and the other values of its `state_dict`, by name."""
    tensors: Tensors = {}
    extra: dict[str, Any] = {}
    for name, value in bare(model).state_dict().items():
        (tensors if isinstance(value, torch.Tensor) else extra)[plain_name(name)] = value
    return tensors, extra


def changed_by_updates(collected: Collected) -> set[str]:
    """Return the flat names of tensors that an optimizer's update changes: parameters, state, averaged weights.

    Other tensors, such as buffers or the weights of a target network, may be written at any time.
    """
    groups = collected.optimizer.param_groups if collected.optimizer is not None else []
    stepped = {MODEL + name for group in groups for name in group["params"]}
    return {name for name in collected.tensors if name in stepped or not name.startswith(MODEL)}


def class_name(optimizer: OptimizerLike) -> str:
    """Return the class name of an optimizer, or the name that a combined optimizer defines."""
    return str(getattr(optimizer, "class_name", type(optimizer).__name__))


def parameter_names(model: nn.Module, optimizer: OptimizerLike) -> dict[torch.Tensor, str]:
    """Map each of the optimizer's parameters to its name.

    Raises:
        CheckpointError: a parameter is not in the model.
    """
    names: dict[torch.Tensor, str] = {p: plain_name(name) for name, p in bare(model).named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise CheckpointError(
                    f"{class_name(optimizer)} holds a parameter of shape {tuple(parameter.shape)} that is not in "
                    f"the model and so cannot be saved; make it a parameter of {type(bare(model)).__name__}"
                )
    return names


def collect(model: nn.Module, optimizer: OptimizerLike | None, averaged: Averaged | None = None) -> Collected:
    """Collect references to all tensors and values of `model`, `optimizer` and the averaged weights.

    Raises:
        CheckpointError: the optimizer holds a parameter that is not in the model.
    """
    tensors, extra = model_state(model)
    flat = {MODEL + name: tensor for name, tensor in tensors.items()}
    collected = Collected(flat, {"model": tensors}, extra or None)
    if optimizer is not None:
        _collect_optimizer(collected, optimizer, parameter_names(model, optimizer))
    if averaged is not None:
        average, _ = model_state(averaged.module)
        collected.nested |= {"ema": average, AVERAGE_COUNT: averaged.n_averaged}
        flat |= {AVERAGE + name: tensor for name, tensor in average.items()}
        flat[AVERAGE_COUNT] = averaged.n_averaged
    return collected


def _collect_optimizer(collected: Collected, optimizer: OptimizerLike, names: Mapping[torch.Tensor, str]) -> None:
    state: dict[str, Tensors] = {}
    values: dict[str, dict[str, Any]] = {}
    on_cpu = []
    # Fused and capturable optimizers need even the step counter on the parameter's device.
    on_device = {p for group in optimizer.param_groups if _counts_on_device(group) for p in group["params"]}
    for parameter, entries in optimizer.state.items():
        name = names[parameter]
        for key, value in entries.items():
            if not isinstance(value, torch.Tensor):
                values.setdefault(name, {})[str(key)] = value
                continue
            entry = f"{name}.{key}"
            collected.tensors[OPTIMIZER + entry] = value
            state.setdefault(name, {})[str(key)] = value
            # If the parameter is on the CPU too, a scalar such as the step counter stays on the CPU after a move to a
            # GPU.
            if value.is_cpu and (not parameter.is_cpu or (value.dim() == 0 and parameter not in on_device)):
                on_cpu.append(entry)
    groups = [
        {**group, "params": [names[parameter] for parameter in group["params"]]} for group in optimizer.param_groups
    ]
    collected.nested["optimizer"] = {"state": state}
    # Sorted, because a resume on several ranks fills the state in a different order.
    collected.optimizer = OptimizerState(class_name(optimizer), groups, values, sorted(on_cpu))


def _counts_on_device(group: Mapping[str, Any]) -> bool:
    return bool(group.get("fused") or group.get("capturable"))


def is_sharded(tensor: torch.Tensor) -> bool:
    """Check whether a tensor is a DTensor, of which each rank has a shard."""
    return hasattr(tensor, "to_local")


def shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor. Other tensors are returned unchanged."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return `shard(tensor)`, detached."""
    return shard(tensor).detach()


_Path = str | tuple[Any, Any]  # a name, or (path of the container, key); formatted only for an error

_ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size))


def snapshot(value: Any, path: _Path = "train state") -> Any:
    """Copy plain values and tensors (to the CPU), so that later changes to the original do not affect the copy.

    The copy can be loaded with `weights_only=True`. Numpy scalars become numbers. Values that need code to be loaded
    raise an error now, not at the resume.

    Raises:
        CheckpointError: `value` contains an object of an unsupported type. The message names the entry and its type.
    """
    if type(value) in _ATOMS:
        return value
    if isinstance(value, torch.Tensor):
        return local(value).to("cpu", copy=True)
    if isinstance(value, (list, tuple)):
        plain = tuple if isinstance(value, tuple) else list
        if _ATOMS.issuperset(map(type, value)):  # fast path: the state of a random generator has hundreds of numbers
            return plain(value)
        return plain([snapshot(item, (path, number)) for number, item in enumerate(value)])
    if isinstance(value, Mapping):
        return {
            key if type(key) in _ATOMS else snapshot(key, f"a key of {_formatted(path)}"): snapshot(item, (path, key))
            for key, item in value.items()
        }
    return _as_plain(value, path)


def _formatted(path: _Path) -> str:
    return path if isinstance(path, str) else f"{_formatted(path[0])}[{path[1]!r}]"


def _as_plain(value: Any, path: _Path) -> Any:
    """Convert a numpy scalar, or an instance of a subclass of a plain type, to a plain number or string."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return snapshot(value.item(), path)
    for plain in (int, float, str):
        if isinstance(value, plain):  # e.g. an enum
            return plain(value)
    raise CheckpointError(
        f"{_formatted(path)} is a {type(value).__module__}.{type(value).__qualname__}, but a checkpoint holds only "
        "numbers, strings and tensors, in dicts, lists and tuples; convert it in state_dict (an array with "
        "torch.from_numpy)"
    )

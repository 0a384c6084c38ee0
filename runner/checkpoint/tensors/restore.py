"""Restore a model and an optimizer from a checkpoint, bit for bit, on any number of ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from runner.checkpoint.tensors.layout import Entry
from runner.checkpoint.tensors.reader import CheckpointReader
from runner.checkpoint.tensors.staging import (
    AVERAGE,
    AVERAGE_COUNT,
    MODEL,
    OPTIMIZER,
    Tensors,
    bare,
    is_sharded,
    local,
    model_state,
    parameter_names,
    plain_name,
)
from runner.checkpoint.tensors.state import Averaged, OptimizerLike, OptimizerState, TrainState


def fill(reader: CheckpointReader, name: str, target: torch.Tensor) -> None:
    """Request the tensor `name`, or this rank's shard of it. `reader.fetch` reads it into `target`."""
    offsets: tuple[int, ...] = (0,) * target.dim()
    part = local(target)
    if is_sharded(target):  # torch.distributed.checkpoint also calls this
        offsets = tuple(target.__create_chunk_list__()[0].offsets)  # type: ignore[attr-defined]
    if part.numel():
        reader.want(name, part, offsets)


def load_tensors(
    reader: CheckpointReader,
    state: TrainState,
    model: nn.Module,
    optimizer: OptimizerLike | None,
    averaged: Averaged | None = None,
    verified: Collection[str] = (),
) -> None:
    """Fill `model`, `optimizer` and the averaged weights in place. `check_fit` must have passed.

    Args:
        reader: the checkpoint.
        state: its train state.
        model: the model.
        optimizer: its optimizer, or None to skip it.
        averaged: the averaged weights of the model, or None.
        verified: names of files to verify in the same pass, see `CheckpointReader.fetch`.

    Raises:
        CorruptionError: a `verified` file is corrupt. The contents of the model and optimizer are then undefined.
    """
    load_model(reader, model, model_state(model)[0], state.model_extra)
    if optimizer is not None and state.optimizer is not None:
        load_optimizer(reader, model, optimizer, state.optimizer)
    if averaged is not None:
        for name, tensor in model_state(averaged.module)[0].items():
            fill(reader, AVERAGE + name, tensor)
        fill(reader, AVERAGE_COUNT, averaged.n_averaged)
    reader.fetch(verified)


def load_model(reader: CheckpointReader, model: nn.Module, tensors: Tensors, extra: Mapping[str, Any] | None) -> None:
    """Restore the model. The next `reader.fetch` fills its tensors.

    Args:
        reader: the checkpoint.
        model: the model.
        tensors: persistent tensors of the model, by plain name.
        extra: saved entries of the model's state dict that are not tensors.
    """
    for name, tensor in tensors.items():
        fill(reader, MODEL + name, tensor)
    if extra:
        inner = bare(model)
        originals = {plain_name(name): name for name in inner.state_dict()}
        inner.load_state_dict({originals[name]: value for name, value in extra.items()}, strict=False)


def load_optimizer(reader: CheckpointReader, model: nn.Module, optimizer: OptimizerLike, saved: OptimizerState) -> None:
    """Replace the optimizer's state and the options of its groups. The next `reader.fetch` fills its tensors.

    Parameters without saved state (unused or frozen) have no state afterwards. A state tensor with its parameter's
    shape is sharded like the parameter. Any other state tensor is replicated on every rank. Existing tensors with a
    matching shape and dtype are filled in place, because allocating new memory takes several times as long as reading
    into existing memory.
    """
    on_cpu = set(saved.on_cpu)
    entries = _by_parameter(reader.names(OPTIMIZER), saved)
    names = parameter_names(model, optimizer)
    present = {parameter: dict(state) for parameter, state in optimizer.state.items()}
    optimizer.state.clear()
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        name = names[parameter]
        state: dict[str, Any] = {}
        for key, entry in entries.get(name, {}).items():
            flat = f"{name}.{key}"
            state[key] = _target(entry, parameter, flat in on_cpu, present.get(parameter, {}).pop(key, None))
            fill(reader, OPTIMIZER + flat, state[key])
        state.update(_moved(saved.values.get(name, {}), parameter.device))
        if state:
            optimizer.state[parameter] = state
    for group, options in zip(optimizer.param_groups, saved.param_groups, strict=True):
        group.update({key: value for key, value in options.items() if key != "params"})


def _by_parameter(entries: Mapping[str, Entry], saved: OptimizerState) -> dict[str, dict[str, Entry]]:
    """Group entries named `<parameter>.<key>` by parameter and key. Both may contain dots."""
    parameters = {name for group in saved.param_groups for name in group["params"]}
    found: dict[str, dict[str, Entry]] = {}
    for flat, entry in entries.items():
        cut = len(flat)
        while (cut := flat.rfind(".", 0, cut)) > 0:
            if flat[:cut] in parameters:
                found.setdefault(flat[:cut], {})[flat[cut + 1 :]] = entry
                break
    return found


@torch.no_grad()
def _target(entry: Entry, parameter: nn.Parameter, on_cpu: bool, present: Any) -> torch.Tensor:
    """Return a tensor for one entry of a parameter's state: `present` if it matches, otherwise a new tensor."""
    device = torch.device("cpu") if on_cpu else parameter.device
    sharded = entry.size == tuple(parameter.shape) and bool(entry.size)
    if isinstance(present, torch.Tensor) and type(present) is (type(parameter.data) if sharded else torch.Tensor):
        alike = tuple(present.shape) == entry.size and present.dtype == entry.dtype and present.is_contiguous()
        if alike and present.device == (parameter.device if sharded else device):
            return present
    if sharded:
        return torch.empty_like(parameter, dtype=entry.dtype, memory_format=torch.preserve_format)
    return torch.empty(entry.size, dtype=entry.dtype, device=device)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    if isinstance(value, list):
        return [_moved(item, device) for item in value]
    return value

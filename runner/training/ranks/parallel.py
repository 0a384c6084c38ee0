"""Run a model on several ranks: DistributedDataParallel or FSDP2, with gradient accumulation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from runner.system.distributed import World

T = TypeVar("T")
AT_A_TIME = 1 << 23
"""Maximum number of elements in one message. A larger tensor is sent in a separate message."""


def place(model: nn.Module, strategy: str, world: World, device: torch.device) -> nn.Module:
    """Move `model` to `device`. Shard it over several ranks if the strategy is `fsdp`."""
    model = model.to(device)
    if world.size == 1 or strategy != "fsdp":
        return model
    return sharded(model, world.size, device)


def sharded(model: nn.Module, ranks: int, device: torch.device) -> nn.Module:
    """Shard `model` over the `ranks` ranks of the default process group (fully_shard).

    Each module in `model.blocks`, if there are any, is a separate FSDP2 group. All other parameters form one group. The
    grouping does not affect checkpoints.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (ranks,))
    for block in getattr(model, "blocks", []):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


class Computation(nn.Module):
    """A task's computation from a model and a batch, wrapped as a module, so that it may call any part of the model."""

    def __init__(self, model: nn.Module, compute: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.model = model
        self.compute = compute

    def forward(self, batch: Any) -> Any:
        """Compute the outputs. In a mapping, all outputs except the loss are detached.

        DDP would wait for the gradients of every output that is not detached.
        """
        outputs = self.compute(self.model, batch)
        if not isinstance(outputs, Mapping):
            return outputs
        return {
            key: value.detach() if key != "loss" and isinstance(value, torch.Tensor) else value
            for key, value in outputs.items()
        }


def synchronized(computation: Computation, world: World, device: torch.device) -> nn.Module:
    """Wrap `computation` so that gradients are averaged over the ranks. A single rank or FSDP2 needs no wrapper."""
    if world.size == 1 or _is_sharded(computation.model):
        return computation
    from torch.nn.parallel import DistributedDataParallel

    # Without find_unused_parameters, DDP rebuilds its buckets after the first iteration, in the order in which
    # gradients arrived. With three or more ranks, a gradient's position in its bucket determines the order in which the
    # ranks' values are added. So the first step after a resume would differ in the last bit.
    wrapped = DistributedDataParallel(
        computation, device_ids=[device.index] if device.type == "cuda" else None, find_unused_parameters=True
    )
    # SharedBuffers sends the buffers. In older versions of torch, such as 2.11, the constructor's argument has a
    # different name and meaning.
    wrapped.broadcast_buffers = False
    return wrapped


def _is_sharded(model: nn.Module) -> bool:
    """Check whether FSDP2 shards a model, without importing FSDP2, which is slow.

    Another thread may be importing FSDP2 for a save. In that case, no model is sharded yet.
    """
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return kind is not None and isinstance(model, kind)


@contextmanager
def accumulating(computation: nn.Module | None, last: bool) -> Iterator[None]:
    """All-reduce gradients only in the last micro-batch of a step.

    Args:
        computation: module from `synchronized`, or None if the backward pass does not reduce gradients.
        last: True for the last micro-batch of the step.
    """
    wrapped: Any = computation
    if isinstance(computation, Computation) and _is_sharded(computation.model):
        wrapped.model.set_requires_gradient_sync(last)
        yield
    elif not last and hasattr(wrapped, "no_sync"):
        with wrapped.no_sync():
            yield
    else:
        yield


def total_norm(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm of all gradients of `parameters`, the same on every rank."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm: Any = torch.nn.utils.get_total_norm(gradients)
    total: torch.Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # a DTensor with FSDP2
    return total


@torch.no_grad()
def average_gradients(parameters: Sequence[torch.Tensor], world: World) -> None:
    """Replace the gradients of an unwrapped model with their means over all ranks.

    A parameter that has no gradient on any rank gets none. If only some ranks have a gradient, it is treated as 0 on
    the other ranks.
    """
    if world.size == 1:
        return
    present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32)
    used = [p for p, ranks in zip(parameters, world.sum(present).tolist(), strict=True) if ranks]
    for group in alike(used):
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in group])
        parts = torch.split(world.sum(flat).div_(world.size), [p.numel() for p in group])
        for parameter, part in zip(group, parts, strict=True):
            parameter.grad = part.view_as(parameter)


def alike(tensors: Iterable[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    """Group `tensors` by dtype and device, keeping their order."""
    kinds: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return kinds.values()


def packed(items: Iterable[T], most: int, size: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield lists of consecutive `items` whose total size is at most `most`. A larger item is in a separate list."""
    pack: list[T] = []
    total = 0
    for item in items:
        if pack and total + size(item) > most:
            yield pack
            pack, total = [], 0
        pack.append(item)
        total += size(item)
    if pack:
        yield pack


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[torch.Tensor], world: World) -> None:
    """Set `tensors` on all ranks to the values of rank 0.

    Raises:
        PeerError: another rank has exited or does not respond.
    """
    portions = (portion for kind in alike(tensors) for portion in packed(kind, AT_A_TIME, torch.Tensor.numel))
    for group in portions if world.size > 1 else ():
        flat = world.broadcast_tensor(torch.cat([tensor.detach().reshape(-1) for tensor in group]))
        for tensor, part in zip(group, torch.split(flat, [tensor.numel() for tensor in group]), strict=True):
            tensor.copy_(part.view_as(tensor))


class SharedBuffers:
    """Keep a model's persistent buffers, such as batch-norm statistics, equal on all ranks.

    Each rank updates the buffers from its samples, but a checkpoint has the buffers of rank 0. So rank 0 sends its
    buffers after every step, and a kill does not change them. (DistributedDataParallel would send them in the forward
    pass, but not in all micro-batches of a step, and too late for an evaluation of the unwrapped model.)

    Args:
        world: the ranks.
        model: the model, with or without wrappers. Buffers that are not saved are not sent.
    """

    def __init__(self, world: World, model: nn.Module) -> None:
        self._world = world
        self._places = [
            (module, name)
            for module in (model.modules() if world.size > 1 else ())
            for name in module._buffers
            if name not in module._non_persistent_buffers_set
        ]

    def synchronize(self) -> None:
        """Send rank 0's buffers to all ranks, if there are buffers and several ranks.

        Raises:
            PeerError: another rank has exited or does not respond.
        """
        # Look up the buffers each time, because a module may replace a buffer instead of changing it in place.
        found = {id(b): b for module, name in self._places if (b := module._buffers[name]) is not None}
        broadcast_tensors(found.values(), self._world)

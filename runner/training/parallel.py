"""A model on several ranks: DistributedDataParallel or FSDP2, and gradient accumulation with them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from runner.system.distributed import World


def wrap(model: nn.Module, strategy: str, world: World, device: torch.device) -> nn.Module:
    """`model` on `device`, wrapped by `ddp` or `fsdp` (fully_shard); a single rank needs neither.

    FSDP2 shards each of `model.blocks`, if there are any, and the rest as one group. Checkpoints are the same either
    way.
    """
    model = model.to(device)
    if world.size == 1:
        return model
    if strategy == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(device.type, (world.size,))
        for block in getattr(model, "blocks", []):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
    from torch.nn.parallel import DistributedDataParallel

    # Without find_unused_parameters DDP rebuilds its buckets after the first iteration, in the order in which gradients
    # arrived. From three ranks on, a gradient's place in its bucket decides the order in which the ranks' parts are
    # added, so the first step after a resume would differ in the last bit.
    return DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        forward_sync_buffers=False,
        find_unused_parameters=True,
    )


@contextmanager
def accumulating(model: nn.Module, last: bool) -> Iterator[None]:
    """Reduce gradients over ranks in the last micro-batch of a step only."""
    wrapped: Any = model
    if hasattr(wrapped, "set_requires_gradient_sync"):
        wrapped.set_requires_gradient_sync(last)
        yield
    elif not last and hasattr(wrapped, "no_sync"):
        with wrapped.no_sync():
            yield
    else:
        yield


def total_norm(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of all gradients of `parameters`, one number on every rank."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm: Any = torch.nn.utils.get_total_norm(gradients)
    total: torch.Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # a DTensor under FSDP2
    return total


@torch.no_grad()
def average_gradients(parameters: Sequence[torch.Tensor], world: World) -> None:
    """Replace the gradients of a model that is not wrapped by their means over all ranks.

    A parameter without a gradient on every rank keeps none; on some, it counts as 0 there.
    """
    if world.size == 1:
        return
    present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32)
    used = [p for p, ranks in zip(parameters, world.sum(present).tolist(), strict=True) if ranks]
    for kind in dict.fromkeys((p.dtype, p.device) for p in used):
        group = [p for p in used if (p.dtype, p.device) == kind]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in group])
        parts = torch.split(world.sum(flat).div_(world.size), [p.numel() for p in group])
        for parameter, part in zip(group, parts, strict=True):
            parameter.grad = part.view_as(parameter)


@torch.no_grad()
def copy_buffers(model: nn.Module, world: World) -> None:
    """Give every rank the floating-point buffers of rank 0 (running statistics), as DistributedDataParallel does."""
    if world.size == 1:
        return
    for buffer in model.buffers():
        if buffer.is_floating_point():
            if not world.is_main:
                buffer.zero_()
            world.sum(buffer)

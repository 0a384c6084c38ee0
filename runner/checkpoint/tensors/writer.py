"""Write tensors: assign chunks to ranks, and write one file per rank.

The planner of torch.distributed.checkpoint decides which rank writes which chunk. Replicated tensors are written once,
divided among the ranks. Importing the planner takes a second or two, so it happens in `warm_up` or at the first save.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from runner.checkpoint.files.store import FileRecord, Writer
from runner.checkpoint.tensors import layout
from runner.checkpoint.tensors.layout import Part
from runner.checkpoint.tensors.staging import Collected, Tensors, local
from runner.errors import CheckpointError
from runner.system.distributed import World

_IMPORTING = threading.Lock()


def warm_up() -> None:
    """Import the modules that the first save needs. Call this in the background during the first steps.

    This holds a lock, because two threads that import modules of one package in different orders would deadlock. Python
    breaks such a deadlock by letting one thread continue with a partially imported module.
    """
    with _IMPORTING:
        import torch.distributed.checkpoint  # noqa: F401


@dataclass(frozen=True)
class WritePlan:
    """The assignment of chunks to ranks for a save.

    Attributes:
        signature: signature of the tensors that the plan is for, see `signature_of`.
        parts: chunks that this rank writes, in the order of its file.
        header: first bytes of this rank's file.
        index: on rank 0, the content of the index.
    """

    signature: Any
    parts: tuple[Part, ...]
    header: bytes
    index: bytes

    @cached_property
    def names(self) -> frozenset[str]:
        """Return the flat names of the tensors that this rank writes a chunk of."""
        return frozenset(part.name for part in self.parts)


def signature_of(tensors: Tensors) -> Any:
    """Return the properties that a plan depends on: names, shapes, dtypes and placements, not values."""
    return tuple(
        (name, tensor.shape, tensor.dtype, getattr(tensor, "placements", None)) for name, tensor in tensors.items()
    )


def make_plan(collected: Collected, signature: Any, world: World) -> WritePlan:
    """Agree with all ranks on which rank writes which chunk. Values are not read.

    Raises:
        CheckpointError: a tensor is sparse or quantized.
    """
    for name, tensor in collected.tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise CheckpointError(f"{name} is a {tensor.layout} tensor, which cannot be saved: make it a dense one")
    warm_up()
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    planner = DefaultSavePlanner()
    planner.set_up_planner(collected.nested, None, world.is_main)
    plans = world.gather_on_main(planner.create_local_plan())

    def assign() -> list[list[Part]]:
        assigned, _ = planner.create_global_plan(plans)
        return [layout.arranged(_part(item) for item in plan.items) for plan in assigned]

    parts_by_rank = world.run_on_main(assign)
    own = tuple(parts_by_rank[world.rank])
    return WritePlan(signature, own, layout.header(own), layout.index(parts_by_rank) if world.is_main else b"")


def _part(item: Any) -> Part:
    """Convert an item of torch's plan to a chunk."""
    data = item.tensor_data
    shape, offsets, sizes = (tuple(map(int, each)) for each in (data.size, data.chunk.offsets, data.chunk.sizes))
    return Part(item.index.fqn, data.properties.dtype, shape, offsets, sizes)


def write_tensors(new: Writer, rank: int, plan: WritePlan, tensors: Tensors) -> dict[str, FileRecord]:
    """Write the chunks of `rank` into one file.

    Returns:
        The file's record, keyed by its name. Empty if the rank has nothing to write.

    Raises:
        OSError: the file system returned an error.
    """
    if not plan.parts:
        return {}

    def fill(file: Any) -> None:
        file.write(plan.header)
        for part in plan.parts:
            tensor = local(tensors[part.name]).resolve_conj().resolve_neg().cpu().contiguous()
            assert tensor.nbytes == part.nbytes, part
            file.write(layout.memory(tensor))

    name = layout.file_name(rank)
    return {name: new.write(name, fill)}

"""Writes tensors in the format of torch.distributed.checkpoint, with checksums.

torch's planner decides which rank writes which chunk (replicas are divided among ranks, not written twice), and any
tool that reads its format can read the files. Importing torch.distributed.checkpoint takes a second or two, so this
module does it in `warm_up` or at the first save.
"""

from __future__ import annotations

import pickle
import threading
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from runner.checkpoint.commit import HashingFile, write_file
from runner.checkpoint.manifest import FileRecord
from runner.checkpoint.reader import METADATA
from runner.checkpoint.staging import Collected, Tensors, local
from runner.system.distributed import World

_IMPORTING = threading.Lock()


def warm_up() -> None:
    """Import what the first save needs; best done in the background during the first steps.

    Two threads that import modules of one package at once, in different orders, would wait for each other; Python then
    lets one of them continue with a module that is not complete.
    """
    with _IMPORTING:
        import torch.distributed.checkpoint  # noqa: F401


@dataclass(frozen=True)
class WritePlan:
    """Which rank writes which chunk.

    Attributes:
        signature: what the plan was made for, see `signature_of`.
        items: the planner's items for this rank.
        metadata: on rank 0, the metadata of all tensors.
    """

    signature: Any
    items: tuple[Any, ...]
    metadata: Any

    @cached_property
    def names(self) -> frozenset[str]:
        """Flat names of the tensors of which this rank writes a chunk."""
        return frozenset(item.index.fqn for item in self.items)


def signature_of(tensors: Tensors) -> Any:
    """What a plan depends on: names, shapes, dtypes and placements, not values."""
    return tuple(
        (name, tensor.shape, tensor.dtype, getattr(tensor, "placements", None)) for name, tensor in tensors.items()
    )


def make_plan(collected: Collected, signature: Any, world: World) -> WritePlan:
    """Agree with all ranks on who writes what; reads no values."""
    warm_up()
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    planner = DefaultSavePlanner()
    planner.set_up_planner(collected.nested, None, world.is_main)
    plans = world.gather_on_main(planner.create_local_plan())
    metadata: Any = None

    def assign() -> list[Any]:
        nonlocal metadata
        assigned, metadata = planner.create_global_plan(plans)
        return assigned

    items = tuple(world.run_on_main(assign)[world.rank].items)
    return WritePlan(signature, items, metadata)


def write_chunks(
    directory: Path, rank: int, plan: WritePlan, tensors: Tensors
) -> tuple[dict[str, FileRecord], list[tuple[Any, Any]]]:
    """Write the chunks of `rank` into one durable file.

    Returns:
        The file's record by name (empty if the rank has nothing to write), and the location of each chunk for the
        metadata.

    Raises:
        OSError: the file system refused.
    """
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    if not plan.items:
        return {}, []
    name = f"__{rank}_0.distcp"
    locations = []

    def fill(file: HashingFile) -> None:
        for item in plan.items:
            start = file.tell()
            tensor = local(tensors[item.index.fqn]).to("cpu")
            if tensor.untyped_storage().nbytes() != tensor.nbytes or not tensor.is_contiguous():
                tensor = tensor.clone(memory_format=torch.contiguous_format)
            torch.save(tensor, file)  # type: ignore[arg-type]
            locations.append((item.index, _StorageInfo(name, start, file.tell() - start)))

    return {name: write_file(directory / name, fill)}, locations


def write_metadata(directory: Path, plan: WritePlan, locations: list[tuple[Any, Any]]) -> FileRecord:
    """Write `.metadata`: which chunk of which tensor is where."""
    metadata = replace(plan.metadata, storage_data=dict(locations), storage_meta=None, version="1.0.0")
    return write_file(directory / METADATA, lambda file: pickle.dump(metadata, file))

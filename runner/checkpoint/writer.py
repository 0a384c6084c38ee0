"""Writes tensors in the format of torch.distributed.checkpoint, from copies, with checksums.

torch's planner decides which rank writes which piece (replicas are shared out, not written twice), and
the files can be read by any tool that reads its format. Importing torch.distributed.checkpoint takes a
second or two: this module does it in `warm_up` or at the first save, not when it is imported.
"""

from __future__ import annotations

import pickle
import threading
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from runner.checkpoint.archive import METADATA
from runner.checkpoint.commit import HashingFile, write_file
from runner.checkpoint.exchange import Exchange
from runner.checkpoint.manifest import FileRecord
from runner.checkpoint.staging import Collected, Tensors, local

_IMPORTING = threading.Lock()


def warm_up() -> None:
    """Import what the first save needs; good to do in the background while the first steps run.

    Two threads that import the modules of one package at once, in another order, would wait for each other; Python
    then lets one of them go on with a module that is not there yet.
    """
    with _IMPORTING:
        import torch.distributed.checkpoint  # noqa: F401


@dataclass(frozen=True)
class Plan:
    """Who writes what: the items of this rank, and (rank 0) the metadata of the whole."""

    signature: Any
    items: tuple[Any, ...]
    metadata: Any

    @cached_property
    def names(self) -> frozenset[str]:
        """Flat names of the tensors of which this rank writes a piece."""
        return frozenset(item.index.fqn for item in self.items)


def signature_of(tensors: Tensors) -> Any:
    """What a plan depends on: names, shapes, dtypes and placements, not values."""
    return tuple(
        (name, tensor.shape, tensor.dtype, getattr(tensor, "placements", None)) for name, tensor in tensors.items()
    )


def make_plan(collected: Collected, signature: Any, exchange: Exchange) -> Plan:
    """Agree with all ranks on who writes what. Looks at shapes only, not at values."""
    warm_up()
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    planner = DefaultSavePlanner()
    planner.set_up_planner(collected.nested, None, exchange.is_main)
    plans = exchange.gather(planner.create_local_plan())

    def globally() -> tuple[list[Any], Any]:
        return planner.create_global_plan(plans)

    shared, metadata = exchange.together(globally, only_main=True)
    items = tuple(shared[exchange.rank].items)
    return Plan(signature, items, metadata if exchange.is_main else None)


def file_name(rank: int) -> str:
    """The file of one rank's pieces."""
    return f"__{rank}_0.distcp"


def write_pieces(
    directory: Path, rank: int, plan: Plan, tensors: Tensors
) -> tuple[dict[str, FileRecord], list[tuple[Any, Any]]]:
    """Write this rank's pieces into one durable file.

    Returns:
        The file's record by name (none if this rank has nothing to write), and each piece's place for
        the metadata.

    Raises:
        OSError: the file system refused.
    """
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    if not plan.items:
        return {}, []
    name = file_name(rank)
    places = []

    def fill(file: HashingFile) -> None:
        for item in plan.items:
            start = file.tell()
            tensor = local(tensors[item.index.fqn]).to("cpu")
            if tensor.untyped_storage().nbytes() != tensor.nbytes or not tensor.is_contiguous():
                tensor = tensor.clone(memory_format=torch.contiguous_format)
            torch.save(tensor, file)  # type: ignore[arg-type]
            places.append((item.index, _StorageInfo(name, start, file.tell() - start)))

    return {name: write_file(directory / name, fill)}, places


def write_metadata(directory: Path, plan: Plan, places: list[tuple[Any, Any]]) -> FileRecord:
    """Write `.metadata`: which piece of which tensor is where."""
    metadata = replace(plan.metadata, storage_data=dict(places), storage_meta=None, version="1.0.0")
    return write_file(directory / METADATA, lambda file: pickle.dump(metadata, file))

"""Runs a function on several ranks, each of which is a process."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

from torch.multiprocessing.spawn import start_processes


def on_ranks(function: Callable[..., None], ranks: int, *args: Any) -> None:
    """Run `function(rank, *args)` in one process per rank, forked from one that has imported torch."""
    multiprocessing.set_forkserver_preload(
        ["torch", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torchmetrics"]
    )
    start_processes(function, args, nprocs=ranks, start_method="forkserver")  # type: ignore[no-untyped-call]

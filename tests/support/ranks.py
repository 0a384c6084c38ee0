"""Run functions or runs on several ranks, each a process."""

from __future__ import annotations

import faulthandler
import multiprocessing
import socket
from collections.abc import Callable
from typing import Any

import zygote
from runs import Run
from torch.multiprocessing.spawn import start_processes

HANGS_S = 400.0
"""Ranks that take longer print their threads' stacks before the test ends them as hanging."""


PRELOADED = ["torch", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torchmetrics"]


def on_ranks(function: Callable[..., None], ranks: int, *args: Any) -> None:
    """Run `function(rank, *args)` in one process per rank, forked from a process that has imported torch."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    start_processes(_rank, (function, args), nprocs=ranks, start_method="forkserver")  # type: ignore[no-untyped-call]


def exit_codes(function: Callable[..., None], ranks: int, *args: Any) -> list[int | None]:
    """Run `function` on ranks that may fail without ending the others. Return the exit codes."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=_rank, args=(rank, function, args)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()  # `_rank` ends a rank that hangs
    return [process.exitcode for process in processes]


def _rank(rank: int, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    faulthandler.dump_traceback_later(HANGS_S, exit=True)
    function(rank, *args)
    faulthandler.cancel_dump_traceback_later()


def start_ranks(run: Run, ranks: int, **env: str) -> list[zygote.Forked]:
    """Start the processes of `ranks` ranks without torchrun, so that each has a separate status and output."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    words = [*run.overrides, f"run.dir={run.path}"]
    return [
        zygote.start(words, {**run.environment(), **env, **where, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]

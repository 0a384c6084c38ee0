"""Several ranks, each of which is a process: a function, or a run."""

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
"""Ranks that take longer print what their threads are doing, before the test is ended as one that hangs."""


PRELOADED = ["torch", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torchmetrics"]


def on_ranks(function: Callable[..., None], ranks: int, *args: Any) -> None:
    """Run `function(rank, *args)` in one process per rank, forked from one that has imported torch."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    start_processes(_rank, (function, args), nprocs=ranks, start_method="forkserver")  # type: ignore[no-untyped-call]


def exit_codes(function: Callable[..., None], ranks: int, *args: Any) -> list[int | None]:
    """The same where ranks may fail, which ends no other; how each has ended."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=_rank, args=(rank, function, args)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()  # `_rank` ends it if it hangs
    return [process.exitcode for process in processes]


def _rank(rank: int, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    faulthandler.dump_traceback_later(HANGS_S, exit=True)
    function(rank, *args)
    faulthandler.cancel_dump_traceback_later()


def start_ranks(run: Run, ranks: int, **env: str) -> list[zygote.Forked]:
    """The processes of `ranks` ranks, without torchrun, so that each has its own status and output."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    words = [*run.overrides, f"run.dir={run.path}"]
    return [
        zygote.start(words, {**run.environment(), **env, **where, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]

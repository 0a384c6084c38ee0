"""Several ranks, each of which is a process: a function, or a run."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from runs import ROOT, Run
from torch.multiprocessing.spawn import start_processes


def on_ranks(function: Callable[..., None], ranks: int, *args: Any) -> None:
    """Run `function(rank, *args)` in one process per rank, forked from one that has imported torch."""
    multiprocessing.set_forkserver_preload(
        ["torch", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torchmetrics"]
    )
    start_processes(function, args, nprocs=ranks, start_method="forkserver")  # type: ignore[no-untyped-call]


def start_ranks(run: Run, ranks: int, **env: str) -> list[subprocess.Popen[str]]:
    """The processes of `ranks` ranks, without torchrun, so that each has its own status and output."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "tests" / "support"), **env}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "runner", *run.overrides, f"run.dir={run.path}"],
            cwd=ROOT,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]

"""Train, save and resume a bf16 model of 1 GB with AdamW (3 GB of state), in one process and under FSDP on gloo.

For each number of ranks, processes train three steps without saving. Others do the same and save after two of them, and
others load the newest checkpoint. Peak memory is summed over all ranks, less the memory of a process before it creates
a model. The memory that saving adds is compared with one copy of the saved bytes; the total is compared with the state
(weights, gradients, the optimizer's tensors) plus that copy. Loading has no gradients and no copy. Without a save, the
excess is torch's: gathered weights and gradients of a block in each rank, temporary tensors of the update.

`python -m benchmarks.large 0.1` has weights of 0.1 GB.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.results import RECORDED, table
from runner.checkpoint import TrainStateManager, build_train_state
from runner.checkpoint.tensors.staging import local

RANKS = (1, 2, 4)
WIDTH, INNER = 2048, 8192
LIMIT = 1.2


def build(gigabytes: float, world: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build blocks of two linear layers; shard them before they have memory."""
    blocks = max(round(gigabytes * 1e9 / (4 * WIDTH * INNER)), 1)
    with torch.device("meta"):
        model: nn.Module = nn.Sequential(
            *[nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH)) for _ in range(blocks)]
        ).to(torch.bfloat16)
    if world > 1:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        for block in model:  # type: ignore[attr-defined]
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            local(parameter).uniform_(-0.02, 0.02)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return this rank's part of the saved tensors."""
    state = [value for entries in optimizer.state.values() for value in entries.values()]
    return [local(tensor) for tensor in (*model.parameters(), *state)]


def size(some: list[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in some)


def checksum(some: list[torch.Tensor]) -> int:
    """Return the sum of all bits, taken as integers; the same however they are sharded."""
    words = {2: torch.int16, 4: torch.int32}
    flat = (tensor.reshape(-1).view(words[tensor.element_size()]) for tensor in some)
    parts = (part for tensor in flat for part in torch.split(tensor, 1 << 20))
    return sum(int(part.sum(dtype=torch.int64)) for part in parts)


def resident(which: str = "VmRSS") -> int:
    """Return the bytes of memory that this process has now."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(which))
    return int(line.split()[1]) * 1024


def peak() -> int:
    """Return this process's peak memory, without the parent process's peak that getrusage would include."""
    return resident("VmHWM")


def work(phase: str, gigabytes: float, folder: Path) -> dict[str, Any]:
    """Run one rank of one phase; return its measurements."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world > 1:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/{phase}", rank=rank, world_size=world
        )
    manager = TrainStateManager(folder / "checkpoints", keep_last=1)
    manager.warm_up()
    before = resident()
    torch.manual_seed(rank)
    model, optimizer = build(gigabytes, world)
    phases: dict[str, Callable[..., dict[str, Any]]] = {
        "none": train,
        "save": partial(train, saving=True),
        "load": load,
    }
    found = phases[phase](model, optimizer, manager)
    everything = tensors(model, optimizer)
    found |= {"peak": peak() - before, "saved": size(everything)}
    if world > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    return found


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, manager: TrainStateManager, saving: bool = False
) -> dict[str, Any]:
    stall, gradients, saved = 0.0, 0, 0
    for step in range(1, 4):
        model(torch.randn(16, WIDTH, dtype=torch.bfloat16)).float().square().mean().backward()
        manager.finish_copy()
        stall = manager.last_save["stall_s"] if manager.last_save else 0.0
        optimizer.step()
        gradients = size([local(p.grad) for p in model.parameters() if p.grad is not None])
        optimizer.zero_grad()
        if step < 3 and saving:
            saved = checksum(tensors(model, optimizer))
            assert manager.save(step, model, optimizer, build_train_state(step, step), copy_later=True)
    manager.wait()
    assert manager.last_error is None, manager.last_error
    write = manager.last_save["write_s"] if manager.last_save else 0.0
    return {"gradients": gradients, "checksum": saved, "stall": stall, "write": write}


def load(model: nn.Module, optimizer: torch.optim.Optimizer, manager: TrainStateManager) -> dict[str, Any]:
    start = time.perf_counter()
    state = manager.load(model, optimizer)
    seconds = time.perf_counter() - start
    assert state is not None
    assert state["step"] == 2
    return {"checksum": checksum(tensors(model, optimizer)), "seconds": seconds}


def run(phase: str, gigabytes: float, ranks: int, folder: Path) -> list[dict[str, Any]]:
    """Run one phase in new processes; return each rank's measurements."""
    command = [sys.executable, "-m", "benchmarks.large", phase, str(gigabytes), str(folder)]
    threads = str(max((os.cpu_count() or 1) // ranks, 1))
    processes = [
        subprocess.Popen(
            command,
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": threads},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate()[0] for process in processes]
    assert not any(process.returncode for process in processes), f"{phase} on {ranks} ranks failed"
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def total(found: list[dict[str, Any]], key: str) -> Any:
    return sum(each[key] for each in found)


def report(gigabytes: float, ranks: int, folder: Path) -> None:
    folder.mkdir()
    plain, trained = (run(phase, gigabytes, ranks, folder) for phase in ("none", "save"))
    newest = folder / "checkpoints" / "step_00000002"
    sizes = [path.stat().st_size for path in newest.iterdir()]
    loaded = run("load", gigabytes, ranks, folder)
    assert total(trained, "checksum") == total(loaded, "checksum"), "what was loaded is not what was saved"
    saved, gradients = total(trained, "saved"), total(trained, "gradients")
    found, column = RECORDED["large"], f"{ranks} rank{'s' * (ranks > 1)}"
    found.add("state saved", column, saved / 1e9, "GB")
    found.add("files", column, len(sizes), "files")
    found.add("bytes of the files / of the tensors", column, sum(sizes) / saved, at_most=1.01)
    more = total(trained, "peak") - total(plain, "peak")
    found.add("peak memory, what saving adds / one copy", column, more / saved, at_most=LIMIT)
    whole = 2 * saved + gradients
    found.add(
        "peak memory, training and saving / state and one copy", column, total(trained, "peak") / whole, at_most=LIMIT
    )
    found.add("peak memory, training without saving / state", column, total(plain, "peak") / (saved + gradients))
    found.add("peak memory, loading / what is loaded", column, total(loaded, "peak") / saved, at_most=LIMIT)
    found.add("stall", column, max(each["stall"] for each in trained), "s")
    found.add("durable after", column, max(each["write"] for each in trained), "s")
    found.add("loaded and verified in", column, max(each["seconds"] for each in loaded), "s")


def main() -> None:
    if sys.argv[1:2] in (["none"], ["save"], ["load"]):
        print(json.dumps(work(sys.argv[1], float(sys.argv[2]), Path(sys.argv[3]))))
        return
    table("large", "bf16 model with AdamW")
    for ranks in RANKS:
        with tempfile.TemporaryDirectory() as folder:
            report(float(sys.argv[1]) if len(sys.argv) > 1 else 1.0, ranks, Path(folder) / "run")


if __name__ == "__main__":
    main()

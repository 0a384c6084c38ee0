"""A checkpoint of any number of ranks loads on any other number, under DDP and FSDP2, bit for bit."""

from __future__ import annotations

import json
import logging
import os
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import FINGERPRINT, Clockwork
from ranks import on_ranks
from torch import nn

from runner.checkpoint.files import manifest as manifests
from runner.checkpoint.files.directory import Folder
from runner.checkpoint.tensors.compare import compare_checkpoints
from runner.errors import CheckpointError

pytestmark = pytest.mark.slow


class Splitting(Clockwork):
    """A position per rank, whose sum is kept when the number of ranks changes."""

    def aggregate_state_dict(self, states: list[dict[str, int]]) -> dict[str, Any]:
        return {"sum": sum(state["position"] for state in states)}

    def deaggregate_state_dict(self, aggregated: dict[str, Any], rank: int, world: int) -> dict[str, int]:
        whole, rest = divmod(aggregated["sum"], world)
        return {"position": whole + (rank < rest)}


class Net(nn.Module):
    """A model with sizes that no number of ranks divides, a scalar and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(7, 7), nn.Linear(7, 7)])
        self.head = nn.Linear(7, 5, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        out: torch.Tensor = self.head(x) * self.scale
        return out


def whole(tensor: torch.Tensor) -> list[float]:
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return [float(value) for value in full.detach().double().flatten()]


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return all values of model and optimizer by name; called on all ranks."""
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    values: dict[str, Any] = {name: whole(value) for name, value in inner.state_dict().items()}
    for name, parameter in inner.named_parameters():
        for key, value in sorted(optimizer.state[parameter].items()):
            values[f"{name}:{key}"] = whole(value)
    values["lr"] = [group["lr"] for group in optimizer.param_groups]
    return values


def build(strategy: str, world: int, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model: nn.Module = Net()
    if world > 1 and strategy == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block)
        fully_shard(model)
    elif world > 1:
        model = nn.parallel.DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def attempt(rank: int, world: int, strategy: str, directory: str, number: int) -> None:
    """Make one attempt on `world` ranks: load, train two steps, save, and write down what was loaded and saved."""
    from runner.checkpoint import TrainStateManager, build_train_state, restore_train_state

    if world > 1:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{directory}/rendezvous{number}", rank=rank, world_size=world
        )
    model, optimizer = build(strategy, world, seed=number)
    manager = TrainStateManager(Path(directory) / "checkpoints", fingerprint=FINGERPRINT)
    loader, step = Splitting(10 * rank), 0
    state = manager.load(model, optimizer)
    if state is not None:
        step, _, _ = restore_train_state(state, dataloader=loader)
    loaded = everything(model, optimizer)
    rng = torch.rand(2).tolist()
    for _ in range(2):
        torch.manual_seed(1000 * rank + step)
        optimizer.zero_grad()
        model(torch.randn(3, 7)).square().mean().backward()
        optimizer.step()
        step += 1
    manager.save(step, model, optimizer, build_train_state(step, step, None, loader), wait=number % 2 == 0)
    manager.wait()
    assert manager.last_error is None, manager.last_error
    note = {"loaded": loaded, "saved": everything(model, optimizer), "step": step, "rng": rng, "at": loader.position}
    (Path(directory) / f"note-{number}-{rank}.json").write_text(json.dumps(note))
    if world > 1:
        torch.distributed.barrier()
        del model  # torch sometimes waits for ever if an object that it synchronizes outlives the group
        torch.distributed.destroy_process_group()


def notes(directory: Path, number: int, world: int) -> list[dict[str, Any]]:
    return [json.loads((directory / f"note-{number}-{rank}.json").read_text()) for rank in range(world)]


@pytest.mark.parametrize("strategies", [("ddp",) * 4, ("fsdp",) * 4, ("fsdp", "ddp", "fsdp", "ddp")])
def test_four_ranks_then_two_then_one_then_three(tmp_path: Path, strategies: tuple[str, ...]) -> None:
    before: list[dict[str, Any]] = []
    for number, (world, strategy) in enumerate(zip((4, 2, 1, 3), strategies, strict=True)):
        on_ranks(attempt, world, world, strategy, str(tmp_path), number)
        now = notes(tmp_path, number, world)
        assert all(note["step"] == 2 * (number + 1) for note in now)
        assert len({tuple(note["rng"]) for note in now}) == (world if before else 1)
        assert sum(note["at"] for note in now) == 60
        if before:
            for note in now:
                assert note["loaded"] == before[0]["saved"]
        before = now
    files = {path.name for path in (tmp_path / "checkpoints" / "step_00000008").iterdir()}
    assert {
        "tensors.json",
        "manifest.json",
        "train_state.pt",
        "rank_00000.safetensors",
        "rank_00001.safetensors",
    } <= files


def stepping(rank: int, directory: str, number: int, last: int) -> None:
    """Load, then train to step `last` with a save after each step. A save depends on the step alone."""
    from runner.checkpoint import TrainStateManager, build_train_state, restore_train_state

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{directory}/rendezvous{number}", rank=rank, world_size=2
    )
    for strategy in ("ddp", "fsdp"):
        model, optimizer = build(strategy, 2, seed=number)
        manager = TrainStateManager(Path(directory) / strategy, keep_last=9)
        step, _, _ = restore_train_state(manager.load(model, optimizer) or {})
        if step == 0:
            random.seed(rank)
            np.random.seed(rank)
            model, optimizer = build(strategy, 2, seed=7)
        while step < last:
            torch.manual_seed(100 * rank + step)
            optimizer.zero_grad()
            model(torch.randn(3, 7)).square().mean().backward()
            optimizer.step()
            step += 1
            assert manager.save(step, model, optimizer, build_train_state(step, step, None, Splitting(rank)), wait=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_a_resumed_run_and_an_undisturbed_one_save_the_same(tmp_path: Path) -> None:
    """Compare all of the two checkpoints, even the order of a list of names."""
    for name, ends in {"whole": [2], "resumed": [1, 2]}.items():
        (tmp_path / name).mkdir()
        for number, last in enumerate(ends):
            on_ranks(stepping, 2, str(tmp_path / name), number, last)
    for strategy in ("ddp", "fsdp"):
        one, two = (Folder(tmp_path / name / strategy / "step_00000002") for name in ("whole", "resumed"))
        compared = compare_checkpoints(one, two, (manifests.read(one), manifests.read(two)))
        assert compared.differences == []
        assert compared.tensors > 10


def lending(rank: int, directory: str) -> None:
    """Save after each step, once at once and once with copies made when the next update waits for them."""
    from runner.checkpoint import TrainStateManager, build_train_state
    from runner.checkpoint.tensors.copying import Copy

    torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=2)
    awaited, complete, postponed = threading.Event(), Copy.complete, [0]

    def late(copy: Copy) -> None:
        assert awaited.wait(60)
        awaited.clear()
        postponed[0] += len(copy._copied_later)
        complete(copy)

    Copy.complete = late  # type: ignore[assignment,method-assign]
    for strategy in ("ddp", "fsdp"):
        model, optimizer = build(strategy, 2, seed=1)
        direct = TrainStateManager(Path(directory) / strategy / "direct", keep_last=9)
        later = TrainStateManager(Path(directory) / strategy / "later", keep_last=9)
        for step in range(1, 5):
            torch.manual_seed(100 * rank + step)
            optimizer.zero_grad()
            model(torch.randn(3, 7)).square().mean().backward()
            awaited.set() if later.copying else None
            later.finish_copy()
            optimizer.step()
            state = build_train_state(step, step, None, Splitting(rank))
            assert direct.save(step, model, optimizer, state, wait=True)
            awaited.set() if step > 1 else None
            later.wait()
            awaited.clear()
            later.save(step, model, optimizer, state, copy_later=True)
        awaited.set()
        later.wait()
        assert later.last_error is None
        assert postponed[0] > 0
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_shards_copied_late_are_those_of_the_save(tmp_path: Path) -> None:
    on_ranks(lending, 2, str(tmp_path))
    for strategy in ("ddp", "fsdp"):
        for step in range(1, 5):
            one, two = (Folder(tmp_path / strategy / kind / f"step_{step:08d}") for kind in ("direct", "later"))
            compared = compare_checkpoints(one, two, (manifests.read(one), manifests.read(two)))
            assert compared.differences == []
            assert compared.tensors > 10


class LogCapture(logging.Handler):
    """A handler that keeps log messages."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def broken(rank: int, directory: str) -> None:
    """Break the disk of rank 1: all ranks continue, none waits, the next save is intact."""
    import errno

    from faults import failing, intercepted

    from runner.checkpoint import TrainStateManager, build_train_state

    torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=2)
    model, optimizer = build("ddp", 2, 0)
    warnings = LogCapture()
    logging.getLogger("runner").addHandler(warnings)
    manager = TrainStateManager(Path(directory) / "checkpoints")
    manager.warm_up()
    with intercepted(failing(1, errno.EIO) if rank == 1 else None):
        assert not manager.save(1, model, optimizer, build_train_state(1, 0), wait=True)
    assert manager.last_error is not None
    assert ("Input/output error (rank 1)" if rank == 0 else "Input/output error") in manager.last_error
    assert len(warnings.messages) == (1 if rank == 0 else 0)
    torch.distributed.barrier()
    assert not list((Path(directory) / "checkpoints").iterdir())
    torch.distributed.barrier()
    assert manager.save(2, model, optimizer, build_train_state(2, 0), wait=True)
    assert manager.load(model, optimizer)
    os.truncate(Path(directory) / "checkpoints" / "step_00000002" / "rank_00001.safetensors", 3) if rank == 1 else None
    torch.distributed.barrier()
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        TrainStateManager(Path(directory) / "checkpoints").load(model, optimizer)
    torch.distributed.destroy_process_group()


def test_an_error_on_one_rank_fails_the_save_on_all(tmp_path: Path) -> None:
    on_ranks(broken, 2, str(tmp_path))

"""Check DistributedDataParallel and FSDP2 over NCCL on one rank: start, save, resume.

A run with one rank uses neither, so this module assembles the parts of a run: the module in its wrapper, steps, saves.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.gpu import sizes
from benchmarks.gpu.report import Report
from benchmarks.results import Table, table
from runner.checkpoint import TrainStateManager, build_train_state
from runner.checkpoint.tensors.compare import tensor_difference
from runner.checkpoint.tensors.staging import bare, local
from runner.config.schema import Config, TrainConfig
from runner.models.loss import next_token_loss
from runner.system.distributed import World
from runner.training.exactness import make_exact
from runner.training.model.optimizers import Optimizers
from runner.training.ranks.parallel import sharded
from runner.training.step.step import Drawn, Forward, TrainStep
from runner.training.step.tasks import Task

SAVED, STEPS = 3, 6
BACKEND = "cpu:gloo,cuda:nccl" if sizes.ON_GPU else "gloo"


def ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)


def fsdp(model: nn.Module) -> nn.Module:
    return sharded(model, 1, sizes.DEVICE)


class Ranked:
    """A wrapped model with its optimizer. The batch of a step depends on the number of the step alone."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module], seed: int) -> None:
        torch.manual_seed(seed)
        self.model = wrap(sizes.SIZE.model())
        optimizer = sizes.fused_adamw(self.model)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        self.optimizers = Optimizers.of_one(self.model, optimizer, schedule)
        task = Task.of(next_token_loss)
        forward = Forward(World(), sizes.DEVICE, self.model, task, sizes.autocast)
        self._step = TrainStep(forward, self.optimizers, [], clip_norm=1.0)

    def train(self, begin: int, end: int) -> list[float]:
        """Make the steps from `begin` to `end` and return their losses."""
        losses = []
        for step in range(begin, end):
            torch.manual_seed(step)
            losses.append(self._step(lambda: Drawn(sizes.batch(sizes.SIZE.small_batch)), step).loss)
        return losses

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: local(tensor) for name, tensor in bare(self.model).state_dict().items()}


def saved_and_resumed(name: str, wrap: Callable[[nn.Module], nn.Module], folder: Path, found: Table) -> None:
    """Train with a save on the way, resume from it with a new model, and compare the last weights."""
    one = Ranked(wrap, seed=0)
    one.train(0, SAVED)
    manager = TrainStateManager(folder / name)
    manager.save(SAVED, one.model, one.optimizers, build_train_state(SAVED, 0, one.optimizers))
    losses = one.train(SAVED, STEPS)
    manager.wait()
    if manager.last_error:
        raise RuntimeError(manager.last_error)
    two = Ranked(wrap, seed=1)
    state = TrainStateManager(folder / name).load(two.model, two.optimizers)
    if state is None:
        raise RuntimeError("no checkpoint was found")
    two.optimizers.load_state_dict(state["scheduler"])
    again = two.train(SAVED, STEPS)
    pairs = [(tensor, two.tensors()[name]) for name, tensor in one.tensors().items()]
    wrong = sum(tensor_difference(*pair) is not None for pair in pairs)
    found.add(name, "tensors", len(pairs), "tensors")
    found.add(name, "that differ after a resume", wrong, "tensors", at_most=0)
    if wrong or losses != again:
        raise RuntimeError(f"{wrong} of {len(pairs)} tensors differ after a resume; losses {losses} and {again}")


def main(report: Report, folder: Path) -> None:
    """Check both wrappers in a process group of one."""
    found = table("gpu-ranks", "one rank, saved at step 3, resumed, ended at step 6")
    make_exact(Config(train=TrainConfig(deterministic=True)), sizes.DEVICE)
    if sizes.ON_GPU:
        torch.cuda.set_device(0)
    with tempfile.NamedTemporaryFile(dir=folder) as store:
        dist.init_process_group(BACKEND, init_method=f"file://{store.name}.store", rank=0, world_size=1)
        over = "NCCL" if sizes.ON_GPU else "gloo"
        for name, wrap in (("DDP", ddp), ("FSDP2", fsdp)):
            title = f"{name} over {over}"
            report.step(title, partial(saved_and_resumed, title, wrap, folder, found))
        dist.destroy_process_group()

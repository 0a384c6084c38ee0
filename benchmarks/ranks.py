"""Measure rank-invariant steps, against DistributedDataParallel's and, on one rank, against plain accumulation.

Both sides make the same steps (forward, backward, exchange, norm, SGD) of two equal GPTs in the same processes, in
turns. A figure is the median over the turns of the ratio of their times on rank 0. Traffic is counted: the bytes that a
rank passes to collectives for other ranks, per step and parameter. A ring all-reduce sends 2 (N - 1) / N values.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import cycle
from multiprocessing import SimpleQueue, get_context
from typing import Any

import torch
from torch.multiprocessing.spawn import spawn

from benchmarks.results import Table, table
from benchmarks.timing import seconds
from exactdata.order.batch_shape import BatchShape
from launch.rendezvous import free_port
from runner.models.gpt import GPT
from runner.models.loss import next_token_loss
from runner.system.distributed import World
from runner.training.model.optimizers import Optimizers
from runner.training.step.counting import NONE_STATED
from runner.training.step.invariant import FixedMicroBatches
from runner.training.step.step import Drawn, Forward, TrainStep
from runner.training.step.tasks import Batch, Task

Messages = list[tuple[int, torch.Tensor]]
CPU = torch.device("cpu")
# By number of parameters: layers, heads and width of the GPT, sequences and tokens of a micro-batch, steps in a turn.
SIZES = {
    10**5: (2, 2, 64, 8, 32, 20),
    10**7: (4, 4, 448, 4, 64, 2),
    10**8: (6, 8, 1176, 1, 64, 1),
}
TURNS = 15
RANKS = (1, 2, 4)
PER_RANK = (1, 3)  # micro-batches
GOALS = {1: 1.02, 2: 1.15, 4: 1.15}


def train_step(
    model: GPT,
    world: World,
    micro_batches: int,
    sequences: int,
    invariant: bool,
    device: torch.device,
    precision: Callable[[], AbstractContextManager[Any]],
) -> TrainStep:
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    optimizers = Optimizers.of_one(model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0))
    task = Task.of(next_token_loss)
    shape = BatchShape.dealt(0, world.size, sequences, micro_batches)
    division = FixedMicroBatches(world, model, task, optimizers, shape, 0, device) if invariant else None
    forward = Forward(world, device, model, task, precision)
    return TrainStep(forward, optimizers, [], micro_batches // world.size, 1.0, NONE_STATED, None, division)


def turn_of(step: TrainStep, source: Iterator[Drawn], steps: int) -> Callable[[], None]:
    def turn() -> None:
        for index in range(1, steps + 1):
            step(lambda: next(source), index)

    return turn


def sides(
    world: World,
    make: Callable[[], GPT],
    batch: Batch,
    micro_batches: int,
    steps: int,
    device: torch.device = CPU,
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, Callable[[], None]]:
    """Return a turn of each side, of `steps` steps over one batch.

    Args:
        world: the ranks.
        make: creates the model, on the device.
        batch: `input_ids` and `labels`, on the device.
        micro_batches: micro-batches of a step.
        steps: steps in a turn.
        device: device of the models.
        precision: context of the forward passes.
    """
    made = {}
    for name in ("invariant", "usual"):
        torch.manual_seed(0)
        step = train_step(make(), world, micro_batches, len(batch["labels"]), name == "invariant", device, precision)
        source = cycle([Drawn(batch)])
        step(partial(next, source), 0)  # the checks of the first one
        made[name] = turn_of(step, source, steps)
    return made


def sides_of(world: World, parameters: int, micro_batches: int) -> dict[str, Callable[[], None]]:
    """Return the sides of a GPT with `parameters` parameters, on a CPU."""
    layers, heads, width, sequences, tokens, steps = SIZES[parameters]
    drawn = torch.randint(256, (sequences, tokens + 1))
    batch = {"input_ids": drawn[:, :-1], "labels": drawn[:, 1:]}
    return sides(world, lambda: GPT(256, tokens, layers, heads, width), batch, micro_batches, steps)


def traffic(turn: Callable[[], None], steps: int) -> float:
    """Return the bytes that this rank sends to others in a rank-invariant step."""
    sent, original = 0, World.exchange

    def counting(world: World, receive: Messages, send: Messages, tag: int = 0) -> Callable[[], None]:
        nonlocal sent
        sent += sum(part.numel() * part.element_size() for _, part in send)
        return original(world, receive, send, tag)

    World.exchange = counting  # type: ignore[method-assign, assignment]
    turn()
    World.exchange = original  # type: ignore[method-assign]
    return sent / steps


def on_rank(rank: int, ranks: int, port: int, parameters: int, micro_batches: int, results: SimpleQueue[Any]) -> None:
    """Run one rank; rank 0 reports parameters, ms of a usual step, ratio, bytes sent, and bytes of a ring."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    world = World(rank, ranks)
    world.start(CPU)
    turns = sides_of(world, parameters, micro_batches)
    times: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(TURNS):
        for name, turn in turns.items():
            world.sum(torch.zeros(1))
            times[name].append(seconds(turn))
    sent = traffic(turns["invariant"], SIZES[parameters][-1]) if ranks > 1 else 0.0
    if world.is_main:
        ratio = statistics.median(a / b for a, b in zip(times["invariant"], times["usual"], strict=True))
        step_ms = 1000 * statistics.median(times["usual"]) / SIZES[parameters][-1]
        exact = sum(p.numel() for p in GPT(256, SIZES[parameters][4], *SIZES[parameters][:3]).parameters())
        ring = 8 * exact * (ranks - 1) / ranks
        results.put((exact, step_ms, ratio, sent, sent / ring if ring else 0.0))
    world.stop()


def main() -> None:
    """Add a row for each number of parameters, ranks and micro-batches."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks")
    parser.add_argument("--parameters", type=lambda text: int(float(text)), nargs="*", default=list(SIZES))
    parser.add_argument("--ranks", type=int, nargs="*", default=list(RANKS))
    options = parser.parse_args(sys.argv[1:] if __name__ == "__main__" else [])
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # read when a rank imports torch
    found = table("ranks", "parameters, ranks, micro-batches")
    for parameters in options.parameters:
        for ranks in options.ranks:
            for micro_batches in [ranks * each for each in PER_RANK]:
                results = get_context("spawn").SimpleQueue()
                arguments = ranks, free_port(), parameters, micro_batches, results
                spawn(on_rank, arguments, ranks)  # type: ignore[no-untyped-call]
                add(found, ranks, micro_batches, *results.get())


def add(
    found: Table, ranks: int, micro_batches: int, exact: int, step_ms: float, ratio: float, sent: float, ring: float
) -> None:
    row = f"{exact:,}, {ranks}, {micro_batches}"
    found.add(row, "usual step", step_ms, "ms")
    found.add(row, "ratio", ratio, at_most=GOALS[ranks])
    if ranks > 1:
        found.add(row, "sent by a rank", sent / 1e6, "MB")
        found.add(row, "of a ring all-reduce", ring)


if __name__ == "__main__":
    main()

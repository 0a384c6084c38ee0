"""Which rank failed is decided by what happened: two real ranks, one of which fails, is killed, or both fail."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from ranks import start_ranks
from runs import PACED, PATIENCE_S, ROOT, TINY, Run

pytestmark = pytest.mark.slow

RANK = """
import json, os, sys
import torch
from contextlib import nullcontext
from runner.errors import PeerError
from runner.system.distributed import World
from runner.training.optim import AdamW, LearningRateScheduler
from runner.training.optimizers import Optimizers
from runner.training.parallel import place
from runner.training.peers import report_failure, reported_failure
from runner.training.step import Drawn, Forward, TrainStep
from runner.training.tasks import Task

class Failing(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()
    @staticmethod
    def backward(context, gradient):
        raise RuntimeError("failed in backward")

class Unpicklable(Exception):
    def __init__(self, one, two):
        super().__init__(one)

kind, steps = sys.argv[1], []
world = World.from_environment()
world.start(torch.device("cpu"))

def loss(model, batch):
    steps.append(1)
    mine = len(steps) == 3 and (world.rank == 1 or kind == "both")
    if mine and kind == "forward":
        raise ValueError("failed in forward")
    if mine and kind == "killed":
        os.kill(os.getpid(), 9)
    output = model(batch)
    return (Failing.apply(output) if mine else output).square().mean(1)

def unpicklable():
    raise Unpicklable(1, 2)

result = {"error": None, "report": None}
try:
    if kind == "unpicklable":
        world.run_on_main(unpicklable)
    model = place(torch.nn.Linear(3, 3), "ddp", world, torch.device("cpu"))
    optimizer = AdamW(model.parameters(), 0.1)
    scheduler = LearningRateScheduler(optimizer, lambda step: 1.0)
    forward = Forward(world, torch.device("cpu"), model, Task.of(loss), nullcontext)
    step = TrainStep(forward, Optimizers.of_one(model, optimizer, scheduler), [])
    for _ in range(5):
        step(lambda: Drawn(torch.ones(2, 3)))
except PeerError as error:
    result = {"error": "PeerError", "report": reported_failure(world)}
except Exception as error:
    report_failure(world, f"{type(error).__name__}: {error}")
    result = {"error": type(error).__name__, "report": None}
print(json.dumps(result), flush=True)
world.stop()
"""


def outcomes(kind: str) -> list[dict[str, Any] | None]:
    """What each of two ranks raised, and the report that it found; None for one that was killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(RANK), kind],
            cwd=ROOT,
            env={**common, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=200)[0] for rank in ranks]
    return [json.loads(output) if output else None for output in outputs]


@pytest.mark.parametrize(
    ("kind", "error", "reason"),
    [("forward", "ValueError", "failed in forward"), ("backward", "RuntimeError", "failed in backward")],
)
def test_a_rank_that_fails_is_named_to_the_others_with_its_reason(kind: str, error: str, reason: str) -> None:
    report = f"rank 1 failed: {error}: {reason}"
    assert outcomes(kind) == [{"error": "PeerError", "report": report}, {"error": error, "report": None}]


def test_a_rank_that_is_killed_is_a_lost_peer() -> None:
    assert outcomes("killed") == [{"error": "PeerError", "report": None}, None]


def test_ranks_that_all_fail_in_the_same_step_fail_by_themselves() -> None:
    assert outcomes("both") == [{"error": "RuntimeError", "report": None}] * 2


def test_an_exception_that_cannot_be_unpickled_reaches_the_other_ranks() -> None:
    report = "rank 0 failed: Unpicklable: 1"
    assert outcomes("unpicklable") == [
        {"error": "Unpicklable", "report": None},
        {"error": "PeerError", "report": report},
    ]


def test_the_status_names_the_rank_that_failed_and_why(tmp_path: Path) -> None:
    fault = tmp_path / "fault"
    fault.write_text("fail")
    run = Run(
        tmp_path / "run", [*TINY, PACED, "+train.loss.fail_at=6", "train.steps=20", "eval.every_steps=0"], ranks=2
    )
    run.env = {"FAIL_FILE": str(fault), "FAIL_RANK": "1"}
    run.start()
    status, output = run.wait()
    assert status == 1, output
    assert run.status()["reason"] == "rank 1 failed: RuntimeError: failed on purpose"
    assert [attempt["cause"] for attempt in run.attempts()] == ["crash"]


@pytest.mark.parametrize("short", [0, 1])
def test_a_rank_that_runs_out_of_data_is_named_by_every_rank(short: int, tmp_path: Path) -> None:
    """Whichever it is: an error that ends the job, and no finished run."""
    overrides = [*TINY, "data=own", f"+data.loader={{_target_: uneven.OnePass, short: {short}, batches: 5}}"]
    run = Run(tmp_path / "run", [*overrides, "train.steps=60", "eval.every_steps=0", "checkpoint.every_steps=3"])
    processes = start_ranks(run, 2)
    outputs = [process.communicate(timeout=PATIENCE_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [1, 1], outputs
    ended = f"the data of rank {short} ended at step 5, after 40 samples: give every rank as many batches"
    assert all(ended in output for output in outputs), outputs
    (attempt,) = run.attempts()
    assert ended in attempt["reason"]
    assert attempt["end_step"] == 5
    assert run.status()["state"] == "failed"
    assert not (run.path / "finished.json").exists()

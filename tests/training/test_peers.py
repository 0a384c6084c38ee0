"""Which rank failed follows from events: one of two real ranks fails or is killed, or both fail."""

from __future__ import annotations

import json
import os
import signal
import socket
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import exit_codes, start_ranks
from runs import PACED, PATIENCE_S, TINY, Run
from torch import nn

from runner.errors import PeerError
from runner.system.distributed import World
from runner.training.model.optimizers import Optimizers
from runner.training.model.schedulers import LearningRateScheduler
from runner.training.optim import AdamW
from runner.training.ranks.parallel import place
from runner.training.ranks.peers import report_failure, reported_failure
from runner.training.step.step import Drawn, Forward, TrainStep
from runner.training.step.tasks import Task

pytestmark = pytest.mark.slow


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("failed in backward")


class UnpicklableError(Exception):
    def __init__(self, one: object, two: object) -> None:
        super().__init__(one)


def train(world: World, kind: str) -> None:
    """Make five steps, the third of which fails on rank 1 or on both."""
    calls: list[int] = []

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        mine = len(calls) == 3 and (world.rank == 1 or kind == "both")
        if mine and kind == "forward":
            raise ValueError("failed in forward")
        if mine and kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        output: torch.Tensor = model(batch)
        if mine:
            output = Failing.apply(output)  # type: ignore[no-untyped-call]
        return output.square().mean(1)

    def unpicklable() -> None:
        raise UnpicklableError(1, 2)

    if kind == "unpicklable":
        world.run_on_main(unpicklable)
    model = place(nn.Linear(3, 3), "ddp", world, torch.device("cpu"))
    optimizer = AdamW(model.parameters(), 0.1)
    scheduler = LearningRateScheduler(optimizer, lambda step: 1.0)
    forward = Forward(world, torch.device("cpu"), model, Task.of(loss), nullcontext)
    step = TrainStep(forward, Optimizers.of_one(model, optimizer, scheduler), [])
    for _ in range(5):
        step(lambda: Drawn(torch.ones(2, 3)))


def attempt(rank: int, port: int, kind: str, directory: str) -> None:
    """Train as one of two ranks; write down its exception and the report that it found."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="2", RANK=str(rank))
    world = World.from_environment()
    world.start(torch.device("cpu"))
    result: dict[str, Any] = {"error": None, "report": None}
    try:
        train(world, kind)
    except PeerError:
        result = {"error": "PeerError", "report": reported_failure(world)}
    except Exception as error:  # noqa: BLE001 whatever it raised is what the test compares
        report_failure(world, f"{type(error).__name__}: {error}")
        result = {"error": type(error).__name__, "report": None}
    (Path(directory) / f"{rank}.json").write_text(json.dumps(result))
    world.stop()


def outcomes(kind: str, directory: Path) -> list[dict[str, Any] | None]:
    """Return each rank's exception and the report that it found; None for a killed rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    codes = exit_codes(attempt, 2, port, kind, str(directory))
    assert codes == [0, -signal.SIGKILL if kind == "killed" else 0]
    files = [directory / f"{rank}.json" for rank in range(2)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


@pytest.mark.parametrize(
    ("kind", "error", "reason"),
    [("forward", "ValueError", "failed in forward"), ("backward", "RuntimeError", "failed in backward")],
)
def test_failed_rank_is_named_to_the_others_with_its_reason(kind: str, error: str, reason: str, tmp_path: Path) -> None:
    report = f"rank 1 failed: {error}: {reason}"
    assert outcomes(kind, tmp_path) == [{"error": "PeerError", "report": report}, {"error": error, "report": None}]


def test_a_rank_that_is_killed_is_a_lost_peer(tmp_path: Path) -> None:
    assert outcomes("killed", tmp_path) == [{"error": "PeerError", "report": None}, None]


def test_ranks_that_fail_in_one_step_blame_no_other_rank(tmp_path: Path) -> None:
    assert outcomes("both", tmp_path) == [{"error": "RuntimeError", "report": None}] * 2


def test_unpicklable_exception_reaches_the_other_ranks(tmp_path: Path) -> None:
    report = "rank 0 failed: UnpicklableError: 1"
    assert outcomes("unpicklable", tmp_path) == [
        {"error": "UnpicklableError", "report": None},
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
    """Any rank may run out: this is an error that ends the job, and no finished run."""
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

"""What an attempt restores before its first step, and what it states then."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import here
import pytest
from composing import compose
from recorders import Bar, recorder_of

from runner.data.order.batch_shape import BatchShape
from runner.rundir.attempt_log import AttemptLog
from runner.rundir.paths import RunDir
from runner.system.distributed import World
from runner.training.session import _Opening


def steps(run: Path) -> list[dict[str, Any]]:
    """The records of the training steps."""
    return [record for record in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "loss" in record]


@pytest.mark.slow
def test_a_resumed_run_continues_its_schedule_and_its_optimizer(tmp_path: Path) -> None:
    """In the middle of the warmup: a schedule that began anew would have a much lower learning rate."""
    schedule = ["scheduler.warmup_steps=4", "scheduler.total_steps=6", "eval.every_steps=0"]
    whole = here.trained(tmp_path / "whole", *schedule)
    run = here.trained(tmp_path / "run", *schedule, "train.steps=3")
    assert len(steps(run)) == 3
    here.trained(run, *schedule)
    assert steps(run) == steps(whole)
    assert len({record["lr"] for record in steps(run)}) > 3


def test_loggers_that_show_what_run_this_is_are_told(tmp_path: Path) -> None:
    """In each attempt; others need no such method."""
    loggers = [f"+logger.{name}._target_=recorders.{name.title()}" for name in ("plain", "informed")]
    for attempt in (1, 2):
        run = here.trained(tmp_path / "run", *loggers, f"train.steps={attempt}", "eval.every_steps=0")
        assert run.with_suffix(".about").read_text() == f"attempt {attempt}"


@pytest.mark.parametrize(
    ("before", "ranks", "where"),
    [(None, 1, ""), (1, 1, ""), (None, 2, " on 2 ranks"), (2, 2, " on 2 ranks"), (2, 1, " on 1 rank (2 before)")],
)
def test_the_first_line_states_the_number_of_ranks(tmp_path: Path, before: int | None, ranks: int, where: str) -> None:
    """Where it is more than one, or another one than before."""
    run = RunDir(tmp_path)
    if before is not None:
        AttemptLog.begin(run, {"ranks": before}, 10, lambda record: "killed").end("preempted", 0)
    log = AttemptLog.begin(run, {"ranks": ranks}, 10, lambda record: "killed")
    recorder = recorder_of(run)
    config = compose(["train.steps=10", "eval.every_steps=0", "checkpoint.every_steps=5"]).config
    _Opening(run, config, World(0, ranks), log, None, None)._show_start(recorder, 5, log)
    assert isinstance(recorder.bar, Bar)
    assert recorder.bar.said == [f"resuming at step 5 of 10{where} in {run.path}"]


@pytest.mark.parametrize(("ranks", "idle"), [(1, 0), (5, 0), (6, 0), (8, 2)])
def test_ranks_without_work_are_reported_with_the_remedy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ranks: int, idle: int
) -> None:
    """And only then: a step has 6 micro-batches here."""
    opening = _Opening(RunDir(tmp_path), compose([]).config, World(0, ranks), None, None, None)
    with caplog.at_level(logging.WARNING):
        opening._warn_of_idle_ranks(BatchShape.dealt(0, ranks, 8, 6))
    messages = [f"{idle} of {ranks} ranks have nothing to do: a step has 6 micro-batches; lower train.batch_size=8, "]
    assert [record.message for record in caplog.records] == [f"{text}or use fewer ranks" for text in messages if idle]


def test_ranks_that_all_compute_as_many_micro_batches_have_work(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    opening = _Opening(RunDir(tmp_path), compose([]).config, World(0, 8), None, None, None)
    opening._warn_of_idle_ranks(BatchShape(0, 8, 4))
    assert caplog.records == []

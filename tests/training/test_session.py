"""What an attempt restores and logs before its first step."""

from __future__ import annotations

import json
import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import here
import pytest
import torch
from composing import compose
from recorders import Bar, recorder_of

from exactdata.order.batch_shape import BatchShape
from runner.config.schema import ForkConfig
from runner.errors import MismatchError, UserError
from runner.metrics.lineage import Fork
from runner.rundir.attempt_log import AttemptLog
from runner.rundir.paths import RunDir
from runner.system.distributed import World
from runner.training import branch
from runner.training.branch import fitting
from runner.training.data.order import warn_of_idle_ranks
from runner.training.data.training_data import open_training_data
from runner.training.evaluation import evaluation
from runner.training.records.profiler import Profiler
from runner.training.records.run_state import RunState
from runner.training.records.start import lineage, show_start
from runner.training.session import _Opening


def steps(run: Path) -> list[dict[str, Any]]:
    """Return the records of the training steps."""
    return [record for record in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "loss" in record]


@pytest.mark.slow
def test_a_resumed_run_continues_its_schedule_and_its_optimizer(tmp_path: Path) -> None:
    """Resume within the warmup: a schedule that began anew would have a much lower learning rate."""
    schedule = ["scheduler.warmup_steps=4", "scheduler.total_steps=6", "eval.every_steps=0"]
    whole = here.trained(tmp_path / "whole", *schedule)
    run = here.trained(tmp_path / "run", *schedule, "train.steps=3")
    assert len(steps(run)) == 3
    here.trained(run, *schedule)
    assert steps(run) == steps(whole)
    assert len({record["lr"] for record in steps(run)}) > 3


def test_run_resumed_in_a_later_phase_draws_with_its_weights(tmp_path: Path) -> None:
    """A seeded sampler receives the last step's weights before its state is restored."""
    mixture = ["data=mixture", "sampler=mixture", "eval.every_steps=0", "scheduler.total_steps=3", "train.steps=3"]
    phases = ["+phases.first={start_step: 0}", "+phases.then={start_step: 1, weights: {code: 3}}"]
    whole = here.trained(tmp_path / "whole", *mixture, *phases)
    run = here.trained(tmp_path / "run", *mixture, *phases, "train.steps=2")
    here.trained(run, *mixture, *phases)
    assert steps(run) == steps(whole)


def test_loggers_that_show_the_run_are_informed_of_it(tmp_path: Path) -> None:
    """Call the method in each attempt; other loggers need no such method."""
    loggers = [f"+logger.{name}._target_=recorders.{name.title()}" for name in ("plain", "informed")]
    for attempt in (1, 2):
        run = here.trained(tmp_path / "run", *loggers, f"train.steps={attempt}", "eval.every_steps=0")
        assert run.with_suffix(".about").read_text() == f"attempt {attempt}"


@pytest.mark.parametrize(
    ("before", "ranks", "where"),
    [(None, 1, ""), (1, 1, ""), (None, 2, " on 2 ranks"), (2, 2, " on 2 ranks"), (2, 1, " on 1 rank (2 before)")],
)
def test_the_first_line_states_the_number_of_ranks(tmp_path: Path, before: int | None, ranks: int, where: str) -> None:
    """The line states it if it is above one, or has changed."""
    run = RunDir(tmp_path)
    if before is not None:
        AttemptLog.begin(run, {"ranks": before}, 10, lambda record: "killed").end("preempted", 0)
    log = AttemptLog.begin(run, {"ranks": ranks}, 10, lambda record: "killed")
    recorder = recorder_of(run)
    recorder.log = log
    config = compose(["train.steps=10", "eval.every_steps=0", "checkpoint.every_steps=5"]).config
    show_start(recorder, config, 5, ranks)
    assert isinstance(recorder.bar, Bar)
    assert recorder.bar.said == [f"resuming at step 5 of 10{where} in {run.path}"]


def opening_of(path: Path, *words: str, **fork: Any) -> _Opening:
    """Return a function that opens a session of a tiny run or of a branch in this process."""
    config = compose([*here.SHORT, f"run.dir={path}", *words]).config
    config.fork = ForkConfig(**fork)
    return _Opening(RunDir(path), config, World(), None, None, None)


def test_draws_of_held_out_data_agree_across_attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The restored generators do not affect the draws, and do not move."""
    drawn: list[float] = []

    def draw(*_: Any) -> list[Any]:
        drawn.append(torch.rand(1).item())
        return []

    monkeypatch.setattr(evaluation, "build_metrics", draw)
    opening = opening_of(tmp_path)
    for step in (1, 2):
        restored = opening._restored()
        torch.manual_seed(step)
        opening._assembled(restored)
        found = torch.rand(1)
        torch.manual_seed(step)
        assert torch.equal(found, torch.rand(1))
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize(("step", "recorded"), [(0, True), (3, True), (4, False)])
def test_remaining_steps_of_a_profile_are_recorded(step: int, recorded: bool, tmp_path: Path) -> None:
    config = compose(["train.profile='3:4'"]).config
    profiler = Profiler.open(config, RunDir(tmp_path), World(), None, step, torch.device("cpu"))
    assert ((profiler._first, profiler._last) == (3, 4)) == recorded


@pytest.mark.parametrize("keep_best", [0, 1])
def test_evaluations_need_a_best_number_only_if_kept(tmp_path: Path, keep_best: int) -> None:
    opening = opening_of(tmp_path, "checkpoint.best.metric=eval_mae", f"checkpoint.keep_best={keep_best}")
    made = opening.session().trainer.evaluation
    assert made is not None
    with pytest.raises(UserError, match=r"checkpoint\.best\.metric=eval_mae") if keep_best else nullcontext():
        assert made.judge(2, {"eval_loss": 1.0}) is None


def test_task_with_own_steps_is_not_trained_in_parts(tmp_path: Path) -> None:
    words = ["task=own", "task._target_=custom_tasks.Twice", "strategy=fsdp", "eval.every_steps=0"]
    with pytest.raises(UserError, match=r"Twice.* has take_step, .*: use strategy=ddp"):
        opening_of(tmp_path, *words)._restored()


def test_a_branch_states_its_trunk_and_step(tmp_path: Path) -> None:
    """The loggers receive it. Another run has none."""
    trunk, branch = RunDir(tmp_path / "run"), RunDir(tmp_path / "branch")
    config = compose([]).config
    assert lineage(trunk, config, None, 1).fork is None
    config.fork = ForkConfig(str(trunk.path), 4, "d")
    assert lineage(branch, config, trunk, 1).fork == Fork(trunk, 4, "d")


@pytest.mark.parametrize("begins", [True, False])
def test_unchangeable_settings_of_a_branch_name_their_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begins: bool
) -> None:
    """Name it at the beginning of the branch, where the remedy for the trunk's checkpoints would not help."""
    opening = opening_of(tmp_path, run="trunk", step=4)
    monkeypatch.setattr(branch, "newest_step", lambda run: 4 if begins else 6)
    error = "a branch of trunk at step 4 cannot change this: other weights; leave it as" if begins else "; restore it"
    with pytest.raises(UserError, match=error) as raised, fitting(opening.run, opening.config):
        raise MismatchError("other weights; restore it")
    assert isinstance(raised.value, MismatchError) != begins


def test_data_that_are_no_batch_are_refused_before_training() -> None:
    config = compose(["train.batch_size=9"]).config
    data, state = {"few": range(8)}, RunState({}, False, 1, (), {})
    with pytest.raises(UserError, match=r"train\.batch_size=9 is more than the 8 samples"):
        open_training_data(config, World(), data, torch.device("cpu"), state, None, 0)


@pytest.mark.parametrize(("ranks", "idle"), [(1, 0), (5, 0), (6, 0), (8, 2)])
def test_ranks_without_work_are_reported_with_the_remedy(
    caplog: pytest.LogCaptureFixture, ranks: int, idle: int
) -> None:
    """Report them only then: a step has 6 micro-batches here."""
    with caplog.at_level(logging.WARNING):
        warn_of_idle_ranks(BatchShape.dealt(0, ranks, 8, 6))
    messages = [f"{idle} of {ranks} ranks have nothing to do: a step has 6 micro-batches; lower train.batch_size=8, "]
    assert [record.message for record in caplog.records] == [f"{text}or use fewer ranks" for text in messages if idle]


def test_ranks_that_all_compute_as_many_micro_batches_have_work(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_idle_ranks(BatchShape(0, 8, 4))
    assert caplog.records == []

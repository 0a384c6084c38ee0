"""`train.epochs`: a number of passes over the data, whatever happens in between."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from composing import compose
from hypothesis import given
from hypothesis import strategies as st
from runs import PACED, TINY, Run, assert_same_run

from exactdata.order.batch_shape import BatchShape, position_at
from exactdata.samplers import SamplerKind
from runner.config.schema import Config, SamplerConfig, TrainConfig
from runner.data import order_file
from runner.errors import ExitStatus, UserError
from runner.rundir.attempt_log import Finish
from runner.rundir.paths import RunDir
from runner.training.data.epoch_steps import EpochSteps, exact
from runner.training.data.order import with_steps

OWN = [*TINY, PACED, "train.steps=null", "data=own", "checkpoint.every_steps=2"]
ONE = [*OWN, "+data.sources.rows={_target_:custom.Rows,length:24}"]
TWO = [*OWN, "sampler=elastic", "scheduler.total_steps=30"]
TWO += [f"+data.sources.{name}={{_target_:custom.Rows,length:{length}}}" for name, length in (("a", 30), ("b", 18))]


def step_records(run: Run) -> list[dict[str, Any]]:
    """Return the records of steps, without those of evaluations."""
    return [record for record in run.records() if "loss" in record]


def steps_of(kind: str, epochs: float, sizes: list[int], *shapes: BatchShape, drop_last: bool = True) -> int:
    sampler = SamplerConfig(kind=SamplerKind[kind], drop_last=drop_last)
    config = Config(train=TrainConfig(epochs=epochs), sampler=sampler)
    return with_steps(config, sizes, shapes).steps


@pytest.mark.parametrize(
    ("kind", "epochs", "sizes", "shape", "steps"),
    [
        ("distributed", 3, [24], BatchShape(0, 1, 4), 18),
        ("distributed", 3, [27], BatchShape(0, 1, 4), 18),  # the loader drops three samples in each epoch
        ("distributed", 2, [27], BatchShape(0, 2, 4), 6),
        ("distributed", 1, [24], BatchShape(0, 1, 4, 4), 1),
        ("distributed", 2, [24], BatchShape(0, 1, 4, 4), 3),  # a step may take batches of two epochs
        ("distributed", 0.5, [24], BatchShape(0, 1, 4), 3),
        ("mixture", 3, [20, 7], BatchShape(0, 1, 4), 20),
        ("elastic", 3, [20, 7], BatchShape(0, 2, 4), 10),
        ("elastic", 0.29, [100], BatchShape(0, 1, 1), 29),  # 0.29 * 100 is below 29 in floating point
    ],
)
def test_the_steps_of_epochs(kind: str, epochs: float, sizes: list[int], shape: BatchShape, steps: int) -> None:
    assert steps_of(kind, epochs, sizes, shape) == steps


@given(
    kind=st.sampled_from(["distributed", "mixture", "elastic"]),
    every=st.sampled_from([0.29, 0.3, 0.5, 1, 2, 2.5]),
    total=st.integers(12, 60),
    ranks=st.integers(1, 3),
    batch=st.integers(1, 4),
    change=st.integers(0, 20),
    larger=st.integers(1, 3),
)
def test_an_epoch_is_complete_after_one_step(
    kind: str, every: float, total: int, ranks: int, batch: int, change: int, larger: int
) -> None:
    """Check every multiple, also after a change of the batch shape."""
    shapes = [BatchShape(0, ranks, batch)]
    if kind == "elastic":
        shapes.append(BatchShape(change, ranks, batch * larger))
    config = Config(sampler=SamplerConfig(kind=SamplerKind[kind]))
    epochs = EpochSteps.of(config, [total], shapes)
    wanted, steps = set(), 0
    for multiple in count(1):
        while position_at(shapes, steps + 1) <= epochs.samples(multiple * exact(every)):
            steps += 1
        if steps > 40:
            break
        wanted.add(steps)
    assert [step for step in range(41) if epochs.completes(every, step)] == sorted(wanted - {0})


def test_samples_repeated_for_the_last_rank_count() -> None:
    assert steps_of("distributed", 1, [23], BatchShape(0, 2, 4)) == 2
    assert steps_of("distributed", 1, [23], BatchShape(0, 2, 4), drop_last=False) == 3


def test_remaining_samples_count_after_a_change_of_shape() -> None:
    assert steps_of("elastic", 2, [48], BatchShape(0, 1, 4), BatchShape(10, 2, 4)) == 10 + (96 - 40) // 8
    assert steps_of("elastic", 1, [48], BatchShape(0, 1, 4), BatchShape(20, 2, 4)) == 20  # all were consumed


def test_a_length_in_steps_stays() -> None:
    config = Config(train=TrainConfig(steps=7))
    assert with_steps(config, [], []) is config
    assert Config().steps == 300


def test_settings_beyond_the_steps_of_epochs_are_one_line() -> None:
    shape = BatchShape(0, 1, 4)
    with pytest.raises(UserError, match=r"train.epochs=0.1 of 24 samples is less than one step .*: raise train.epochs"):
        steps_of("distributed", 0.1, [24], shape)
    config = compose(["train.epochs=1", "checkpoint.keep_best=1", "scheduler.warmup_steps=6"]).config
    with pytest.raises(UserError) as error:
        with_steps(config, [24], [shape])
    warmup, evaluation = str(error.value).splitlines()
    assert "scheduler.warmup_steps=6 must be from 0 to below the 6 steps" in warmup
    assert "the first one is due at step 100 of 6" in evaluation


def test_a_mark_of_epochs_answers_for_epochs(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for mark, epochs, finished in (
        ({"steps": 12, "epochs": 2.0}, 2, True),
        ({"steps": 12, "epochs": 2.0}, 1.5, True),
        ({"steps": 12, "epochs": 2.0}, 3, False),
        ({"steps": 12}, 1, False),  # only the data could tell
        ({"steps": 12, "epochs": "x"}, 1, False),
        ({}, 1, False),
    ):
        run.finished.write_text(json.dumps(mark))
        assert Finish.of(run).covers(None, epochs) is finished
    run.finished.write_text('{"steps": 12, "epochs": 2.0}')
    assert Finish.of(run).covers(12, None)
    assert not Finish.of(run).covers(13, None)


@pytest.mark.slow
def test_extended_run_ends_after_its_last_epoch(tmp_path: Path) -> None:
    """Evaluate before the first step and twice in an epoch; save once."""
    held_out = [*(each for each in ONE if not each.startswith("checkpoint.")), "checkpoint.every_steps=null"]
    held_out += ["+data.eval_sources.held={_target_:custom.Rows,length:8}", "checkpoint.keep_last=9"]
    held_out += ["eval.at_start=true", "eval.every_steps=null", "eval.every_epochs=0.5", "checkpoint.every_epochs=1"]
    whole = Run(tmp_path / "whole", [*held_out, "train.epochs=3"])
    whole.finish()
    assert [path.name for path in whole.checkpoints()] == ["step_00000006", "step_00000012", "step_00000018"]
    evaluations = [json.loads(line)["step"] for line in whole.lines() if "eval_loss" in line]
    assert evaluations == [0, 3, 6, 9, 12, 15, 18]
    run = Run(tmp_path / "run", [*held_out, "train.epochs=3"])
    run.hold_at(9)
    run.start()
    assert run.kill_when(lambda run: run.idles())
    run.wait()
    run.finish()
    assert_same_run(run, whole)
    assert json.loads((run.path / "finished.json").read_text()) == {"steps": 18, "epochs": 3.0}
    assert step_records(run)[-1]["sources"]["rows"] == {"samples": 72, "epochs": 3.0}
    assert (run.status()["step"], run.status()["total"]) == (18, 18)
    assert order_file.read(RunDir(run.path).order).steps == 18
    attempts = len(run.attempts())
    assert "finished, all 18 steps" in run.finish()
    assert len(run.attempts()) == attempts  # nothing was started
    longer = Run(run.path, [*held_out, "train.epochs=3.5"])
    assert "resuming at step 18 of 21" in longer.finish()
    assert [record["step"] for record in step_records(run)][-3:] == [19, 20, 21]


@pytest.mark.slow
def test_another_global_batch_ends_after_the_same_samples(tmp_path: Path) -> None:
    """The schedule follows the remaining steps, although only the checkpoint knows how many were made."""
    overrides = [entry for entry in TWO if "total_steps" not in entry] + ["train.epochs=2"]
    overrides += [
        "+data.eval_sources.held={_target_:custom.Rows,length:8}",
        "eval.every_steps=null",
        "eval.every_epochs=1",
    ]
    first = Run(tmp_path / "run", [*overrides, "train.batch_size=4"])
    first.hold_at(8)
    first.start()
    assert first.kill_when(lambda run: run.idles())
    first.wait()
    saved = int(first.checkpoints()[-1].name.removeprefix("step_"))
    second = Run(first.path, [*overrides, "train.batch_size=8"])
    second.finish()
    steps = saved + (96 - 4 * saved) // 8
    last = step_records(second)[-1]
    assert last["step"] == steps
    evaluations = [json.loads(line)["step"] for line in second.lines() if "eval_loss" in line]
    assert evaluations == [saved + (48 - 4 * saved) // 8, steps]
    assert sum(source["samples"] for source in last["sources"].values()) == 4 * saved + 8 * (steps - saved)
    assert last["lr"] < 0.12 * max(record["lr"] for record in step_records(second))  # at the end of the cosine


@pytest.mark.slow
def test_less_than_a_step_leaves_nothing_behind(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", [*ONE, "train.epochs=0.01"])
    run.start()
    status, output = run.wait()
    assert status == ExitStatus.USAGE
    assert output.splitlines()[-1].startswith("error: train.epochs=0.01 of 24 samples is less than one step")
    assert not run.path.exists()


@pytest.mark.slow
def test_a_batch_larger_than_the_data_damages_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", [*ONE, "train.epochs=1"])
    run.finish()
    before = {path: path.read_bytes() for path in run.path.rglob("*") if "checkpoints" in path.parts and path.is_file()}
    metrics = run.lines()
    larger = replace(run, overrides=[*ONE, "train.steps=20", "train.batch_size=25"])
    larger.start()
    status, output = larger.wait()
    assert status == ExitStatus.USAGE
    assert "error: train.batch_size=25 is more than the 24 samples" in output
    assert run.lines() == metrics
    assert {path: path.read_bytes() for path in before} == before
    longer = replace(run, overrides=[*ONE, "train.epochs=2"])
    assert "resuming at step 6 of 12" in longer.finish()

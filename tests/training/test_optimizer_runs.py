"""Whole runs, killed and resumed: other groups, float16, an average of the weights, buffers on several ranks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from runs import PACED, TINY, Run, assert_same_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SHORT = [*TINY, "train.steps=12", "eval.every_steps=4", "checkpoint.every_steps=3"]
STEP_LR = ["scheduler=own", "scheduler._target_=torch.optim.lr_scheduler.StepLR", "scheduler.step_size=3"]
GROUPS = 'optimizer.groups=[{match: "blocks.*", lr: 1e-4}, {match: "positions*", freeze: true}]'
KINDS = {
    "all": [*STEP_LR, GROUPS, PACED, "train.precision=float16", "train.ema_decay=0.8", "model.dropout=0.1"],
    "normed": ["model._target_=custom.Normed", PACED],
    "normed and averaged": ["model._target_=custom.Normed", PACED, "train.ema_decay=0.8", "train.grad_accum_steps=2"],
}


def killed_and_resumed(path: Path, overrides: list[str], ranks: int, calls: int = 1) -> None:
    """Kill a run twice; its records and its last checkpoint are those of one that was not."""
    whole = Run(path / "whole", overrides, ranks=ranks)
    whole.finish()
    run = Run(path / "run", overrides, ranks=ranks)
    for until in (5, 9):
        run.hold_at(until, calls)
        run.start()
        assert run.kill_when(Run.idles)
        run.wait()
        run.release()
    run.finish()
    assert_same_run(run, whole)


def test_groups_float16_an_average_and_a_schedule_of_torch_resume_exactly(tmp_path: Path) -> None:
    killed_and_resumed(tmp_path, [*SHORT, *KINDS["all"]], ranks=1)


@pytest.mark.parametrize("kind", ["normed", "normed and averaged"])
def test_a_model_with_running_statistics_resumes_exactly_on_two_ranks(tmp_path: Path, kind: str) -> None:
    """An evaluation uses them on every rank, and a checkpoint holds those of rank 0."""
    killed_and_resumed(tmp_path, [*SHORT, *KINDS[kind]], ranks=2, calls=2 if "averaged" in kind else 1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_overflow_in_float16_skips_the_step_and_nothing_else(tmp_path: Path, ranks: int) -> None:
    """Although the run stops at a loss that is not finite."""
    loss = ["train.loss._target_=custom.overflow_at", "+train.loss.step=5", "train.on_nonfinite=stop"]
    run = Run(tmp_path / "run", [*SHORT, *loss, "train.precision=float16"], ranks=ranks)
    run.finish()
    records = [record for record in run.records() if "loss" in record]
    assert [record["step"] for record in records if record.get("skipped")] == [5]
    assert all(math.isfinite(record["loss"]) for record in records)
    assert len(records) == 12


def test_a_nan_stops_a_run_in_float16(tmp_path: Path) -> None:
    loss = ["train.loss._target_=custom.nan_at", "+train.loss.call=5", "train.precision=float16"]
    run = Run(tmp_path / "run", [*SHORT, *loss])
    run.start()
    status, output = run.wait()
    assert status == 1, output
    assert "the loss of step 5 is nan" in output

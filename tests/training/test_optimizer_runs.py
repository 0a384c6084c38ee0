"""Whole runs in float16: an overflow is skipped, a NaN stops the run."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from runs import TINY, Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SHORT = [*TINY, "train.steps=12", "eval.every_steps=4", "checkpoint.every_steps=3"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_overflow_in_float16_skips_the_step_and_nothing_else(tmp_path: Path, ranks: int) -> None:
    """Set the run to stop at a loss that is not finite."""
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

"""The second promise, with real ranks: a run resumed in another shape consumes exactly the remaining samples."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from runs import PACED, TINY, Run

COMMON = [
    *TINY,
    PACED,
    "data=mixture",
    "sampler=elastic",
    "train.global_batch_size=12",
    "train.steps=40",
    "eval.every_steps=0",
    "checkpoint.every_steps=6",
    "+phases.late={start_step: 17, weights: {prose: 5.0}}",
]


def records(run: Run) -> list[dict[str, Any]]:
    return [record for record in run.records() if "loss" in record]


@pytest.mark.timeout(1800)
@pytest.mark.promise("killed on 4 ranks, then on 2 and 1, ended on 3: every sample exactly once")
def test_four_ranks_then_two_one_and_three_see_the_same_samples(tmp_path: Path) -> None:
    """Change the batch of each rank but keep the global batch: same ledger, same loss up to rounding."""
    whole = Run(tmp_path / "whole", [*COMMON, "train.batch_size=12"])
    whole.finish()
    for ranks, batch, until in ((4, 3, 9), (2, 6, 16), (1, 4, 25)):
        run = Run(tmp_path / "run", [*COMMON, f"train.batch_size={batch}"], ranks=ranks)
        run.interrupt((until, signal.SIGKILL), calls=12 // (ranks * batch))
    Run(tmp_path / "run", [*COMMON, "train.batch_size=2"], ranks=3).finish()
    assert [r["step"] for r in records(run)] == list(range(1, 41))
    for ours, theirs in zip(records(run), records(whole), strict=True):
        for exact in ("step", "digest", "sources", "lr", "tokens_seen"):
            assert ours[exact] == theirs[exact]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    assert [attempt["cause"] for attempt in run.attempts()] == ["killed"] * 3 + ["finished"]
    assert [attempt["ranks"] for attempt in run.attempts()] == [4, 2, 1, 3]


@pytest.mark.slow
def test_another_global_batch_resumes_at_the_same_position(tmp_path: Path) -> None:
    """Continue the same sequence of samples with another global batch: none repeated, none lost."""
    common = [*COMMON, "phases.late.start_step=1000"]  # a phase would begin at another position
    first = Run(tmp_path / "run", [*common, "train.batch_size=12", "train.steps=10"])
    first.finish()
    shape = ["train.global_batch_size=20", "train.batch_size=5", "train.steps=16"]
    second = Run(first.path, [*common, *shape], ranks=2)
    second.finish()
    whole = Run(tmp_path / "whole", [*common, "train.batch_size=12", "train.steps=20"])
    whole.finish()
    assert records(second)[-1]["sources"] == records(whole)[-1]["sources"]
    assert 10 * 12 + 6 * 20 == 20 * 12
    assert records(second)[-1]["digest"] == records(whole)[-1]["digest"]


@pytest.mark.slow
def test_weights_edited_between_attempts_need_consent(tmp_path: Path) -> None:
    """Refuse changed weights, and name the change. If it is allowed, every source continues at its key."""
    run = Run(tmp_path / "run", [*COMMON, "train.batch_size=6", "train.steps=12"])
    run.finish()
    before = records(run)[-1]["sources"]
    edited = Run(run.path, [*COMMON, "train.batch_size=6", "train.steps=16", "sampler.weights.code=0"])
    edited.start()
    status, output = edited.wait()
    assert status == 2
    assert "run.allow_data_change" in output
    assert "sampler.weights.code" in output
    assert records(run)[-1]["step"] == 12
    edited.overrides.append("run.allow_data_change=true")
    edited.finish()
    after = records(edited)[-1]["sources"]
    assert after["code"] == before["code"]
    assert sum(after[s]["samples"] for s in after) == 16 * 12

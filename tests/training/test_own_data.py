"""A user's sampler, collate function, random sources and model in one run: killed, it ends the same."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from runs import PACED, ROOT, TINY, Run, assert_same_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

OWN = [
    *TINY,
    PACED,
    "data=own",
    "+data.sources={short: {_target_: padded.Sentences, size: 60, longest: 6}, "
    "long: {_target_: padded.Sentences, size: 40, longest: 12}}",
    "+data.eval_sources.held_out={_target_: padded.Sentences, size: 20, longest: 9}",
    "data.collate._target_=padded.pad",
    "sampler=own",
    "sampler._target_=orders.Shuffled",
    "sampler.salt=4",
    # Its running statistics are used on every rank, and rank 0's are saved; they are averaged, too.
    "model._target_=custom.Normed",
    "train.ema_decay=0.8",
    "train.batch_size=2",
    "train.grad_accum_steps=2",
    "train.steps=16",
    "eval.every_steps=8",
    "checkpoint.every_steps=5",
]


def inspected(run: Run, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "runner", "inspect", str(run.path), *arguments, "--json"]
    env = {**run.environment(), **run.env}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=env)


def test_killed_run_ends_the_same_with_other_workers(tmp_path: Path) -> None:
    whole = Run(tmp_path / "whole", OWN, ranks=2)
    whole.finish()
    run = Run(tmp_path / "run", [*OWN, "data.num_workers=1"], ranks=2)
    run.interrupt((7, signal.SIGKILL), (12, signal.SIGTERM), calls=2)
    run.overrides = OWN
    run.finish()
    assert_same_run(run, whole)
    last = next(record for record in reversed(whole.records()) if "loss" in record)["sources"]
    assert {name: counts["samples"] for name, counts in last.items()}.keys() == {"short", "long"}
    answer = inspected(whole, "--step", "14")
    assert answer.returncode == 0, answer.stderr
    rows = json.loads(answer.stdout)
    assert sorted({row["rank"] for row in rows}) == [0, 1]
    assert len({(row["source"], row["index"]) for row in rows}) == 8
    times = json.loads(inspected(whole, "--sample", f"{rows[0]['source']}:{rows[0]['index']}").stdout)
    assert (14, rows[0]["rank"]) in {(row["step"], row["rank"]) for row in times}
    refused = inspected(whole, "--plan")
    assert "only --step, --sample and --document work" in refused.stderr

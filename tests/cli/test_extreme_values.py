"""Extreme values end in a run or in one line; valid random configs train, are killed and resume bit for bit.

No traceback is printed, and a refused run leaves no files.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import random_configs

from runner.errors import ExitStatus

TINY = (
    "experiment=smoke model.width=8 model.layers=1 run.threads=1 data.sequence_length=8 logger=none train.steps=2 "
    "run.root=new/outputs eval.every_steps=1 checkpoint.every_steps=1"
).split()


@pytest.fixture(scope="module", autouse=True)
def preloaded() -> None:
    random_configs.preload()


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        "sampler=mixture",
        "sampler=mixture sampler.temperature=1e-300",
        "data=mixture sampler.weights.code=1e308 sampler.weights.prose=1e308",
        "data=mixture sampler=elastic sampler.weights.code=1e308 sampler.weights.prose=1e308",
        "data=mixture sampler=elastic sampler.weights.code=1e-320",
        "sampler=elastic sampler.max_epochs.code=1e308",
        "sampler=elastic sampler.max_epochs.code=0",
        "sampler=elastic sampler.exclude=[0-99999999999999999999]",
        "sampler=elastic sampler.exclude=[4611686018427387904]",
        "+phases.late.start_step=1099511627776 sampler=elastic",
        "+phases.late.start_step=1e30",
        "+phases.hot.lr_scale=1e308",
        "train.global_batch_size=99999999999999999984",
        "train.batch_size=1048576",
        "train.clip_norm=1e-300",
        "train.steps=99999999999999999999999",
        "eval.batches=10000000000000000000000",
        "eval.batches=1099511627776 eval.batch_size=4096",
        "checkpoint.keep_last=1099511627776 checkpoint.every_minutes=1e-300",
        "data.num_workers=100000",
        "data.vocab_size=99999999999",
        "data.vocab_size=200",
        "model.sequence_length=1",
        "model.width=1000000 model.heads=1",
        "optimizer.lr=1e300",
        "optimizer.betas=[0,0]",
        "optimizer.weight_decay=1e15",
        "seed=9223372036854775807",
        "seed=18446744073709551615",
        "data.sources.code.split=all",
        "+data.sources.code.nope=1",
        "train.loss._target_=os.getcwd",
        "+train.loss.bogus=3",
        "model.bias=no",
        "train.batch_size=60000 data.num_workers=0",
        "launcher._target_=os.system",
        "run.name='a\\nb'",
        "model._target_=os.getcwd",
        "train.device=cuda:99",
    ],
)
def test_an_extreme_value_ends_in_a_run_or_in_one_line(overrides: str, tmp_path: Path) -> None:
    outcome = random_configs.fork_run([*TINY, *overrides.split()], tmp_path)
    assert "Traceback" not in outcome.output, outcome.output
    assert outcome.status in (ExitStatus.FINISHED, ExitStatus.FAILED, ExitStatus.USAGE), outcome
    if outcome.status == ExitStatus.USAGE:
        assert [path.name for path in tmp_path.iterdir()] == ["output.txt"]
    if outcome.status != ExitStatus.FINISHED:
        assert outcome.output.splitlines()[-1].startswith("error: "), outcome.output


@pytest.mark.slow
@pytest.mark.parametrize("most", [0, 1])
def test_adaptive_saves_without_a_shortest_interval(most: int, tmp_path: Path) -> None:
    """The config and the job allow it."""
    bounds = ["checkpoint.adaptive=true", "checkpoint.min_interval_s=0", f"checkpoint.max_interval_s={most}"]
    outcome = random_configs.fork_run([*TINY, *bounds], tmp_path)
    assert outcome.status == ExitStatus.FINISHED, outcome


@pytest.mark.slow
@pytest.mark.parametrize("calls", [0, 3])
def test_a_run_that_has_trained_is_never_discarded(calls: int, tmp_path: Path) -> None:
    """Only a run that was refused before its first step is discarded, although both end with the same status."""
    loss = ["train.loss._target_=custom.error_after", f"+train.loss.calls={calls}"]
    never = ["checkpoint.every_steps=100", "eval.every_steps=0", "train.steps=9"]
    outcome = random_configs.fork_run([*TINY, *loss, *never], tmp_path)
    assert outcome.status == ExitStatus.USAGE, outcome
    metrics = [path.read_text().splitlines() for path in tmp_path.glob("new/outputs/*/metrics.jsonl")]
    assert [len(lines) for lines in metrics] == ([calls] if calls else [])


SHOWN = {3, 7}
"""An elastic and a seeded mixture, with workers, a phase, bfloat16 and keep_best between them."""


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param(
            SHOWN, marks=pytest.mark.promise("two configs drawn at random, killed twice each: bit for bit the same")
        ),
        *(pytest.param({number}, marks=pytest.mark.slow) for number in sorted({*range(12)} - SHOWN)),
    ],
    ids=str,
)
def test_random_valid_configs_resume_bit_for_bit(numbers: set[int]) -> None:
    for number in sorted(numbers):
        rng = random.Random(f"config {number}")
        random_configs.check_config(random_configs.random_overrides(rng), rng)

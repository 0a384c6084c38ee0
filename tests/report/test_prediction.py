"""The predicted share of useful time, against a simulation; `benchmarks/goodput.py` really kills a run."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import TINY

from runner.checkpoint.cadence import AdaptiveInterval
from runner.checkpoint.prediction import KilledRun
from runner.cli import doctor
from runner.errors import UserError

RUNS = st.builds(
    KilledRun,
    rate=st.floats(1e-7, 1.0),
    start_s=st.floats(0, 600),
    stall_s=st.floats(0, 60),
    commit_s=st.floats(0, 60),
    steps_share=st.floats(0.1, 1.0),
)


def simulated(run: KilledRun, work_s: float, kills: int) -> float:
    """The useful share of one long run, event by event."""
    numbers, useful, lived = random.Random(1), 0.0, 0.0
    for _ in range(kills):
        life = numbers.expovariate(run.rate)
        lived += life
        training = max(life - run.start_s, 0.0)
        saves = int(max(training - run.commit_s, 0.0) // (work_s + run.stall_s))
        useful += saves * work_s
    return run.steps_share * useful / lived


@pytest.mark.parametrize(
    ("run", "work_s"),
    [
        (KilledRun(1 / 3600, start_s=60, stall_s=1), 300),
        (KilledRun(1 / 600, start_s=120, stall_s=5, steps_share=0.8), 900),  # rarely gets to a save
        (KilledRun(1 / 600, start_s=900, stall_s=2), 30),  # mostly killed while it starts
        (KilledRun(1 / 1000, start_s=10, stall_s=1, commit_s=40), 200),
    ],
)
def test_the_formula_is_what_a_simulation_finds(run: KilledRun, work_s: float) -> None:
    assert run.useful_share(work_s) == pytest.approx(simulated(run, work_s, 200_000), abs=0.005)


@given(run=RUNS, work_s=st.floats(1e-3, 1e6))
def test_the_best_interval_is_the_best_and_every_share_is_a_share(run: KilledRun, work_s: float) -> None:
    share = run.useful_share(work_s)
    assert 0 <= share <= run.steps_share + 1e-9
    assert share <= run.useful_share(run.best_work_s()) + 1e-9
    assert share <= run.without_kills(work_s) + 1e-9


@given(run=RUNS)
def test_an_adaptive_cadence_comes_within_half_a_point_of_the_best(run: KilledRun) -> None:
    """It uses Daly's series for the same minimum."""
    adaptive = AdaptiveInterval(1e-6, 1e9, prior_s=1 / run.rate)
    adaptive.observe_save(run.stall_s, 0.0)
    assert run.useful_share(adaptive.optimum_s()) >= run.useful_share(run.best_work_s()) - 0.005


@pytest.mark.parametrize("work_s", [0.0, math.inf, 1e300, -1.0])
def test_without_a_save_that_is_ever_reached_nothing_is_useful(work_s: float) -> None:
    assert KilledRun(1e-3, start_s=10, stall_s=1).useful_share(work_s) == 0.0


# ---- runner doctor --kills-per-hour ----------------------------------------------------------------------------------

STATED = ["--no-measure", "--step-s", "0.5", "--start-s", "60", "--save-s", "2"]


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_the_doctor_names_the_numbers_and_a_better_cadence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*TINY, f"run.root={tmp_path}", "train.steps=100000"]
    assert doctor.main([*words, *STATED, "--kills-per-hour", "2", "checkpoint.every_steps=1000"]) == 0
    out = shown(capsys)
    run = KilledRun(2 / 3600, start_s=60, stall_s=2)
    assert f"with 2 kills per hour {100 * run.useful_share(500):.1f} % of the time would be steps that count" in out
    assert "a start takes 60 s, a step takes 0.5 s, a save stalls training for 2 s" in out
    assert "saving every 1000 steps, that is every 500 s" in out
    best = round(run.best_work_s() / 0.5)
    assert f"(checkpoint.every_steps={best}): {100 * run.useful_share(best / 2):.1f} %" in out
    assert "or checkpoint.adaptive=true" in out
    assert doctor.main([*words, *STATED, "--kills-per-hour", "2", f"checkpoint.every_steps={best}"]) == 0
    assert "checkpoint.adaptive=true" not in shown(capsys)


@pytest.mark.parametrize(
    ("words", "cadence"),
    [
        (["checkpoint.every_steps=null", "checkpoint.every_minutes=3"], "saving every 3 minutes"),
        (["checkpoint.every_steps=100", "checkpoint.every_minutes=3"], "saving every 100 steps, that is every 50 s"),
        (["checkpoint.every_steps=null"], "saving only at the end, that is every 833 min"),
        (["checkpoint.adaptive=true", "checkpoint.every_steps=null"], "saving adaptively, every 83"),
    ],
)
def test_every_cadence_of_a_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], cadence: str
) -> None:
    words = [*TINY, f"run.root={tmp_path}", "train.steps=100000", *words]
    assert doctor.main([*words, *STATED, "--kills-per-hour", "2"]) == 0
    assert cadence in shown(capsys)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--kills-per-hour", "0"], "--kills-per-hour 0: must be more than 0, such as 0.5 for one in two hours"),
        (["--kills-per-hour", "-1"], "--kills-per-hour -1: must be more than 0"),
        (["--kills-per-hour", "nan"], "--kills-per-hour nan: must be more than 0"),
        (["--kills-per-hour", "inf"], "--kills-per-hour inf: must be more than 0"),
        (["--kills-per-hour", "1", "--step-s", "0"], "--step-s 0: must be seconds, more than 0"),
        (["--kills-per-hour", "1", "--save-s", "-2"], "--save-s -2: must be seconds, 0 or more"),
        (["--start-s", "2"], "--start-s 2: only together with --kills-per-hour"),
        (["--kills-per-hour", "1", "--no-measure"], "nobody knows how long a start takes: set --start-s"),
        (
            ["--kills-per-hour", "1", "--no-measure", "--start-s", "1", "--save-s", "1"],
            "a save comes after 10 steps, and nobody knows how long a step takes: set --step-s",
        ),
    ],
)
def test_a_wrong_or_missing_number_is_one_line(tmp_path: Path, words: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        doctor.main([*TINY, f"run.root={tmp_path}", *words])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_rate_beyond_all_sense_is_survived(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main([*TINY, f"run.root={tmp_path}", *STATED, "--kills-per-hour", "1e12"]) == 0
    assert " 0.0 % of the time" in shown(capsys)


@pytest.mark.slow
def test_what_is_not_stated_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main([*TINY, f"run.root={tmp_path}", "--kills-per-hour", "6", "--step-s", "1"]) == 0
    assert "(measured here)" in shown(capsys)

"""Phases take effect exactly at their step, and learning-rate schedules follow their formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.config.schedule import (
    LearningRate,
    Phase,
    PhaseSchedule,
    PhaseState,
    ScheduleError,
    learning_rate_factor,
    unreached_phases,
)

BASE = {"code": 1.0, "tests": 2.0, "prose": 0.5}


def test_phases_that_a_run_ends_before_are_named() -> None:
    phases = {"early": Phase(start_step=99), "late": Phase(start_step=100)}
    assert unreached_phases(phases, 100) == [
        "phases.late.start_step=100 is never reached: the run ends after 100 steps"
    ]
    assert unreached_phases(phases, 101) == []


def test_phases_take_effect_at_their_step_and_override_the_base() -> None:
    schedule = PhaseSchedule(
        {
            "second": Phase(start_step=10, weights={"prose": 4.0}, lr_scale=0.1),
            "first": Phase(start_step=3, weights={"code": 0.0}, temperature=2.0),
        },
        BASE,
        temperature=0.7,
    )
    assert schedule.at(0) == PhaseState(BASE, 0.7, 1.0, None)
    assert schedule.at(2) == schedule.at(0)
    assert schedule.at(3) == PhaseState({"code": 0.0, "tests": 2.0, "prose": 0.5}, 2.0, 1.0, "first")
    assert schedule.at(9) == schedule.at(3)
    assert schedule.at(10) == PhaseState({"code": 1.0, "tests": 2.0, "prose": 4.0}, 0.7, 0.1, "second")
    assert schedule.at(10**9) == schedule.at(10)
    assert schedule.at(10).weight_list == [1.0, 2.0, 4.0]


def test_a_phase_at_step_0_replaces_the_base_from_the_first_step() -> None:
    schedule = PhaseSchedule({"all": Phase(weights={"code": 9.0}, lr_scale=0.5)}, BASE)
    assert schedule.at(0).name == "all"
    assert schedule.at(0).weights["code"] == 9.0
    factor = learning_rate_factor(LearningRate("constant", 10), schedule)
    assert factor(0) == 0.5


def test_only_phases_of_the_mixture_divide_the_data_order() -> None:
    phases = {
        "start": Phase(0, {"a": 2}),
        "warm": Phase(5, {"a": 2}, lr_scale=0.1),
        "hot": Phase(9, {"a": 2}, temperature=2.0),
        "base": Phase(20),
        "slow": Phase(30, lr_scale=0.5),
    }
    schedule = PhaseSchedule(phases, {"a": 1, "b": 1})
    assert [step for step, _ in schedule.mixtures()] == [0, 9, 20]
    for step in range(40):
        held = [state for start, state in schedule.mixtures() if start <= step][-1]
        assert (held.weights, held.temperature) == (schedule.at(step).weights, schedule.at(step).temperature)


@given(starts=st.sets(st.integers(0, 40), max_size=6))
def test_the_last_phase_that_began_is_in_force(starts: set[int]) -> None:
    schedule = PhaseSchedule({f"p{start}": Phase(start_step=start, lr_scale=start / 7) for start in starts})
    for step in range(45):
        begun = [start for start in starts if start <= step]
        assert schedule.at(step).name == (f"p{max(begun)}" if begun else None)
        assert schedule.at(step).lr_scale == (max(begun) / 7 if begun else 1.0)


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ({"x": Phase(start_step=-1)}, r"phases\.x\.start_step=-1 must be a whole number, 0 or more"),
        ({"x": Phase(start_step=1.5)}, r"phases\.x\.start_step=1\.5 must be a whole number"),  # type: ignore[arg-type]
        ({"x": Phase(5), "y": Phase(5)}, r"phases\.y\.start_step=5 is also the start of phases\.x"),
        (
            {"x": Phase(weights={"cod": 1.0})},
            r"weights\.cod: no such source \(did you mean 'code'\?\).*code, tests, prose",
        ),
        ({"x": Phase(weights={"code": -1.0})}, r"weights\.code=-1.0"),
        ({"x": Phase(weights={"code": math.nan})}, r"weights\.code=nan"),
        ({"x": Phase(weights=dict.fromkeys(BASE, 0.0))}, "every source at 0"),
        ({"x": Phase(temperature=0.0)}, r"temperature=0.0"),
        ({"x": Phase(lr_scale=-0.5)}, r"lr_scale=-0.5"),
        ({"x": Phase(lr_scale=math.inf)}, r"lr_scale=inf"),
    ],
)
def test_an_invalid_phase_is_reported(phases: dict[str, Phase], message: str) -> None:
    with pytest.raises(ScheduleError, match=message) as caught:
        PhaseSchedule(phases, BASE)
    assert isinstance(caught.value, ValueError)


def test_all_errors_of_phases_come_in_one_message() -> None:
    with pytest.raises(ScheduleError) as caught:
        PhaseSchedule({"x": Phase(start_step=-1, lr_scale=-1), "y": Phase(temperature=0, weights={"cod": 1})}, BASE)
    assert [line.split("=")[0].split(":")[0] for line in str(caught.value).splitlines()] == [
        "phases.x.start_step", "phases.x.lr_scale", "phases.y.temperature", "phases.y.weights.cod"
    ]  # fmt: skip


# ---- learning rates

FORMULAS: dict[str, Callable[[float], float]] = {
    "constant": lambda p: 1.0,
    "linear": lambda p: 0.1 + 0.9 * (1 - p),
    "cosine": lambda p: 0.1 + 0.9 * (1 + math.cos(math.pi * p)) / 2,
    "rex": lambda p: 0.1 + 0.9 * (1 - p) / (1 - p / 2),
}


@pytest.mark.parametrize("decay", FORMULAS)
@pytest.mark.parametrize("warmup", [0, 1, 10])
def test_schedules_follow_their_formulas(decay: str, warmup: int) -> None:
    rate = LearningRate(decay, 100, warmup, 0.1)
    for step in range(warmup):
        assert rate(step) == (step + 1) / warmup
    for step in range(warmup, 100):
        assert rate(step) == pytest.approx(FORMULAS[decay]((step - warmup) / (100 - warmup)), abs=1e-12)
    assert rate(100) == rate(10**6) == (1.0 if decay == "constant" else pytest.approx(0.1))


def test_wsd_is_constant_and_decays_at_the_end() -> None:
    rate = LearningRate("wsd", 100, 10, 0.2, decay_steps=40)
    assert [rate(step) for step in (9, 10, 35, 60)] == [1.0] * 4
    assert rate(80) == pytest.approx(0.6)
    assert rate(100) == pytest.approx(0.2)
    tenth = LearningRate("wsd", 100)
    assert tenth.decay_start == 90
    assert (tenth(90), tenth(95), tenth(100)) == (1.0, 0.5, 0.0)
    assert LearningRate("wsd", 1)(0) == 1.0
    assert LearningRate("wsd", 10, warmup_steps=9, decay_steps=1).decay_start == 9


@given(
    decay=st.sampled_from(["constant", "linear", "cosine", "wsd", "rex"]),
    total=st.integers(1, 300),
    warmup=st.integers(0, 300),
    floor=st.floats(0, 1),
)
def test_factors_stay_in_bounds_and_fall_after_the_warmup(decay: str, total: int, warmup: int, floor: float) -> None:
    if warmup >= total:
        with pytest.raises(ScheduleError, match="warmup_steps"):
            LearningRate(decay, total, warmup, floor)
        return
    rate = LearningRate(decay, total, warmup, floor)
    values = [rate(step) for step in range(warmup, total + 3)]
    assert all(floor - 1e-12 <= value <= 1.0 for value in values)
    assert all(a >= b for a, b in pairwise(values))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decay": "cosin"}, r"decay='cosin' \(did you mean 'cosine'\?\) must be one of constant"),
        ({"total_steps": 0}, "total_steps=0"),
        ({"warmup_steps": 100}, "warmup_steps=100 must be from 0 to below the 100 steps"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"min_ratio": 1.5}, "min_ratio=1.5"),
        ({"min_ratio": math.nan}, "min_ratio=nan"),
        ({"decay_steps": 0}, "decay_steps=0"),
        ({"decay_steps": 96, "warmup_steps": 5}, "decay_steps=96 must be from 1 to the 95 steps"),
    ],
)
def test_an_invalid_schedule_is_reported(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        LearningRate(**{"decay": "cosine", "total_steps": 100, **options})


def test_schedules_need_no_torch() -> None:
    """The command checks a config, schedules included, before torch is imported."""
    import subprocess
    import sys

    code = "import sys, runner.config.schedule; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

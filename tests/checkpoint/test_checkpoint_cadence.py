"""When to save: the complete list of saved steps for a given clock."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.checkpoint.cadence import AdaptiveInterval, Cadence
from runner.errors import UserError


def saved_steps(cadence: Cadence, steps: int, seconds_per_step: float, start: int = 0) -> list[int]:
    saved = []
    for step in range(start + 1, steps + 1):
        now = (step - start) * seconds_per_step
        if cadence.should_save(step, now):
            cadence.saved(step, now)
            saved.append(step)
    return saved


def test_every_n_steps() -> None:
    assert saved_steps(Cadence(4), 10, 1.0) == [4, 8]
    assert saved_steps(Cadence(5), 10, 1.0) == [5, 10]


def test_every_m_minutes_since_the_last_save() -> None:
    assert saved_steps(Cadence(None, 1.0), 10, 25.0) == [3, 6, 9]


def test_a_save_by_steps_restarts_the_minutes() -> None:
    assert saved_steps(Cadence(4, 1.0), 10, 25.0) == [3, 4, 7, 8]


def test_no_periodic_saves() -> None:
    assert saved_steps(Cadence(), 10, 100.0) == []


def test_the_step_of_the_resume_is_not_saved_again() -> None:
    cadence = Cadence(5, start_step=5)
    assert not cadence.should_save(5, 0.0)
    assert saved_steps(cadence, 12, 1.0, start=5) == [10]


@pytest.mark.parametrize("options", [(0, None), (None, 0.0), (None, math.nan), (-1, None)])
def test_settings_out_of_range_are_refused(options: tuple[int | None, float | None]) -> None:
    with pytest.raises(UserError, match=r"checkpoint.every"):
        Cadence(*options)


def test_the_formula_matches_a_calculation_by_hand() -> None:
    """C = 10 s, M = 2000 s: sqrt(40000) = 200, ratio 1/400: 200 (1 + 1/60 + 1/3600) - 10."""
    interval = AdaptiveInterval(1.0, 1e6, prior_s=1000.0)
    interval.observe_save(10.0, 10.0)
    interval.observe_attempts([(1500.0, "preempted"), (1500.0, "finished"), (0.0, "interrupted")])
    assert interval.mean_time_between_losses_s() == 2000.0
    assert interval.interval_s() == pytest.approx(200 * (1 + 1 / 60 + 1 / 3600) - 10)


@given(st.floats(1e-3, 100), st.integers(0, 50), st.floats(1, 1e6))
def test_the_optimum_is_near_the_least_overhead(cost: float, losses: int, ran: float) -> None:
    """Compare the expected overhead per second, C/T + T/2M to first order, with its minimum: within 5%."""
    interval = AdaptiveInterval(1e-9, 1e9)
    interval.observe_save(cost, 0.0)
    interval.observe_attempts([(ran / (losses or 1), "killed")] * losses)
    mean, chosen = interval.mean_time_between_losses_s(), interval.optimum_s()
    if cost < mean / 100:
        assert cost / chosen + chosen / (2 * mean) <= 1.05 * math.sqrt(2 * cost / mean)
    assert 0 < chosen <= max(mean, math.sqrt(2 * cost * mean) * 1.5)


@given(st.lists(st.tuples(st.floats(0, 1e5), st.sampled_from(["killed", "finished", "preempted"])), max_size=20))
def test_more_losses_never_lengthen_the_interval(attempts: list[tuple[float, str]]) -> None:
    calm, rough = AdaptiveInterval(), AdaptiveInterval()
    calm.observe_attempts(attempts)
    rough.observe_attempts([*attempts, (0.0, "preempted")])
    assert 30.0 <= rough.interval_s() <= calm.interval_s() <= 1800.0


def test_interval_is_at_least_two_writes_and_is_explained() -> None:
    interval = AdaptiveInterval(1.0, 60.0)
    interval.observe_save(0.001, 100.0)
    assert interval.interval_s() == 200.0
    assert "saving every 200 s: a save costs 0.001 s" in interval.explain()
    assert "\n" not in interval.explain()


@given(rate=st.floats(1e-7, 1.0), stall=st.floats(0, 60), start=st.floats(0, 600))
def test_adaptive_cadence_is_half_a_point_from_the_optimum(rate: float, stall: float, start: float) -> None:
    """Kills are memoryless. A kill loses everything since the last save, and a start."""

    def useful_share(work: float) -> float:
        stretch = rate * (work + stall)
        return rate * work * math.exp(-rate * start - stretch) / -math.expm1(-stretch)

    low, high = 0.0, 1.0 / rate  # the best w solves: rate w = 1 - e^(-rate (w + stall))
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if -math.expm1(-rate * (middle + stall)) > rate * middle else (low, middle)
    adaptive = AdaptiveInterval(1e-6, 1e9, prior_s=1 / rate)
    adaptive.observe_save(stall, 0.0)
    assert useful_share(adaptive.optimum_s()) >= useful_share(high) - 0.005


def test_adaptive_saves_follow_the_interval() -> None:
    interval = AdaptiveInterval(60.0, 60.0)
    assert saved_steps(Cadence(adaptive=interval), 10, 25.0) == [3, 6, 9]
    assert Cadence(10, 2.0).explain(0.0) == "saving every 10 steps and every 2 minutes and at the end"


@pytest.mark.parametrize("bounds", [(-1.0, 1.0), (2.0, 1.0), (1.0, math.inf), (1.0, 2.0, 0.0)])
def test_bounds_out_of_range_are_refused(bounds: tuple[float, ...]) -> None:
    with pytest.raises(UserError):
        AdaptiveInterval(*bounds)

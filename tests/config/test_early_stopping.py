"""Early stopping as a function of its options and of the recorded evaluations."""

from __future__ import annotations

import math
from typing import Any

import pytest
from composing import compose
from hypothesis import given
from hypothesis import strategies as st

from runner.config.early_stopping import Best, EarlyStoppingConfig, stopped
from runner.config.finished import options_of
from runner.errors import UserError


def records(*values: float, metric: str = "eval_loss") -> list[dict[str, Any]]:
    return [{"step": 10 * number, metric: value} for number, value in enumerate(values, 1)]


def options(patience: int = 2, mode: Best = Best.min, min_delta: float = 0.0, above: float | None = None) -> Any:
    return EarlyStoppingConfig("eval_loss", mode, patience, min_delta, above)


@pytest.mark.parametrize(
    ("chosen", "values", "reason"),
    [
        (options(), [3, 2, 2, 2.5], "eval_loss has not improved on 2 (step 20) in 2 evaluations"),
        (options(), [3, 2, 2.5, 1, 2, 0.5], None),
        (options(mode=Best.max), [1, 2, 1.5, 2], "eval_loss has not improved on 2 (step 20) in 2 evaluations"),
        (
            options(min_delta=0.5),
            [3, 2.6, 2.5],
            "eval_loss has not improved on 3 (step 10) by more than 0.5 in 2 evaluations",
        ),
        (options(min_delta=0.5), [3, 2.6, 2.4], None),
        (options(above=20), [3, 21, 1], "eval_loss is 21 at step 20, above 20"),
        (options(above=20), [3, math.nan], "eval_loss is nan at step 20, above 20"),
        (options(above=20), [20], None),
        (options(1), [math.nan], "eval_loss has not improved on any value in 1 evaluations"),
        (options(), [math.nan, 3, math.nan, 2], None),
        (EarlyStoppingConfig(), [1, 2, 3, 4], None),
    ],
)
def test_the_evaluations_decide(chosen: EarlyStoppingConfig, values: list[float], reason: str | None) -> None:
    assert stopped(chosen, records(*values)) == reason


def test_evaluations_without_the_metric_do_not_count() -> None:
    """Sets have cadences of their own, and an edited file may hold anything."""
    others: list[Any] = [*records(9, metric="eval_b_loss"), {"step": 5, "eval_loss": "x"}, {"eval_loss": 9.0}]
    mixed = [each for one in records(3, 2, 2.5) for each in (one, *others)]
    assert stopped(options(), mixed) is None
    assert stopped(options(), [*mixed, *records(2.5)]) is not None


def test_the_first_step_ends_no_run() -> None:
    """A run has nothing to save at its first step, but later evaluations are compared with the first."""
    start = {"step": 0, "eval_loss": 30.0}
    assert stopped(options(1, above=20), [start]) is None
    assert stopped(options(1), [start, *records(40)]) == "eval_loss has not improved on 30 (step 0) in 1 evaluations"


@given(
    st.lists(st.integers(0, 8).map(float), max_size=12),
    st.integers(1, 4),
    st.sampled_from(list(Best)),
    st.sampled_from([0.0, 1.0]),
)
def test_more_patience_never_ends_a_run_earlier(values: list[float], patience: int, mode: Best, delta: float) -> None:
    def end(patience: int) -> float:
        chosen, found = options(patience, mode, delta), records(*values)
        return next((n for n in range(len(found) + 1) if stopped(chosen, found[:n])), math.inf)

    assert end(patience) <= end(patience + 1)
    assert end(patience) > patience


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["early_stopping.patience=3"], "early_stopping.patience=3 has no effect without metric, mode, min_delta"),
        (["early_stopping.above=3"], "early_stopping.above=3.0 has no effect .* choose early_stopping=default"),
        (["early_stopping=default", "early_stopping.patience=0"], "patience=0 must be 1 or more"),
        (["early_stopping=default", "early_stopping.min_delta=-1"], "min_delta=-1 must be a number of at least 0"),
        (
            ["early_stopping=default", "early_stopping.mode=max", "early_stopping.above=3"],
            "set early_stopping.above=null",
        ),
        (["early_stopping=default", "data=own"], "needs evaluations, and there are none: add data.eval_sources"),
        (["early_stopping=default", "eval.every_steps=0"], "needs evaluations, .* set eval.every_steps=null"),
        (["eval.at_start=true", "eval.every_steps=0"], "eval.at_start=true needs evaluations"),
        (["eval.every_epochs=0"], "eval.every_epochs=0.0 must be"),
        (["checkpoint.every_epochs=1", "data.loader._target_=custom.Endless"], "checkpoint.every_epochs=1 needs data"),
    ],
)
def test_options_that_cannot_work_are_one_line(overrides: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        compose(overrides)


def test_the_order_of_its_keys_is_no_option_of_a_callback() -> None:
    """The types of the keys do not matter."""
    node = {"_target_": "x", "by": {1: "a", "b": [{2: None, "c": 0.5}]}}
    again = {"by": {"b": [{"c": 0.5, 2: None}], 1: "a"}, "_target_": "x"}
    assert options_of(node) == options_of(again) != options_of({**node, "more": 1})
    assert options_of(None) is None


def test_none_of_it_identifies_a_run() -> None:
    usual = compose(["experiment=smoke"])
    chosen = ["early_stopping=default", "early_stopping.patience=9", "eval.at_start=true", "checkpoint.every_epochs=2"]
    assert compose(["experiment=smoke", *chosen]).digest == usual.digest
    assert not usual.config.early_stopping.is_set

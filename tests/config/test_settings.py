"""The table of all settings is complete and explained, and allows the same values as the checks."""

from __future__ import annotations

import copy
import math
import typing
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
from composing import compose
from omegaconf import OmegaConf
from omegaconf.errors import ValidationError

from runner.bounds import BOUNDS, OTHERS, SEARCH
from runner.config.frozen import schema
from runner.config.hints import without_none
from runner.config.identity import kind_of
from runner.config.schedule import Phase
from runner.config.schema import Command, Config, EvalSetConfig, config_errors
from runner.config.settings import LATER, Setting, settings
from runner.errors import UserError


def by_key() -> dict[str, Setting]:
    return {row.key: row for row in settings()}


def schema_keys(kind: Any = Command, prefix: str = "") -> typing.Iterator[str]:
    for each in fields(kind):
        key, hint = f"{prefix}{each.name}", without_none(typing.get_type_hints(kind)[each.name])[0]
        arguments = typing.get_args(hint)
        if is_dataclass(hint):
            yield from schema_keys(hint, f"{key}.")
        else:
            yield key
        if typing.get_origin(hint) is dict and is_dataclass(arguments[1]):
            yield from schema_keys(arguments[1], f"{key}.NAME.")


def test_every_setting_has_a_row_that_explains_it() -> None:
    rows = by_key()
    keys = list(schema_keys())
    assert len(keys) > 100
    assert {"eval.sets.NAME.batches", "phases.NAME.lr_scale", "checkpoint.best.mode"} <= {*keys}
    assert [key for key in keys if key not in rows] == []
    assert [row.key for row in settings() if not row.about] == []


def test_a_row_agrees_with_the_schema_and_the_files() -> None:
    rows = by_key()
    assert rows["eval.batch_size"] == Setting(
        "eval.batch_size",
        "whole number",
        "null",
        "1 to 2**31, null",
        "yes",
        "Sequences per batch, each of which one rank computes. null: train.batch_size.",
    )
    assert (rows["train.on_nonfinite"].type, rows["train.on_nonfinite"].allowed) == ("choice", "stop, skip")
    assert (rows["optimizer.lr"].default, rows["optimizer.lr"].option) == (
        "0.001 (adamw), 0.1 (sgd)",
        "optimizer=adamw,sgd",
    )
    assert rows["launcher.partition"].option == "launcher=slurm"
    assert rows["launcher.max_timeouts"].about.endswith("three attempts without one, however they ended")
    assert rows["sampler"].allowed == "distributed, elastic, mixture, own"
    assert rows["checkpoint.every_steps"].default == "100"
    assert rows["train.peer_timeout_s"].about.endswith("requeued.")


def test_whether_a_setting_may_change_is_the_rule_of_the_runs() -> None:
    rows = [row for row in settings() if row.later not in ("filled in", "as the settings in it")]
    assert {row.later for row in rows} == {*LATER.values()}
    assert [row.key for row in rows if row.later != LATER[kind_of(row.key)]] == []


def test_every_number_with_bounds_shows_them() -> None:
    rows = by_key()
    for key, bound in {**BOUNDS, **OTHERS, **SEARCH}.items():
        assert str(bound) in rows[key].allowed


@pytest.fixture(scope="module")
def config() -> Config:
    return compose(["experiment=smoke", "data=mixture", "sampler=elastic", "early_stopping=default"]).config


def with_value(config: Config, key: str, value: float) -> Config:
    """Set a number, or the number of one source in a dictionary."""
    made = copy.deepcopy(config)
    made.phases, made.eval.sets = {"late": Phase(start_step=5)}, {"a": EvalSetConfig()}
    *names, last = key.split(".")
    node: Any = made
    for name in names:
        node = next(iter(node.values())) if name == "NAME" else getattr(node, name)
    setattr(node, last, {"code": value} if isinstance(getattr(node, last), dict) else value)
    return made


@pytest.mark.parametrize("key", sorted(OTHERS))
def test_numbers_beyond_the_bounds_are_refused(config: Config, key: str) -> None:
    """Numbers just within are allowed. `test_bounds.py` checks the other numbers."""
    bound, whole = OTHERS[key], key.endswith(("steps", "step", "patience", "batches", "batch_size"))
    beyond = [bound.least if bound.above else bound.least - 1]
    beyond += [] if bound.most == math.inf else [bound.most if bound.below else bound.most * 2]
    within = [math.nextafter(0.0, 1.0) if bound.above else bound.least]
    name = key.replace("eval.sets.NAME", "eval.sets.a").replace("phases.NAME", "phases.late")

    def errors(value: float) -> list[str]:
        lines = config_errors(with_value(config, key, int(value) if whole else value))
        return [line for line in lines if line.startswith(name)]

    assert [value for value in beyond if not errors(value)] == []
    assert [line for value in within for line in errors(value)] == []


def test_a_choice_is_one_of_those_shown() -> None:
    choices = [row for row in settings() if row.type == "choice"]
    assert len(choices) > 8
    for row in choices:
        for value in row.allowed.split(", "):
            OmegaConf.update(schema(Command).copy(), row.key, None if value == "null" else value)
        with pytest.raises(ValidationError):
            OmegaConf.update(schema(Command).copy(), row.key, "something else")


def test_a_part_or_none_of_the_settings_can_be_listed() -> None:
    assert [row.key for row in settings("train.steps")] == ["train.steps"]
    assert {row.key.rpartition(".")[0] for row in settings("eval.sets")} == {"eval", "eval.sets.NAME"}
    with pytest.raises(UserError, match=r"train.stps: no such setting \(did you mean 'train.steps'\?\)"):
        settings("train.stps")

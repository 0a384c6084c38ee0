"""Numbers that a config allows are accepted by the class that takes them: the bounds are in one place."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from composing import compose

from exactdata import ElasticSampler, StatefulDataLoader
from runner.bounds import BOUNDS
from runner.checkpoint import TrainStateManager
from runner.checkpoint.cadence import AdaptiveInterval, Cadence
from runner.config.schema import Config, config_errors
from runner.errors import UserError
from runner.rundir.lease import Lease
from runner.training.ranks.hang_watch import Judge

INTEGERS = {key for key, bound in BOUNDS.items() if key.rpartition("_")[2] != "s" and not bound.above}


def elastic(**options: Any) -> Any:
    return ElasticSampler({"a": 10}, {"a": 1.0}, num_replicas=1, rank=0, **{"global_batch_size": 2, **options})


def loader(**options: Any) -> Any:
    return StatefulDataLoader(range(10), **options)  # type: ignore[arg-type]


TAKERS: dict[str, Callable[[Any, Path], Any]] = {
    "seed": lambda value, path: (torch.Generator().manual_seed(value), elastic(seed=value)),
    "train.batch_size": lambda value, path: loader(batch_size=value),
    "train.global_batch_size": lambda value, path: elastic(global_batch_size=value),
    "train.hang_timeout_s": lambda value, path: Judge(value, 1.0),
    "train.epochs": lambda value, path: elastic(epochs=value),
    "run.lease_timeout_s": lambda value, path: Lease.acquire(path / "lease", None, value).release(),
    "data.num_workers": lambda value, path: loader(num_workers=value),
    "data.prefetch_factor": lambda value, path: loader(num_workers=1, prefetch_factor=value),
    "checkpoint.every_steps": lambda value, path: Cadence(value),
    "checkpoint.every_minutes": lambda value, path: Cadence(None, value),
    "checkpoint.every_epochs": lambda value, path: Cadence(every_epochs=value),
    "checkpoint.keep_last": lambda value, path: TrainStateManager(path, keep_last=value),
    "checkpoint.keep_every_steps": lambda value, path: TrainStateManager(path, keep_every_steps=value),
    "checkpoint.keep_best": lambda value, path: TrainStateManager(path, keep_best=value),
    "checkpoint.min_interval_s": lambda value, path: AdaptiveInterval(value, max(value, 1.0)).interval_s(),
    "checkpoint.max_interval_s": lambda value, path: AdaptiveInterval(0.0, value).interval_s(),
    "sampler.temperature": lambda value, path: elastic(temperature=value),
}
"""By key of the config, what makes the object that checks the value itself."""
WITHOUT_CHECK = {
    *("train.steps", "train.grad_accum_steps", "train.peer_timeout_s", "train.clip_norm", "run.threads"),
    *(
        "eval.every_steps",
        "eval.every_epochs",
        "eval.batches",
        "eval.batch_size",
        "data.sequence_length",
        "data.vocab_size",
    ),
}
"""Numbers that are used as they are."""
STRICT = {key for key in TAKERS if key.startswith("checkpoint.")}
"""Those whose class accepts nothing else either, because it has the same check."""


def edges(key: str) -> list[float]:
    bound = BOUNDS[key]
    least = math.nextafter(0.0, 1.0) if bound.above else bound.least
    most = min(bound.most, 1.7976931348623157e308)
    return [int(value) if key in INTEGERS else float(value) for value in (least, most)]


def beyond(key: str) -> list[float]:
    bound = BOUNDS[key]
    wrong = [bound.least if bound.above else bound.least - 1, bound.most * 2 if bound.most != math.inf else math.inf]
    return [*map(int, wrong)] if key in INTEGERS else [*wrong, math.nan]


def with_value(config: Config, key: str, value: float) -> Any:
    section, _, name = key.rpartition(".")
    return replace(
        config, **({section: replace(attrgetter(section)(config), **{name: value})} if section else {name: value})
    )


@pytest.fixture(scope="module")
def config() -> Config:
    return compose(["experiment=smoke", "data=mixture", "sampler=elastic"]).config


def errors(config: Config, key: str, value: float) -> list[str]:
    return [line for line in config_errors(with_value(config, key, value)) if line.startswith(f"{key}=")]


def test_every_number_is_checked_by_its_class_or_the_config() -> None:
    assert {*TAKERS, *WITHOUT_CHECK} == set(BOUNDS)
    assert not TAKERS.keys() & WITHOUT_CHECK


@pytest.mark.parametrize("key", sorted(BOUNDS))
def test_a_config_allows_the_bounds_and_nothing_beyond_them(config: Config, key: str) -> None:
    related = ("must be a multiple", "must be at least", "both set the length", "must be from", "the steps of this run")
    for value in edges(key):
        assert [line for line in errors(config, key, value) if not any(part in line for part in related)] == []
    for value in beyond(key):
        assert errors(config, key, value), value


@pytest.mark.filterwarnings("ignore:This DataLoader will create 1024")
@pytest.mark.parametrize("key", sorted(TAKERS))
def test_the_class_accepts_the_bounds_of_the_config(key: str, tmp_path: Path) -> None:
    for value in edges(key):
        TAKERS[key](value, tmp_path)
    if key in STRICT:
        for value in beyond(key):
            with pytest.raises(UserError, match=f"{key}="):
                TAKERS[key](value, tmp_path)

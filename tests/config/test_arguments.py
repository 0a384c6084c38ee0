"""A misspelt argument of any `_target_` in a config is an error before a run directory is created."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from runner.config.arguments import names_of
from runner.config.composition import Composer
from runner.errors import UserError

SOURCES = {
    "own_parts.py": """
raise SystemExit("imported")
import functools
import torch
from dataclasses import dataclass
from torch import nn
from own_base import Base, Loose as Free, helper

class Model(nn.Module):
    def __init__(self, width, /, depth=2, *, bias=True): ...

class Inherits(Base): ...
class InheritsFreely(Free): ...
class InheritsTorch(nn.Module): ...
class Two(Base, nn.Module): ...
class Nothing: ...
class New(Base):
    def __new__(cls, **options): ...
class Meta(Base, metaclass=type): ...
class Conditional:
    if torch:
        def __init__(self): ...
@functools.cache
class Decorated:
    def __init__(self, x): ...
@dataclass(frozen=True)
class Data:
    rows: int
    columns: int = 3

def function(model, batch, threshold=0.5): ...
def free(**options): ...
@functools.wraps(function)
def wrapped(x): ...
def twice(x): ...
def twice(y): ...
if torch:
    def conditional(x): ...
def assigned(x): ...
assigned = functools.partial(assigned, 3)
""",
    "own_base.py": """
class Base:
    def __init__(self, path, rows=3): ...
class Loose:
    def __init__(self, path, **rest): ...
def helper(x): ...
""",
    "own_package/__init__.py": "from .inner import Thing as Thing\nfrom . import inner\nfrom .inner import *\n",
    "own_package/inner.py": """
class Thing:
    def __init__(self, size): ...
class Other:
    def __init__(self): ...
""",
}

NAMES = {
    "own_parts.Model": ("", "depth", "bias"),
    "own_parts.Inherits": ("path", "rows"),
    "own_parts.Nothing": (),
    "own_parts.Data": ("rows", "columns"),
    "own_parts.function": ("model", "batch", "threshold"),
    "own_parts.helper": ("x",),
    "own_package.Thing": ("size",),
    "own_package.inner.Thing": ("size",),
    "own_parts.Base": ("path", "rows"),
}
UNDECIDED = [
    *("own_parts.InheritsFreely", "own_parts.InheritsTorch", "own_parts.Two", "own_parts.New", "own_parts.Meta"),
    *("own_parts.Conditional", "own_parts.Decorated", "own_parts.free", "own_parts.wrapped", "own_parts.twice"),
    *("own_parts.conditional", "own_parts.assigned", "own_parts.nothing", "own_parts", "own_parts.Model.forward"),
    *("own_package.Other", "own_package.inner", "os.getcwd", "builtins.dict", "no_such_module.X"),
]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write modules on Python's path that must not be imported."""
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.fixture(scope="module")
def composer() -> Composer:
    return Composer()


def test_the_arguments_are_read_from_the_source(own: None) -> None:
    assert {target: names_of(target) for target in NAMES} == NAMES
    assert {target: names_of(target) for target in UNDECIDED} == dict.fromkeys(UNDECIDED)
    assert not {"own_parts", "own_base", "own_package"} & sys.modules.keys()


MISTAKES = [
    (["+model.widt=3"], "model.widt=3: runner.models.gpt.GPT has no such argument (did you mean 'width'?); there are "),
    (
        ["+optimizer.momentum=3"],
        "optimizer.momentum=3: runner.training.optim.AdamW has no such argument; there are lr, ",
    ),
    (["optimizer=sgd", "+optimizer.momentun=1"], "optimizer.momentun=1: torch.optim.SGD has no such argument (did you"),
    (
        ["+optimizers.a={_target_: torch.optim.SGD, match: x, lr: 1, nestrov: true}"],
        "optimizers.a.nestrov=True: torch.",
    ),
    (["+data.sources.code.splt=x"], "data.sources.code.splt=x: runner.data.text.PythonText has no such argument (did"),
    (["+data.eval_sources.code.splt=x"], "data.eval_sources.code.splt=x: runner.data.text.PythonText has no such"),
    (["task.x=1"], "task.x=1: runner.models.tasks.NextToken has no such argument; it takes none"),
    (
        ["logger=default", "+logger.tensorboard.x=1"],
        "logger.tensorboard.x=1: runner.metrics.tensorboard.TensorBoard has",
    ),
    (
        ["+train.loss={_target_: own_parts.function, thresold: 1}"],
        "train.loss.thresold=1: own_parts.function has no such",
    ),
    (["eval.metrics.acc={_target_: own_parts.function, thresold: 0.5}"], "eval.metrics.acc.thresold=0.5: own_parts."),
    (
        ["+callbacks.mine={_target_: own_parts.Inherits, row: 3}"],
        "callbacks.mine.row=3: own_parts.Inherits has no such",
    ),
    (["data.collate={_target_: own_parts.function, pad: 0}"], "data.collate.pad=0: own_parts.function has no such"),
    (["data.loader={_target_: own_parts.Data, row: 0}"], "data.loader.row=0: own_parts.Data has no such argument (did"),
    (["sampler=own", "sampler._target_=own_parts.Base", "+sampler.row=3"], "sampler.row=3: own_parts.Base has no such"),
    (
        ["scheduler=own", "scheduler._target_=own_parts.function", "+scheduler.thr=3"],
        "scheduler.thr=3: own_parts.function",
    ),
    (["+model.head={_target_: own_parts.Data, row: 3}"], "model.head.row=3: own_parts.Data has no such argument (did"),
]


@pytest.mark.parametrize(("overrides", "line"), MISTAKES)
def test_a_misspelt_argument_is_one_line(own: None, composer: Composer, overrides: list[str], line: str) -> None:
    with pytest.raises(UserError) as error:
        Composer().compose(["experiment=smoke", *overrides])
    assert any(each.startswith(line) for each in str(error.value).splitlines()), str(error.value)
    assert "own_parts" not in sys.modules


FINE = [
    ["eval.metrics.acc={_target_: own_parts.function, threshold: 0.5, takes: {batch: loss}}"],
    ["optimizer.groups=[{match: head.*, lr: 1}]"],
    ["+optimizers.a={_target_: torch.optim.SGD, match: x, lr: 1, groups: null, scheduler: {decay: constant}}"],
    ["sampler=own", "sampler._target_=own_parts.Base", "+sampler.rows=3"],
    ["scheduler=own", "scheduler._target_=own_parts.function", "+scheduler.threshold=3"],
    [
        "+callbacks.mine={_target_: own_parts.InheritsFreely, anything: 3}",
        "+callbacks.other={_target_: own_parts.free, x: 1}",
    ],
    [
        "+callbacks.mine={_target_: own_parts.Nothing}",
        "callbacks.other={_target_: own_parts.Data, _args_: [3], rows: 1}",
    ],
]


@pytest.mark.parametrize("overrides", FINE)
def test_existing_and_unknowable_arguments_are_no_errors(own: None, composer: Composer, overrides: list[str]) -> None:
    composer.compose(["experiment=smoke", *overrides])


def test_the_modules_of_another_python_are_not_looked_at(own: None, composer: Composer) -> None:
    elsewhere = ["launcher=slurm", "launcher.python=/there/bin/python"]
    composer.compose(["experiment=smoke", *elsewhere, "+callbacks.mine={_target_: own_parts.Inherits, row: 3}"])

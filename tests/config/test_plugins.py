"""The example in docs/examples/plugin works as printed, without any change to this repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_fixtures import UNCHANGED

from runner.config.composition import Composer
from runner.config.targets import instantiate
from runner.errors import UserError
from runner.metrics.records import read_records
from runner.training.data.sources import open_sources
from runner.training.model import build
from runner.training.step.tasks import build_task

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "plugin"


@pytest.fixture
def composer(monkeypatch: pytest.MonkeyPatch) -> Composer:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    UNCHANGED.add(EXAMPLE / "conf")
    return Composer([EXAMPLE / "conf"])


def test_user_dataset_model_loss_optimizer_are_instantiated(composer: Composer) -> None:
    config = composer.compose(["experiment=waves"]).config
    sources = open_sources(config)
    assert {name: len(source) for name, source in sources.items()} == {"slow": 256, "fast": 64}
    model = build.model(config)
    assert type(model).__name__ == "Perceptron"
    assert isinstance(build.optimizers(config, model)["optimizer"], torch.optim.RMSprop)
    batch = {"x": torch.zeros(4, 1), "y": torch.ones(4, 1)}
    training_step = build_task(config).training_step
    assert training_step is not None
    assert training_step(model, batch).shape == (4,)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model._target_=waves.Perceptrn"], ["model._target_", "Perceptrn"]),
        (["+model.depth=3"], ["depth"]),
        (["model._target_=nosuchmodule.Model"], ["nosuchmodule"]),
    ],
)
def test_a_mistake_in_a_target_node_is_one_line(composer: Composer, overrides: list[str], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        build.model(composer.compose(["experiment=waves", *overrides]).config)
    assert len(str(error.value).splitlines()) == 1
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("value", ["no", "maybe", 7, None])
def test_only_booleans_pass_where_a_class_declares_them(composer: Composer, value: Any) -> None:
    """In an override `no` is a text, which every condition treats as true."""
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    node = {"_target_": "torch.optim.SGD", "momentum": 0.9, "nesterov": value}
    with pytest.raises(UserError, match=f"^optimizer.nesterov={value} must be true or false$"):
        instantiate("optimizer", node, parameters)
    assert instantiate("optimizer", {**node, "nesterov": True}, parameters).defaults["nesterov"] is True
    config = composer.compose(["experiment=waves"]).config
    config = replace(config, train=replace(config.train, loss={**config.train.loss, "bogus": 3}))
    with pytest.raises(UserError, match=r"cannot be called as \(model, batch\) with its options: .*'bogus'"):
        build_task(config)


def test_arguments_are_plain_and_inner_nodes_instantiated() -> None:
    node = {
        "_target_": "builtins.dict",
        "setup": ["export A=${HOME}"],
        "inner": [{"_target_": "builtins.list"}, {"a": {"_target_": "builtins.int", "_args_": ["7"]}}],
        "later": {"_target_": "builtins.int", "_args_": ["8"], "_partial_": True},
    }
    made = instantiate("launcher", node, more=(1,))
    assert made.pop("later")() == 8
    assert made == {"setup": ["export A=${HOME}"], "inner": [[], {"a": 7}], "more": (1,)}
    unmade = {"_target_": "builtins.dict", "_recursive_": False, "inner": {"_target_": "builtins.list"}}
    assert instantiate("model", unmade) == {"inner": {"_target_": "builtins.list"}}
    with pytest.raises(UserError, match=r"^launcher\.inner\.0 \(builtins\.int\): invalid literal"):
        instantiate("launcher", {**node, "inner": [{"_target_": "builtins.int", "_args_": ["x"]}]})


@pytest.mark.slow
def test_the_command_of_the_documentation_trains(tmp_path: Path) -> None:
    for name in ("waves.py", "conf"):
        source = EXAMPLE / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    command = [sys.executable, "-m", "runner", "--config-dir", "conf", "experiment=waves", "run.dir=run"]
    for _ in range(2):  # the second time the run is finished already
        subprocess.run(command, cwd=tmp_path, env=dict(os.environ), check=True, timeout=400)
    records = list(read_records(tmp_path / "run/metrics.jsonl"))
    losses = [record["loss"] for record in records if "loss" in record]
    assert len(losses) == 60
    assert losses[-1] < losses[0]
    assert {"slow", "fast"} == set(records[-2]["sources"])

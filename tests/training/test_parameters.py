"""Parameters by name: their optimizer and group, frozen ones, and mistakes in patterns."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from runner.config.optimizers import optimizer_errors
from runner.config.schema import Config
from runner.errors import UserError
from runner.training.model import build
from runner.training.model.parameters import Group, named_parameters, param_groups

ADAMW = "runner.training.optim.AdamW"


def net() -> nn.Module:
    """Make the model of these tests, for `model._target_`."""
    torch.manual_seed(0)
    parts = {"embed": nn.Embedding(5, 4), "body": nn.Linear(4, 4), "norm": nn.LayerNorm(4), "head": nn.Linear(4, 2)}
    return nn.ModuleDict(parts)


def config(optimizer: dict[str, Any] | None = None, **several: Any) -> Config:
    made = Config()
    made.model = {"_target_": f"{__name__}.net"}
    made.optimizer = {"_target_": ADAMW, "lr": 0.1, "weight_decay": 0.3, **(optimizer or {})}
    made.optimizers = several
    made.scheduler.warmup_steps = 0
    return made


def groups_of(made: Config, name: str = "optimizer") -> list[tuple[list[str], float, float]]:
    """Return names, learning rate and weight decay of each torch group."""
    model = build.model(made)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizer = build.optimizers(made, model)[name]
    return [
        ([names[id(p)] for p in group["params"]], group["initial_lr"], group["weight_decay"])
        for group in optimizer.param_groups
    ]


def test_the_first_matching_group_wins_and_the_rest_is_first() -> None:
    made = config(
        {
            "groups": [
                {"match": "head.bias", "lr": 0.5},
                {"match": ["head.*", "norm.*"], "lr": 0.01, "weight_decay": 0.2},
                {"match": "embed*", "freeze": True},
            ]
        }
    )
    assert groups_of(made) == [
        (["body.weight"], 0.1, 0.3),
        (["body.bias"], 0.1, 0.0),
        (["head.bias"], 0.5, 0.0),  # without a decay of its own: the rule for biases
        (["norm.weight", "norm.bias", "head.weight"], 0.01, 0.2),
    ]
    frozen = [name for name, parameter in build.model(made).named_parameters() if not parameter.requires_grad]
    assert frozen == ["embed.weight"]


def test_groups_work_with_any_optimizer() -> None:
    made = config({"_target_": "torch.optim.SGD", "groups": [{"match": "head.*", "lr": 0.5}]})
    rest = ["embed.weight", "body.weight", "body.bias", "norm.weight", "norm.bias"]
    assert groups_of(made) == [(rest, 0.1, 0.3), (["head.weight", "head.bias"], 0.5, 0.3)]


def test_betas_of_a_group_are_as_torch_takes_them() -> None:
    made = config({"groups": [{"match": "head.*", "betas": [0, 0.5]}]})
    optimizer = build.optimizers(made, build.model(made))["optimizer"]
    assert optimizer.param_groups[-1]["betas"] == (0.0, 0.5)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            [{"match": "haed.*", "lr": 1}],
            r"groups.0.match=haed.\* matches no parameter; the nearest names are head.bias",
        ),
        (
            [{"match": "head*", "lr": 1}, {"match": "head.bias", "lr": 2}],
            r"groups.1.match=head.bias has no effect: optimizer.groups.0 matches head.bias already",
        ),
        ([{"match": "*", "freeze": True}], "no parameter for it that requires a gradient: nothing to train"),
        (
            [{"match": "head*", "learning_rate": 1}],
            r"groups.0.learning_rate=1: AdamW has no such option; it has lr, betas, eps, weight_decay",
        ),
    ],
)
def test_a_group_without_effect_is_one_line(groups: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        groups_of(config({"groups": groups}))
    assert "\n" not in str(caught.value)


def test_group_of_frozen_parameters_is_one_line() -> None:
    model = nn.Linear(2, 2)
    model.weight.requires_grad_(False)
    groups = Group.all_of("optimizer", {"groups": [{"match": "weight", "lr": 1}]})
    with pytest.raises(UserError, match=r"optimizer\.groups\.0 has no effect: the model has frozen weight"):
        param_groups("optimizer", model, named_parameters(model), groups, None)


SGD = {"_target_": "torch.optim.SGD", "lr": 0.1}


def test_each_of_several_optimizers_has_its_own_parameters() -> None:
    made = config(
        None,
        body={**SGD, "match": ["embed*", "body.*", "norm.*"], "groups": [{"match": "embed*", "freeze": True}]},
        head={"_target_": ADAMW, "lr": 0.2, "weight_decay": 0.5},
    )
    assert groups_of(made, "body") == [(["body.weight", "body.bias", "norm.weight", "norm.bias"], 0.1, 0)]
    assert groups_of(made, "head") == [(["head.weight"], 0.2, 0.5), (["head.bias"], 0.2, 0.0)]


@pytest.mark.parametrize(
    ("several", "message"),
    [
        ({"head": SGD}, "^no optimizer has embed.weight, body.weight, body.bias and 2 more: add them"),
        (
            {"head": SGD, "all": {**SGD, "match": "*"}},
            "^optimizers.all and optimizers.head both have head.weight, head.bias: let the match of one",
        ),
        ({"tail": SGD}, "^optimizers.tail has no match, and the model has no submodule called tail: set"),
        ({"a": {**SGD, "match": ["*", "x.*"]}}, r"^optimizers.a.match=x.\* matches no parameter; the nearest names"),
    ],
)
def test_parameter_with_no_or_two_optimizers_is_one_line(several: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        build.model(config(None, **several))
    assert "\n" not in str(caught.value)


def test_an_optimizer_that_calls_the_model_itself_is_refused() -> None:
    made = config({"_target_": "torch.optim.LBFGS"})
    del made.optimizer["weight_decay"]
    with pytest.raises(UserError, match="LBFGS calls the model several times in an update"):
        build.optimizers(made, build.model(made))


@pytest.mark.parametrize(
    ("groups", "line"),
    [
        ({"match": "a"}, "must be a list, such as"),
        (["head"], "groups.0=head must be a dictionary"),
        ([{"lr": 1}], "groups.0.match=None must be a pattern"),
        ([{"match": []}], "must be a pattern"),
        ([{"match": "a"}], "groups.0 changes nothing"),
        ([{"match": "a", "freeze": 1}], "groups.0.freeze=1 must be true or false"),
        ([{"match": "a", "freeze": True, "lr": 1}], "groups.0 freezes its parameters, and lr has no effect"),
        ([{"match": "a", "lr": -1}], "groups.0.lr=-1 must be a finite number, 0 or more"),
        ([{"match": "a", "lr": "x"}], "groups.0.lr=x must be a finite number, 0 or more"),
        ([{"match": "a", "betas": [2, 0]}], r"groups.0.betas=\[2, 0\] must be a list of two numbers"),
        ([{"match": "a", "params": []}], "groups.0.params is for the optimizer itself"),
    ],
)
def test_the_config_refuses_impossible_groups(groups: Any, line: str) -> None:
    found = list(optimizer_errors({"_target_": ADAMW, "groups": groups}, {}, 10, {}))
    assert [each for each in found if re.search(line, each)], found

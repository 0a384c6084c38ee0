"""The model summary: what is counted, once, and a memory estimate that allocates nothing and changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import here
import pytest
import torch
from composing import compose
from torch import nn

from exactdata import generators
from runner.config.frozen import load
from runner.config.schema import Config
from runner.training.model import build
from runner.training.model.footprint import Part, footprint, measured, per_step, planned_step
from runner.training.model.optimizers import Optimizers

WORDS = [*here.SHORT, "data.vocab_size=32"]


class Tied(nn.Module):
    """A model with an embedding tied to the output layer, a frozen part, a buffer, and a parameter at the top."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.embedding = nn.Embedding(10, 4)
        self.body = nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4, affine=False))
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.body.requires_grad_(False)


class Patient(torch.optim.SGD):
    """A user's optimizer."""


def with_optimizer(model: nn.Module, kind: Any, **options: Any) -> Optimizers:
    made = kind([each for each in model.parameters() if each.requires_grad], **options)
    torch.optim.lr_scheduler.ConstantLR(made)  # wraps `step`
    return Optimizers(model, {"optimizer": made}, {})


def test_tied_weights_count_once_and_frozen_ones_have_no_state() -> None:
    model = Tied()
    found = measured(model, with_optimizer(model, torch.optim.Adam), averaged=True)
    assert found.parts == (Part("(itself)", 3, 3, 12), Part("embedding", 40, 40, 160), Part("body", 16, 0, 64))
    assert (found.total.parameters, found.total.trainable) == (59, 43)
    held = 4 * 59 + 4 * 4 + 4 * 4 + 8  # with the buffers of the norm
    assert (found.model, found.average, found.gradients) == (held, held, 4 * 43)
    assert found.optimizers == 2 * 4 * 43 + 2 * 4  # the steps of two tensors


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adagrad, {}),
        (torch.optim.RMSprop, {"momentum": 0.9}),
        (torch.optim.AdamW, {"amsgrad": True, "foreach": True}),
    ],
)
def test_the_state_is_foreseen_and_nothing_is_changed(kind: Any, options: dict[str, Any]) -> None:
    model = Tied()
    optimizers = with_optimizer(model, kind, **options)
    weights = {name: each.clone() for name, each in model.state_dict().items()}
    before, drawn = {**optimizers["optimizer"].state}, generators.states()
    foreseen = measured(model, optimizers, averaged=False)
    assert optimizers["optimizer"].state.keys() == before.keys()
    assert all(torch.equal(each, weights[name]) for name, each in model.state_dict().items())
    assert all(each.grad is None for each in model.parameters())
    assert repr(generators.states()) == repr(drawn)
    for each in model.parameters():
        each.grad = torch.zeros_like(each) if each.requires_grad else None
    optimizers["optimizer"].step()
    assert measured(model, optimizers, averaged=False) == foreseen


def test_a_users_optimizer_is_not_tried_out() -> None:
    """Such an optimizer may keep more than its state, which is known only after its first step."""
    model = Tied()
    optimizers = with_optimizer(model, Patient, lr=0.1, momentum=0.9)
    found = measured(model, optimizers, averaged=False)
    assert found.optimizers is None
    assert str(found).endswith("172 B gradients + optimizer not known")
    for each in model.parameters():
        each.grad = torch.zeros_like(each) if each.requires_grad else None
    optimizers["optimizer"].step()
    assert measured(model, optimizers, averaged=False).optimizers == 4 * 43
    fresh = with_optimizer(model, Patient, lr=0.1, momentum=0.9)
    assert measured(model, fresh, averaged=False, to_try=True).optimizers == 4 * 43


def test_optimizer_needing_numbers_is_unknown_before_a_step() -> None:
    optimizers = with_optimizer(Tied(), torch.optim.Adafactor)
    assert measured(Tied(), optimizers, averaged=False, to_try=True).optimizers is None


def test_a_model_without_parameters() -> None:
    found = measured(nn.Identity(), Optimizers(nn.Identity(), {}, {}), averaged=False)
    assert str(found) == "0 parameters, 0 B weights + 0 B gradients + about 0 B optimizer"


def test_footprints_on_the_meta_and_real_device_agree() -> None:
    config: Config = compose([*WORDS, "train.ema_decay=0.9"]).config
    model = build.model(config)
    assert footprint(config) == footprint(config, "cpu") == measured(model, build.optimizers(config, model), True)


@pytest.mark.parametrize(
    ("words", "ranks", "line"),
    [
        ([], 2, " on each of 2 ranks; 8 samples (128 tokens) per step"),
        (["train.global_batch_size=32"], 1, "; 32 samples (512 tokens) per step"),
        (["data.sources"], 1, "; 4 samples per step"),
        (["data.loader"], 1, ""),
        (["strategy=fsdp"], 4, ", divided over 4 ranks; 16 samples (256 tokens) per step"),
    ],
)
def test_the_footprint_names_the_samples_of_a_step(words: list[str], ranks: int, line: str) -> None:
    config = compose([*WORDS, *(word for word in words if "=" in word)]).config
    for word in words:
        if word == "data.loader":
            config.data.loader = {"_target_": "mine.Loader"}
        elif word == "data.sources":
            config.data.sources = {
                "a": {"_target_": "runner.data.text.PythonText", "sequence_length": 16},
                "b": {"_target_": "mine.Pictures"},
            }
    assert planned_step(config, ranks) == line
    assert per_step(1, 64, 256) == "; 64 samples (16,384 tokens) per step"


def test_a_run_begins_with_the_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Compare the line with the estimate; none of it is in the metrics."""
    here.trained(tmp_path / "run", "train.steps=1", "eval.every_steps=0")
    _, line, *_ = capfd.readouterr().err.splitlines()
    config = load(tmp_path / "run")
    assert line == f"model: {footprint(config)}{planned_step(config, 1)}"
    assert "parameters" not in (tmp_path / "run" / "metrics.jsonl").read_text()

"""One or several optimizers: updates, schedules, gradient scaling, and a resume that continues bit for bit."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import manager
from torch import nn

from runner.checkpoint import build_train_state, restore_train_state
from runner.config.schedule import Phase, SchedulerConfig
from runner.config.schema import Config, Precision
from runner.errors import CheckpointError, TrainingError, UserError
from runner.training.model import build
from runner.training.model.optimizers import Optimizers

ADAMW = "runner.training.optim.AdamW"
STEP_LR = "torch.optim.lr_scheduler.StepLR"


def net() -> nn.Module:
    """Make the model of these tests, for `model._target_`."""
    return nn.ModuleDict({"body": nn.Linear(4, 6), "head": nn.Linear(6, 2)})


def halves(step: int, every: int = 2) -> float:
    """Halve the rate every `every` steps: a schedule for `scheduler._target_`."""
    return float(0.5 ** (step // every))


class Halves:
    """The same schedule as a class."""

    def __init__(self, every: int, warmup_steps: int = 7) -> None:
        self.every, self.warmup_steps = every, warmup_steps

    def __call__(self, step: int) -> float:
        return halves(step, self.every)


def endless(step: int) -> float:
    """Return an infinite factor from step 1 on."""
    return math.inf if step else 1.0


def config(precision: Precision = Precision.float32, **several: Any) -> Config:
    made = Config()
    made.train.precision, made.train.steps = precision, 20
    made.model = {"_target_": f"{__name__}.net"}
    made.optimizer = {"_target_": ADAMW, "lr": 0.1}
    made.optimizers = several
    return made


def built(made: Config, seed: int = 0) -> tuple[nn.Module, Optimizers]:
    made.seed = seed
    model = build.model(made)
    return model, build.optimizers(made, model)


def step(model: nn.Module, optimizers: Optimizers, number: int, clip: float | None = 0.1) -> list[tuple[float, bool]]:
    """Train one step: one loss, and an update by every optimizer."""
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
    loss = model["head"](model["body"](x).tanh()).square().mean()  # type: ignore[index]
    torch.autograd.backward(optimizers.scale(loss))
    done = [optimizers.apply(name, clip) for name in optimizers.names]
    optimizers.schedulers.step()
    return done


def test_a_single_optimizer_is_as_exact_as_torchs_own_loop() -> None:
    model, optimizers = built(config())
    other, plain = built(config())
    optimizer = plain["optimizer"]
    for number in range(6):
        ((norm, applied),) = step(model, optimizers, number)
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
        torch.autograd.backward(other["head"](other["body"](x).tanh()).square().mean())  # type: ignore[index]
        expected = torch.nn.utils.clip_grad_norm_(other.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        plain.schedulers.step()
        assert (norm, applied) == (expected.item(), True)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
        assert optimizers.lr() == plain.lr()


def test_gradients_not_finite_or_not_allowed_are_dropped() -> None:
    model, optimizers = built(config())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for value, allowed in ((math.nan, True), (1.0, False)):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        norm, applied = optimizers.apply("optimizer", allowed=allowed)
        assert not applied
        assert math.isnan(norm) == math.isnan(value)
        assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


SEVERAL: dict[str, Any] = {
    "body": {"_target_": ADAMW, "lr": 0.1, "groups": [{"match": "*.bias", "lr": 0.01}]},
    "head": {
        "_target_": "torch.optim.SGD",
        "lr": 0.2,
        "momentum": 0.9,
        "scheduler": {"_target_": STEP_LR, "step_size": 2, "gamma": 0.5},
    },
}
KINDS = {
    "one": {},
    "several": SEVERAL,
    "onecycle": {
        "every": {
            "_target_": ADAMW,
            "lr": 0.1,
            "match": "*",
            "scheduler": {"_target_": "torch.optim.lr_scheduler.OneCycleLR", "max_lr": 0.3, "total_steps": 20},
        }
    },
}


@pytest.mark.parametrize("precision", [Precision.float32, Precision.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_continues_bit_for_bit(tmp_path: Path, kind: str, precision: Precision) -> None:
    model, optimizers = built(config(precision, **KINDS[kind]))
    for number in range(5):
        step(model, optimizers, number)
    assert manager(tmp_path).save(5, model, optimizers, build_train_state(5, 0, optimizers), wait=True)
    resumed, others = built(config(precision, **KINDS[kind]), seed=1)
    state = manager(tmp_path).load(resumed, others)
    assert state is not None
    restore_train_state(state, others)
    assert others.state_dict() == optimizers.state_dict()
    for number in range(5, 9):
        assert step(model, optimizers, number) == step(resumed, others, number)
        for name in optimizers.names:
            assert optimizers[name].param_groups[0]["lr"] == others[name].param_groups[0]["lr"]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))


def test_other_optimizers_than_those_that_were_saved_do_not_fit(tmp_path: Path) -> None:
    model, optimizers = built(config(**SEVERAL))
    manager(tmp_path).save(1, model, optimizers, build_train_state(1, 0, optimizers), wait=True)
    with pytest.raises(CheckpointError, match="saved with body: AdamW, head: SGD, and this run has AdamW"):
        manager(tmp_path).load(*built(config()))
    _, scaled = built(config(Precision.float16))
    with pytest.raises(CheckpointError, match=r"was not saved with train.precision=float16, and this run is"):
        scaled.load_state_dict(built(config())[1].state_dict())


def test_each_optimizer_has_its_own_schedule() -> None:
    model, optimizers = built(config(**SEVERAL))
    rates = []
    for number in range(5):
        step(model, optimizers, number)
        rates.append((optimizers.lr("body"), optimizers.lr("head")))
    assert [head for _, head in rates] == [0.2, 0.1, 0.1, 0.05, 0.05]
    assert len({body for body, _ in rates}) == 5  # the run's: warming up


def total(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    return torch.stack([parameter.sum() for parameter in parameters]).sum()


def test_an_overflow_is_skipped_and_lowers_the_scale() -> None:
    model, optimizers = built(config(Precision.float16, **SEVERAL))
    assert optimizers.scaler is not None
    step(model, optimizers, 0)
    scale = optimizers.scaler.get_scale()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    torch.autograd.backward(optimizers.scale(total(model.parameters())) * math.inf)
    assert [applied for _, applied in map(optimizers.apply, optimizers.names)] == [False, False]
    assert optimizers.scaler.get_scale() == scale / 2
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert [applied for _, applied in step(model, optimizers, 1)] == [True, True]


def test_an_optimizer_may_be_applied_twice_in_a_step() -> None:
    model, optimizers = built(config(Precision.float16, **SEVERAL))
    torch.autograd.backward(optimizers.scale(total(model.parameters())))
    assert optimizers.apply("body")[1]
    torch.autograd.backward(optimizers.scale(total(optimizers.parameters("body"))))
    assert optimizers.apply("body")[1]
    assert optimizers.apply("head")[1]


# ---- schedules of the user's own


def scheduled(target: str, phases: dict[str, Phase] | None = None, **options: Any) -> Config:
    made = config()
    made.phases = phases or {}
    made.scheduler = SchedulerConfig(_target_=target, warmup_steps=None, min_ratio=None)
    made.scheduler.options.update(options)
    return made


def rates(made: Config, steps: int = 6) -> list[float]:
    model, optimizers = built(made)
    found = []
    for number in range(steps):
        found.append(optimizers.lr())
        step(model, optimizers, number)
    return found


@pytest.mark.parametrize("name", ["halves", "Halves"])
def test_a_function_or_a_class_of_such_is_a_schedule(name: str) -> None:
    phases = {"late": Phase(4, lr_scale=0.1)}
    expected = [0.1 * (halves(s, 3) * (0.1 if s >= 4 else 1.0)) for s in range(6)]
    assert rates(scheduled(f"{__name__}.{name}", phases, every=3)) == expected


def test_a_class_of_torch_is_stepped_once_a_step() -> None:
    assert rates(scheduled(STEP_LR, step_size=2, gamma=0.5)) == [0.1, 0.1, 0.05, 0.05, 0.025, 0.025]


def test_options_of_shipped_schedules_are_passed() -> None:
    made = scheduled(f"{__name__}.Halves", every=3)
    assert made.scheduler.node(["every", "warmup_steps"]) == {"every": 3, "_target_": f"{__name__}.Halves"}
    made.scheduler.warmup_steps = 3
    assert made.scheduler.node(["every", "warmup_steps"])["warmup_steps"] == 3


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (scheduled(STEP_LR), r"scheduler \(torch.*StepLR\): .*'step_size': check the options under scheduler"),
        (scheduled(STEP_LR, {"a": Phase(1, lr_scale=2.0)}, step_size=2), "phases.a.lr_scale=2.0 does not work with"),
        (scheduled("torch.optim.lr_scheduler.ReduceLROnPlateau"), "needs a metric at every step"),
        (scheduled(f"{__name__}.halves", often=3), "cannot be called as factor.step. with its options: .*'often'"),
    ],
)
def test_a_schedule_that_cannot_be_used_is_one_line(made: Config, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        built(made)
    assert "\n" not in str(caught.value)


def test_a_factor_that_is_not_finite_ends_the_run_with_one_line() -> None:
    with pytest.raises(TrainingError, match="returned inf at step 1: a factor must be a finite number"):
        rates(scheduled(f"{__name__}.endless"))


def test_a_schedule_of_torch_that_has_ended_is_one_line() -> None:
    made = scheduled("torch.optim.lr_scheduler.OneCycleLR", max_lr=0.1)
    made.scheduler.total_steps = 3
    with pytest.raises(TrainingError, match=r"the scheduler of optimizer \(OneCycleLR\): Tried to step 4 times"):
        rates(made)

"""AdamW is bit-identical to torch's and starts without torch._dynamo; the learning rate is a function of the step."""

from __future__ import annotations

import io
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from runner.config.schedule import LearningRate, Phase, PhaseSchedule, learning_rate_factor
from runner.errors import UserError
from runner.models.gpt import GPT
from runner.training import optim
from runner.training.model.parameters import decay_groups
from runner.training.model.schedulers import LearningRateScheduler
from runner.training.optim import AdamW

KINDS = [{}, {"foreach": True}, {"foreach": False}, {"fused": True}, {"amsgrad": True}, {"maximize": True}]


def start(make: Callable[..., torch.optim.Optimizer], **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))
    return model, make(decay_groups(model, 0.1), lr=1e-2, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


@pytest.mark.parametrize("compiling", [False, True])
@pytest.mark.parametrize("options", KINDS)
def test_adamw_is_bit_identical_to_torchs(
    options: dict[str, Any], compiling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optim, "_compiling", lambda: compiling)
    ours, theirs = start(AdamW, **options), start(torch.optim.AdamW, **options)
    train(*ours, 0, 30)
    train(*theirs, 0, 30)
    assert equal(ours[0], theirs[0])


@pytest.mark.parametrize(("first", "second"), [(AdamW, torch.optim.AdamW), (torch.optim.AdamW, AdamW)])
def test_states_are_interchangeable(first: Any, second: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim, "_compiling", lambda: False)
    whole, cut, rest = start(AdamW), start(first), start(second)
    train(*whole, 0, 20)
    train(*cut, 0, 9)
    rest[0].load_state_dict(cut[0].state_dict())
    rest[1].load_state_dict(cut[1].state_dict())
    train(*rest, 9, 20)
    assert equal(whole[0], rest[0])


def test_hooks_closures_and_zeroed_gradients_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim, "_compiling", lambda: False)
    model, optimizer = start(AdamW)
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))

    def closure() -> float:
        assert torch.is_grad_enabled()
        loss = model(torch.ones(2, 5)).sum()
        loss.backward()
        return float(loss.detach())

    assert isinstance(optimizer.step(closure), float)
    assert called == ["before", "after"]
    optimizer.zero_grad(set_to_none=False)
    assert all(not parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None)


@pytest.mark.slow
def test_a_training_step_does_not_import_dynamo() -> None:
    """The import takes most of a second, at every start."""
    code = """
        import sys, io, torch
        from runner.models.gpt import GPT
        from runner.models.loss import next_token_loss
        from runner.training.model.parameters import decay_groups
        from runner.training.model.schedulers import LearningRateScheduler
        from runner.training.optim import AdamW
        model = GPT(16, 8, 1, 1, 8, dropout=0.1)
        optimizer = AdamW(decay_groups(model, 0.1), lr=1e-3)
        scheduler = LearningRateScheduler(optimizer, lambda step: 1.0)
        x = torch.zeros(2, 8, dtype=torch.int64)
        for _ in range(2):
            next_token_loss(model, {"input_ids": x, "labels": x}).mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())
        scheduler.load_state_dict(scheduler.state_dict())
        sys.exit("torch._dynamo" in sys.modules)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_only_matrices_decay() -> None:
    model = GPT(16, 8, 2, 2, 8, tie_weights=True)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    matrices, others = decay_groups(model, 0.1)
    heavy = ("qkv.weight", "out.weight", "up.weight", "down.weight")
    decayed = {names[id(parameter)] for parameter in matrices["params"]}
    kept = {names[id(parameter)] for parameter in others["params"]}
    assert decayed == {n for n in names.values() if n.endswith(heavy)}
    assert kept == set(names.values()) - decayed
    assert (matrices["weight_decay"], others["weight_decay"]) == (0.1, 0.0)


def test_frozen_parameters_are_left_out() -> None:
    model = nn.Linear(3, 3)
    model.bias.requires_grad_(False)
    assert [len(group["params"]) for group in decay_groups(model, 0.1)] == [1]
    model.requires_grad_(False)
    with pytest.raises(UserError, match="nothing to train"):
        decay_groups(model, 0.1)
    with pytest.raises(UserError, match=r"weight_decay=-1"):
        decay_groups(nn.Linear(3, 3), -1)


# ---- the learning rate


def scheduler(phases: dict[str, Phase] | None = None, total: int = 50) -> LearningRateScheduler:
    _, optimizer = start(AdamW)
    factor = learning_rate_factor(LearningRate("cosine", total, 5, 0.1), PhaseSchedule(phases or {}))
    return LearningRateScheduler(optimizer, factor)


def rates(made: LearningRateScheduler, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        found.append(float(made.get_last_lr()[0]))
        assert [group["lr"] for group in made.optimizer.param_groups] == made.get_last_lr()
        made.optimizer.step()
        made.step()
    return found


def test_the_learning_rate_of_a_step_is_the_factor_at_its_index() -> None:
    made = scheduler({"late": Phase(7, lr_scale=0.5), "first": Phase(0, lr_scale=2.0)})
    rate = LearningRate("cosine", 50, 5, 0.1)
    expected = [1e-2 * (rate(s) * (2.0 if s < 7 else 0.5)) for s in range(50)]
    assert rates(made, 50) == expected


@pytest.mark.parametrize("cut", [0, 1, 4, 5, 6, 7, 8, 49])
def test_a_resumed_learning_rate_is_bit_identical(cut: int) -> None:
    phases = {"late": Phase(start_step=7, lr_scale=0.3)}
    whole = rates(scheduler(phases), 50)
    first = scheduler(phases)
    rates(first, cut)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = scheduler(phases)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert rates(second, 50 - cut) == whole[cut:]


def test_longer_schedule_acts_at_the_first_resumed_step() -> None:
    short, longer = scheduler(total=50), scheduler(total=100)
    rates(short, 50)
    longer.load_state_dict(short.state_dict())
    assert longer.get_last_lr()[0] == 1e-2 * LearningRate("cosine", 100, 5, 0.1)(50)
    assert longer.optimizer.param_groups[1]["lr"] == longer.get_last_lr()[0]


def test_a_skipped_optimizer_step_causes_no_warning() -> None:
    made = scheduler()
    made.step()
    assert made.last_epoch == 1


def test_a_state_of_torchs_lambda_lr_can_be_loaded() -> None:
    _, optimizer = start(torch.optim.AdamW)
    theirs = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    for _ in range(3):
        optimizer.step()
        theirs.step()
    ours = scheduler()
    ours.load_state_dict(theirs.state_dict())
    assert ours.last_epoch == 3
    assert ours.get_last_lr()[0] == 1e-2 * LearningRate("cosine", 50, 5, 0.1)(3)


def test_a_learning_rate_in_a_tensor_is_set_in_place() -> None:
    model = nn.Linear(2, 2)
    optimizer = AdamW(model.parameters(), lr=torch.tensor(0.5), foreach=False)
    kept = optimizer.param_groups[0]["lr"]
    made = LearningRateScheduler(optimizer, lambda step: 1 / (step + 1))
    made.step()
    assert optimizer.param_groups[0]["lr"] is kept
    assert made.get_last_lr() == [0.25]

"""A user's task: its results are recorded exactly, and each possible mistake is one line."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from composing import compose
from custom_tasks import Adversarial, Pair
from runs import Run, assert_same_run
from torch import nn

from runner.config.optimizers import SINGLE
from runner.errors import UserError
from runner.models.tasks import Classification, NextToken
from runner.system.distributed import World
from runner.training.model.optimizers import Optimizers
from runner.training.model.schedulers import LearningRateScheduler
from runner.training.step.step import Drawn, Forward, StepResult, TrainStep
from runner.training.step.tasks import Task, build_task, per_sample

CPU = torch.device("cpu")
OWN_PAIR = [
    "data=own",
    "+data.sources={a:{_target_:custom_tasks.Points}}",
    "+data.eval_sources={a:{_target_:custom_tasks.Points,size:40,seed:3}}",
    "model=own",
    "model._target_=custom_tasks.Pair",
    "task=own",
    "optimizers={generator:{_target_:torch.optim.Adam},discriminator:{_target_:torch.optim.SGD,lr:0.1}}",
    "train.steps=20",
    "train.batch_size=4",
    "train.grad_accum_steps=2",
    "checkpoint.every_steps=4",
    "eval.every_steps=10",
    "run.threads=1",
    "logger=none",
]


def maker(compute: Any, model: nn.Module, sources: list[str] | None = None, accum: int = 1) -> TrainStep:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizers = Optimizers.of_one(model, optimizer, LearningRateScheduler(optimizer, lambda step: 1.0))
    task = compute if isinstance(compute, Task) else Task.of(compute)
    return TrainStep(Forward(World(), CPU, model, task, nullcontext), optimizers, sources or [], accum)


def stepped(compute: Any, batches: list[Any], where: list[Any] | None = None, **more: Any) -> StepResult:
    """Make one step over these micro-batches, with samples of the sources `where`."""
    model = more.pop("model", None) or nn.Linear(3, 2)
    where = where or [None] * len(batches)
    drawn = iter(Drawn(batch, source) for batch, source in zip(batches, where, strict=True))
    return maker(compute, model, accum=len(batches), **more)(lambda: next(drawn))


def outputs(**values: Any) -> Callable[[nn.Module, Any], Any]:
    return lambda model, batch: {"loss": model(batch).square().mean(1), **values}


def test_every_value_is_the_mean_over_step_and_source() -> None:
    torch.manual_seed(0)
    batches = [torch.randn(4, 3), torch.randn(4, 3)]
    sources = [np.array([0, 1, 1, 0]), np.array([1, 1, 1, 1])]

    def compute(model: nn.Module, batch: torch.Tensor) -> Any:
        return {"loss": model(batch).square().mean(1), "large": batch[:, 0] > 0, "table": batch}

    model = nn.Linear(3, 2)
    wanted = model(torch.cat(batches)).square().mean(1)
    result = stepped(compute, batches, sources, model=model, sources=["a", "b"])
    large = (torch.cat(batches)[:, 0] > 0).double()
    where = torch.from_numpy(np.concatenate(sources))
    assert list(result.values) == ["loss", "large"]
    assert result.loss == pytest.approx(wanted.mean().item())
    assert result.values["large"] == large.mean()
    for number, name in enumerate("ab"):
        assert result.by_source["large"][name] == large[where == number].mean()
        assert result.by_source["loss"][name] == pytest.approx(wanted[where == number].mean().item())


def test_micro_batches_add_up_to_the_gradient_of_the_whole_batch() -> None:
    torch.manual_seed(0)
    data, whole, split = torch.randn(8, 3), nn.Linear(3, 2), nn.Linear(3, 2)
    split.load_state_dict(whole.state_dict())
    one = stepped(outputs(), [data], model=whole)
    two = stepped(outputs(), [data[:2], data[2:4], data[4:6], data[6:]], model=split)
    assert one.grad_norm == pytest.approx(two.grad_norm)
    torch.testing.assert_close(whole.weight, split.weight)


def weighted(model: nn.Module, batch: torch.Tensor) -> Any:
    return {"loss": model(batch).square().mean(1), "large": batch[:, 0] > 0, "weight": batch[:, 2].abs().floor()}


@pytest.mark.parametrize("usual_weight", [1.0, 48.0])
def test_with_weights_every_value_is_the_mean_over_all_of_them(usual_weight: float) -> None:
    """Check the values of the step, of each source, and of the gradients, which are clipped afterwards."""
    torch.manual_seed(0)
    data, model = 2 * torch.randn(8, 3), nn.Linear(3, 2)
    data[6:, 2] = 0.5  # a micro-batch without weight
    outputs = weighted(model, data)
    weight = outputs["weight"]
    wanted = (outputs["loss"] * weight).sum() / weight.sum()
    gradients = torch.autograd.grad(wanted, [model.weight, model.bias])
    norm = torch.cat([each.flatten() for each in gradients]).norm()
    before = model.weight.detach().clone()
    where = [np.array([0, 1]), np.array([1, 1, 0, 0]), np.array([2, 2])]
    made = maker(weighted, model, ["a", "b", "c"], 3)
    made.usual_weight, made.clip_norm = usual_weight, 0.5
    drawn = iter(map(Drawn, (data[:2], data[2:6], data[6:]), where))
    result = made(lambda: next(drawn))
    assert result.loss == pytest.approx(wanted.item())
    assert result.grad_norm == pytest.approx(norm.item())
    assert norm > 0.5
    torch.testing.assert_close(before - model.weight, 0.1 * gradients[0] * 0.5 / norm)
    large, everywhere = outputs["large"].double(), torch.from_numpy(np.concatenate(where))
    assert result.values["large"] == pytest.approx(((large * weight).sum() / weight.sum()).item())
    for number, name in enumerate("ab"):
        own = everywhere == number
        assert result.by_source["large"][name] == pytest.approx(np.average(large[own], weights=weight[own]))
    assert result.by_source["loss"].keys() == {"a", "b"}
    assert list(result.values) == ["loss", "large"]


def test_a_step_without_any_weight_makes_no_update() -> None:
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    result = stepped(weighted, [torch.zeros(4, 3)], model=model)
    assert (result.skipped, result.empty, result.nonfinite) == (True, True, False)
    assert math.isnan(result.loss)
    assert torch.equal(model.weight, before)


def twice(step: Any) -> None:
    for batch in step.batches:
        outputs = weighted(step.model, batch)
        step.backward(outputs, retain_graph=True)
        step.backward(outputs)


def after_the_loop(step: Any) -> None:
    for batch in step.batches:
        outputs = weighted(step.model, batch)
    step.backward(outputs)


def in_some_losses(step: Any) -> None:
    for number, batch in enumerate(step.batches):
        outputs = weighted(step.model, batch)
        step.backward(outputs if number else outputs["loss"])


@pytest.mark.parametrize(
    ("compute", "words"),
    [
        (lambda model, batch: {**weighted(model, batch), "weight": -batch[:, 0]}, "returned a weight of -1: "),
        (lambda model, batch: {**weighted(model, batch), "weight": batch[:, 0] / 0}, "returned a weight of inf: "),
        (lambda model, batch: {**weighted(model, batch), "weight": batch}, r"weight of shape \(4, 3\)"),
        (lambda model, batch: {**weighted(model, batch), "weight": 1.0}, "weight as float"),
        (twice, "with two losses of a micro-batch: add up the losses"),
        (after_the_loop, "outside of the loop over step.batches"),
        (in_some_losses, "with some losses of an update and not with others"),
    ],
)
def test_weights_that_have_no_meaning_are_refused(compute: Any, words: str) -> None:
    task = whole(compute) if compute in (twice, after_the_loop, in_some_losses) else compute
    with pytest.raises(UserError, match=words):
        stepped(task, [torch.ones(4, 3), torch.ones(4, 3)])


def test_value_must_not_share_a_name_with_an_optimizers_loss() -> None:
    """Its weights would count as those of that optimizer's losses."""
    model = nn.Linear(3, 2)
    with pytest.raises(UserError, match=f"value named 'loss_{SINGLE}'"):
        stepped(outputs(**{f"loss_{SINGLE}": torch.ones(4)}), [torch.ones(4, 3)], model=model)


def test_each_optimizer_has_the_weights_of_its_own_losses() -> None:
    """Include two losses that are both computed before the first of two updates."""
    torch.manual_seed(0)
    model, data = Pair().eval(), torch.randn(4, 2)
    losses = {"generator": model.generator(data).square().mean(1), "discriminator": model(data).square().mean(1)}
    weights = {"generator": torch.tensor([1.0, 0, 2, 0]), "discriminator": torch.tensor([0.0, 5, 1, 1])}
    wanted = {
        name: torch.autograd.grad((losses[name] * weights[name]).sum() / weights[name].sum(), [*part.parameters()])
        for name, part in (("generator", model.generator), ("discriminator", model.discriminator))
    }

    def take_step(step: Any) -> None:
        for batch in step.batches:
            outputs = {"generator": step.model.generator(batch), "discriminator": step.model.eval()(batch)}
            for name, output in outputs.items():
                step.backward({"loss": output.square().mean(1), "weight": weights[name]}, name)
        step.update("generator")
        step.update("discriminator")

    made = {name: torch.optim.SGD(getattr(model, name).parameters(), 0.1) for name in wanted}
    schedulers = {name: LearningRateScheduler(one, lambda step: 1.0) for name, one in made.items()}
    before = {name: [each.detach().clone() for each in getattr(model, name).parameters()] for name in wanted}
    optimizers = Optimizers(model, made, schedulers)
    TrainStep(Forward(World(), CPU, model, whole(take_step), nullcontext), optimizers, [])(lambda: Drawn(data))
    for name, gradients in wanted.items():
        for old, new, gradient in zip(before[name], getattr(model, name).parameters(), gradients, strict=True):
            torch.testing.assert_close(old - new, 0.1 * gradient)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (torch.zeros(()), ["loss of shape ()", "shape (4,)", "reduction='none'"]),
        (torch.zeros(4, 2), ["loss of shape (4, 2)", "shape (4,)"]),
        (torch.zeros(3), ["loss of shape (3,)", "shape (4,)"]),
        (torch.zeros(4, dtype=torch.int64), ["loss of type torch.int64", "floating-point"]),
        (torch.zeros(4, dtype=torch.complex64), ["complex64", "real"]),
        (0.5, ["loss as float", "tensor"]),
        (None, ["loss as NoneType"]),
        ({"accuracy": torch.zeros(4)}, ["accuracy", "no 'loss'"]),
        ({}, ["nothing", "no 'loss'"]),
        ({"loss": torch.zeros(4), "accuracy": torch.zeros(())}, ["accuracy of shape ()", "shape (4,)"]),
        ({"loss": torch.zeros(4), "accuracy": 0.5}, ["accuracy as float"]),
        ({"loss": torch.zeros(4), "lr": torch.zeros(4)}, ["'lr'", "another name"]),
        ({"loss": torch.zeros(4), "eval_x": torch.zeros(4)}, ["'eval_x'", "another name"]),
    ],
)
def test_a_wrong_return_value_is_one_line(returned: Any, words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        per_sample("task (my.Task)", returned, 4)
    text = str(error.value)
    assert len(text.splitlines()) == 1
    assert text.startswith("task (my.Task)")
    assert all(word in text for word in words), text


def whole(take_step: Callable[[Any], None]) -> Task:
    return Task("task (my.Task)", outputs(), outputs(), take_step)


def without_update(step: Any) -> None:
    for batch in step.batches:
        step.backward(step.model(batch).square().mean(1))


def unknown_optimizer(step: Any) -> None:
    step.update("generater")


def without_loss(step: Any) -> None:
    for parameter in step.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    step.update()


def constant_loss(step: Any) -> None:
    for batch in step.batches:
        step.backward(step.model(batch).square().mean(1).detach())


def logs_nothing(step: Any) -> None:
    step.log("a", None)


def logs_by_two_lines(step: Any) -> None:
    step.log("a\nb", 1.0)


def mean_of_a_number(step: Any) -> None:
    step.mean(3.0)


@pytest.mark.parametrize(
    ("take_step", "words"),
    [
        (constant_loss, ["a loss without a gradient", "detached"]),
        (logs_nothing, ["step.log('a', …) is passed a NoneType"]),
        (logs_by_two_lines, ["'a\\nb'", "printable"]),
        (mean_of_a_number, ["step.mean takes one value or more per sample"]),
        (without_update, ["made no update", "step.update()"]),
        (unknown_optimizer, ["no optimizer 'generater'"]),
        (without_loss, ["gave no loss", "step.log('loss'"]),
    ],
)
def test_a_wrong_step_is_one_line(take_step: Callable[[Any], None], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        stepped(whole(take_step), [torch.zeros(4, 3)])
    assert all(word in str(error.value) for word in words), error.value


def test_a_number_that_a_step_logs_is_of_no_source() -> None:
    """Include a micro-batch of one sample, whose source it could be mistaken for."""

    def take_step(step: Any) -> None:
        for batch in step.batches:
            step.backward(step.model(batch).square().mean(1))
            step.log("number", 2.0)
            step.log("first", batch[:, 0])
        step.update()

    samples = [torch.tensor([[1.0, 0, 0]]), torch.tensor([[3.0, 0, 0]])]
    result = stepped(whole(take_step), samples, [np.array([0]), np.array([1])], sources=["a", "b"])
    assert (result.values["number"], result.values["first"]) == (2.0, 2.0)
    assert result.by_source["first"] == {"a": 1.0, "b": 3.0}
    assert not result.by_source.get("number")


def test_a_step_without_a_request_still_consumes_its_batch() -> None:
    """The data order must not depend on how a task uses the batches."""
    left: Iterator[Drawn] = iter([Drawn(torch.zeros(4, 3)), Drawn(torch.zeros(4, 3)), Drawn(torch.ones(4, 3))])

    def take_step(step: Any) -> None:
        without_loss_batches = step.model(torch.ones(2, 3)).square().mean(1)
        step.backward(without_loss_batches)
        step.update()

    result = maker(whole(take_step), nn.Linear(3, 2), accum=2)(lambda: next(left))
    assert result.samples == 8
    assert next(left).batch.sum() == 12


def test_a_loss_that_is_not_finite_is_not_applied() -> None:
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()

    def compute(model: nn.Module, batch: torch.Tensor) -> Any:
        return torch.where(batch[:, 0] > 0, float("inf"), model(batch).square().mean(1))

    result = stepped(compute, [torch.tensor([[1.0, 0, 0], [-1.0, 0, 0]])], model=model)
    assert result.skipped
    assert result.nonfinite
    assert torch.equal(model.weight, before)


def test_an_overflow_halves_the_scale_for_the_next_step() -> None:
    factor = torch.tensor(float("inf"))

    def compute(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = model(batch)
        output.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]
        return output.square().mean(1)

    step = maker(compute, nn.Linear(3, 2))
    step.optimizers.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    result = step(lambda: Drawn(torch.ones(4, 3)))
    assert (result.skipped, result.nonfinite) == (True, False)
    assert step.optimizers.scaler.get_scale() == 2.0
    factor.fill_(1.0)
    assert not step(lambda: Drawn(torch.ones(4, 3))).skipped


@pytest.mark.parametrize(("factor", "applied"), [(1.0, True), (float("inf"), False)])
def test_a_task_learns_whether_its_update_was_applied(factor: float, applied: bool) -> None:
    told: list[bool] = []

    def take_step(step: Any) -> None:
        for batch in step.batches:
            step.backward(factor * step.model(batch).square().mean(1))
        told.append(step.update())

    stepped(whole(take_step), [torch.ones(4, 3)])
    assert told == [applied]


def test_inputs_of_a_loss_are_freed_unless_kept() -> None:
    """As in torch, a second backward pass through it is refused."""

    def take_step(step: Any) -> None:
        for batch in step.batches:
            loss = step.model(batch).square().mean(1)
            step.backward(loss, retain_graph=True)
            step.backward(loss)
            with pytest.raises(RuntimeError, match="a second time"):
                step.backward(loss)
        step.update()

    stepped(whole(take_step), [torch.ones(4, 3)])


def test_alternating_updates_change_their_own_parameters_only() -> None:
    torch.manual_seed(0)
    model = Pair()
    made = {name: torch.optim.SGD(getattr(model, name).parameters(), 0.1) for name in ("generator", "discriminator")}
    schedulers = {name: LearningRateScheduler(optimizer, lambda step: 1.0) for name, optimizer in made.items()}
    adversarial = Adversarial()
    task = Task("task (Adversarial)", adversarial.evaluation_step, adversarial.evaluation_step, adversarial.take_step)
    step = TrainStep(Forward(World(), CPU, model, task, nullcontext), Optimizers(model, made, schedulers), [], 2)
    seen: list[tuple[bool, bool]] = []
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def changed(part: str) -> bool:
        return any(not torch.equal(p, before[n]) for n, p in model.named_parameters() if n.startswith(part))

    adversarial.between = lambda: seen.append((changed("generator"), changed("discriminator")))
    result = step(lambda: Drawn(torch.randn(4, 2)))
    assert seen == [(False, True)]
    assert changed("generator")
    assert all(parameter.grad is None for parameter in model.parameters())
    assert result.loss == result.values["loss_generator"] + result.values["loss_discriminator"]
    assert list(result.grad_norms) == list(result.lrs)[::-1] == ["discriminator", "generator"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["task=own", "task._target_=custom_tasks.Misspelt"], ["no training_step(model, batch)", "traning_step"]),
        (["task=own", "task._target_=custom_tasks.OneArgument"], ["training_step", "(model, batch)"]),
        (["task=own", "task._target_=custom_tasks.WithParameters"], ["holds parameters", "part of the model"]),
        (["task=own", "task._target_=custom_tasks.Fine", "+task.bogus=1"], ["task", "it takes none"]),
        (["task=own", "task._target_=custom_tasks.loss", "+task.bogus=1"], ["task", "bogus"]),
        (["train.loss._target_=custom_tasks.loss", "train.loss.bogus=1"], ["train.loss", "bogus"]),
        (["task=classification", "task.label_smoothing=2"], ["label_smoothing=2"]),
    ],
)
def test_a_task_that_cannot_be_used_is_one_line_at_the_start(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        build_task(compose(overrides).config)
    text = str(error.value)
    assert len(text.splitlines()) == 1
    assert all(word in text for word in words), text


def test_a_function_and_a_loss_are_tasks() -> None:
    model, batch = nn.Linear(3, 2), torch.randn(4, 3)
    for overrides in (["task=own", "task._target_=custom_tasks.loss"], ["train.loss._target_=custom_tasks.loss"]):
        task = build_task(compose(overrides).config)
        assert task.training_step is not None
        assert task.training_step(model, batch).shape == (4,)
        assert task.evaluation_step is task.training_step


def test_classification_finds_or_lists_the_entries_of_a_batch() -> None:
    model = nn.Linear(3, 5)
    inputs, labels = torch.randn(4, 3), torch.randint(5, (4,))
    task = Classification()
    wanted = torch.nn.functional.cross_entropy(model(inputs), labels, reduction="none")
    batches: list[Any] = [
        (inputs, labels),
        [inputs, labels],
        {"image": inputs, "label": labels, "dataset_idx": torch.zeros(4)},
        {"y": labels, "x": inputs},
    ]
    for batch in batches:
        found = task.evaluation_step(model, batch)
        assert torch.equal(found["loss"], wanted)
        assert torch.equal(found["accuracy"], (found["preds"].argmax(1) == labels).float())
    for batch, words in (
        ({"image": inputs, "class": labels}, "image, class"),
        (inputs, "Tensor"),
        ((inputs, torch.zeros(4, 2)), r"\(4, 2\)"),
    ):
        with pytest.raises(UserError, match=words):
            task.training_step(model, batch)
    with pytest.raises(UserError, match=r"task.inputs=picture is not in the batch"):
        Classification(inputs="picture").training_step(model, {"image": inputs, "label": labels})


def test_the_tasks_pass_metrics_their_arguments() -> None:
    tokens = torch.randint(7, (2, 5))
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))
    found = NextToken().evaluation_step(model, {"input_ids": tokens, "labels": tokens})
    assert found["preds"].shape == (2, 5, 7)
    assert torch.equal(found["loss"], NextToken().training_step(model, {"input_ids": tokens, "labels": tokens})["loss"])


def test_next_token_loss_is_the_mean_over_unmasked_labels() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(7, (6, 5))
    labels = torch.where(torch.rand(6, 5) < 0.5, -100, tokens)
    labels[2] = -100
    head = nn.Linear(4, 7)
    model = nn.Sequential(nn.Embedding(7, 4), head)
    wanted = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
    (gradient,) = torch.autograd.grad(wanted, head.weight)
    task = Task.of(NextToken().training_step)
    batches = [{"input_ids": tokens[a:b], "labels": labels[a:b]} for a, b in ((0, 1), (1, 4), (4, 6))]
    before = head.weight.detach().clone()
    result = stepped(task, batches, model=model)
    assert list(result.values) == ["loss"]
    assert result.loss == pytest.approx(wanted.item())
    torch.testing.assert_close(before - head.weight, 0.1 * gradient)  # the learning rate is 0.1


def test_a_state_that_cannot_be_kept_or_loaded_is_one_line() -> None:
    bad_save, bad_load = (
        build_task(compose(["task=own", "task._target_=custom_tasks.Remembering", f"task.broken={way}"]).config)
        for way in ("save", "load")
    )
    with pytest.raises(UserError, match=r"^task \(custom_tasks.Remembering\): the state\['mean'\] is a custom_tasks"):
        bad_save.check_state()
    bad_load.check_state()
    with pytest.raises(UserError, match=r"cannot load the state that it saved \(KeyError: 'means'\)"):
        bad_load.restore([{"mean": torch.zeros(2)}], 0)


@pytest.mark.slow
def test_a_task_with_a_state_of_each_rank_is_exact_after_kills(tmp_path: Path) -> None:
    """Train on two ranks with different states."""
    words = [*OWN_PAIR, "task._target_=custom_tasks.Remembering"]
    plain, killed = (Run(tmp_path / name, words, ranks=2) for name in ("plain", "killed"))
    plain.finish()
    killed.interrupt((7, signal.SIGKILL), (13, signal.SIGKILL), calls=2)
    killed.finish()
    assert_same_run(plain, killed)


def test_a_task_that_cannot_be_evaluated_is_found_at_the_start() -> None:
    task = build_task(compose(["task=own", "task._target_=custom_tasks.StepsOnly"]).config)
    with pytest.raises(
        UserError, match=r"has no evaluation_step\(model, batch\): define it, or set eval.every_steps=0"
    ):
        task.check_evaluation()


def test_half_a_state_is_refused() -> None:
    with pytest.raises(UserError, match=r"has state_dict alone: define both"):
        build_task(compose(["task=own", "task._target_=custom_tasks.HalfAState"]).config)

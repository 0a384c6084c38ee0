"""Rank-invariant training: on any nodes, the same bits."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import custom
import custom_tasks
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from runs import TINY, Run, assert_same_run
from shapes import Part, Shapes, the_shapes
from torch import nn

from exactdata.order.batch_shape import BatchShape
from runner.errors import UserError
from runner.system.distributed import World
from runner.training.model.optimizers import Optimizers
from runner.training.model.schedulers import LearningRateScheduler
from runner.training.step.invariant import FixedMicroBatches
from runner.training.step.step import Drawn, Forward, TrainStep
from runner.training.step.tasks import Task

CPU = torch.device("cpu")
GPT = [*TINY, "data=mixture", "sampler=elastic", "model.dropout=0.1", "train.batch_size=2"]
PHASES = ["+phases.late={start_step: 5, weights: {code: 3.0}, temperature: 2.0, lr_scale: 0.5}"]
POINTS = [
    *("experiment=smoke", "data=own", "model=own", "task=own", "sampler=elastic", "run.threads=1", "logger=none"),
    *("+data.sources.points={_target_: custom_tasks.Points}", "scheduler=constant", "train.batch_size=4"),
    "+data.eval_sources.points={_target_: custom_tasks.Points, size: 20, seed: 1}",
]
PAIR = [*POINTS, "+model._target_=custom_tasks.Pair"]
RUNS = {
    "phases, dropout, masked labels, an uneven number of micro-batches": [
        *(*GPT, *PHASES, "train.global_batch_size=14", "task._target_=custom_tasks.Masked"),
    ],
    "one micro-batch, average of the weights": [*GPT, "train.global_batch_size=2", "train.ema_decay=0.9"],
    "float16, whose loss is not finite now and then": [
        *GPT,
        *("train.global_batch_size=10", "train.precision=float16", "train.on_nonfinite=skip", "train.clip_norm=0.01"),
        *("train.loss._target_=custom.nan_in_some_steps", "data.num_workers=2"),
    ],
    "two optimizers and steps of the task's own": [
        *PAIR,
        *("train.global_batch_size=24", "+task._target_=custom_tasks.Adversarial"),
        "+optimizers.generator={_target_: torch.optim.Adam, lr: 0.01}",
        "+optimizers.discriminator={_target_: torch.optim.SGD, lr: 0.1, momentum: 0.9}",
        "eval.metrics={}",
    ],
    "two optimizers, a parameter that only some micro-batches use": [
        *PAIR,
        *("train.global_batch_size=28", "+task._target_=custom_tasks.Choosy"),
        "+optimizers.generator={_target_: torch.optim.AdamW, lr: 0.01}",
        "+optimizers.discriminator={_target_: torch.optim.AdamW, lr: 0.01}",
    ],
    "weights in another memory layout, an optimizer that draws": [
        *(*POINTS, "+model._target_=custom_tasks.Columns", "+task._target_=custom_tasks.Fine", "eval.sets={}"),
        *("train.global_batch_size=28", "optimizer=sgd", "optimizer._target_=custom_tasks.Langevin"),
    ],
}
STEPS = 8
LINES = STEPS + 2


One = Callable[[str], Run]


@pytest.fixture(scope="session")
def shapes() -> Shapes:
    return the_shapes()


def words_of(kind: str, every: int) -> list[str]:
    return [*RUNS[kind], f"train.steps={STEPS}", "eval.every_steps=4", f"checkpoint.every_steps={every}"]


@pytest.fixture(scope="session")
def one(shapes: Shapes, tmp_path_factory: pytest.TempPathFactory) -> One:
    """Return a function that makes a kind of run on one rank, from beginning to end, once."""
    made: dict[str, Run] = {}

    def one(kind: str) -> Run:
        if kind not in made:
            path = tmp_path_factory.mktemp("reference") / "run"
            assert shapes.run(path, words_of(kind, 3), [Part(1)]) == [0]
            made[kind] = Run(path, [])
            assert len(made[kind].lines()) == LINES
        return made[kind]

    return one


PARTS = st.builds(
    Part,
    ranks=st.integers(1, 4),
    lines=st.integers(0, LINES - 1),
    delay_ms=st.sampled_from([0, 0, 1, 5, 20]),
    signum=st.sampled_from([signal.SIGKILL, signal.SIGTERM]),
)


def check(kind: str, every: int, parts: list[Part], last: int, one: One, shapes: Shapes, path: Path) -> None:
    shapes.run(path, words_of(kind, every), [*parts, Part(last)])
    assert_same_run(one(kind), Run(path, []))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.xdist_group("rank-invariant")
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(list(RUNS)),
    every=st.integers(1, 5),
    parts=st.lists(PARTS, min_size=1, max_size=3),
    last=st.integers(1, 4),
)
def test_a_run_resumed_with_other_ranks_is_bit_identical(
    kind: str,
    every: int,
    parts: list[Part],
    last: int,
    one: One,
    shapes: Shapes,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Kill or stop it anywhere, save at any boundary, continue on any number of ranks: same metrics and weights."""
    check(kind, every, parts, last, one, shapes, tmp_path_factory.mktemp("shapes") / "run")


FIRST, *OTHERS = RUNS


@pytest.mark.timeout(1800)
@pytest.mark.xdist_group("rank-invariant")
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(FIRST, marks=pytest.mark.promise("stopped on 3 ranks, ended on 2: bit for bit the run on 1 rank")),
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS),
    ],
)
def test_three_and_then_other_ranks_equal_one_rank(kind: str, one: One, shapes: Shapes, tmp_path: Path) -> None:
    """Include ranks that have one micro-batch more than others, or none."""
    last = 2 if "one micro" not in kind else 4
    check(kind, 2, [Part(3, 5, 0, signal.SIGTERM)], last, one, shapes, tmp_path / "run")
    ranks = [attempt["ranks"] for attempt in Run(tmp_path / "run", []).attempts()]
    assert ranks == [3, last]


CARELESS = [*PAIR, "train.global_batch_size=12", "train.steps=2"]


@pytest.mark.slow
def test_values_logged_outside_micro_batches_ignore_ranks(shapes: Shapes, tmp_path: Path) -> None:
    """Values of samples come from all ranks. A single number is logged by all of them."""
    words = [*CARELESS, "+task._target_=custom_tasks.Careless", "+task.mistake=none", "eval.every_steps=0"]
    for ranks in (1, 2, 3):
        assert shapes.run(tmp_path / str(ranks), words, [Part(ranks)]) == [0]
    one, two, three = (Run(tmp_path / str(ranks), []) for ranks in (1, 2, 3))
    assert_same_run(one, two)
    assert_same_run(one, three)
    last = one.records()[-1]
    assert last["largest"] == pytest.approx(2 * last["loss"])
    assert last["mean"] == pytest.approx(last["loss"])
    assert last["index"] == pytest.approx(1 / 3)


def step_of(task: Any, model: nn.Module, world: World | None = None) -> TrainStep:
    """Yield rank-invariant steps of three micro-batches of a task, in this process."""
    world = world or World()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizers = Optimizers.of_one(model, optimizer, LearningRateScheduler(optimizer, lambda step: 1.0))
    takes, computes = getattr(task, "take_step", None), getattr(task, "training_step", None)
    made = Task("task (my.Task)", computes, None, takes)
    division = FixedMicroBatches(world, model, made, optimizers, BatchShape.dealt(0, world.size, 4, 3), 0, CPU)
    return TrainStep(Forward(world, CPU, model, made, nullcontext), optimizers, [], fixed=division)


class Tokens:
    """A task that trains a model of tokens."""

    def training_step(self, model: nn.Module, batch: torch.Tensor) -> Any:
        return model((batch.abs() * 100).long()).square().mean((1, 2))


MISTAKES: dict[str, tuple[Any, Callable[[], nn.Module], str]] = {
    **{
        mistake: (custom_tasks.Careless(mistake), custom_tasks.Pair, said)
        for mistake, said in {
            "mean": "step.mean is called while step.batches is iterated",
            "update": "step.update is called while step.batches is iterated",
            "backward": "call step.backward only while step.batches is iterated",
            "leave": "iterate all of it",
        }.items()
    },
    "value": (custom_tasks.Moody(False), custom_tasks.Pair, "gave positive in some micro-batches of a step and not"),
    "leaves": (custom_tasks.Moody(True), custom_tasks.Pair, "iterate all of it"),
    "parameter": (
        custom_tasks.Fine(),
        lambda: custom_tasks.Columns("parameter"),
        "the model's parameter centre changes",
    ),
    "extra state": (custom_tasks.Fine(), lambda: custom_tasks.Columns("extra state"), "extra state of Columns changes"),
    "statistics": (Tokens(), lambda: custom.Normed(500, 3), "layer norm (BatchNorm1d) changes in the forward pass"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_rank_dependent_step_is_refused_on_one_rank(mistake: str) -> None:
    """Refuse it in the first step, in one line, with the remedy."""
    task, model, said = MISTAKES[mistake]
    points = iter(torch.split(custom_tasks.Points().points, 4))
    with pytest.raises(UserError) as error:
        step_of(task, model())(lambda: Drawn(next(points)))
    assert said in str(error.value)
    assert "train.rank_invariant=false" in str(error.value)
    assert "\n" not in str(error.value)


def test_running_statistics_are_refused_before_the_first_step() -> None:
    with pytest.raises(UserError, match=r"layer norm \(BatchNorm1d\) changes in the forward pass"):
        step_of(Tokens(), custom.Normed(500, 3))
    frozen = custom.Normed(500, 3)
    frozen.norm.track_running_stats = False
    step_of(Tokens(), frozen)


def test_more_ranks_than_micro_batches_are_refused() -> None:
    with pytest.raises(UserError, match=r"which needs a micro-batch on each rank, and a step has 3 for 4 ranks"):
        step_of(custom_tasks.Careless("none"), custom_tasks.Pair(), World(0, 4))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["+task._target_=custom_tasks.Careless", "+task.mistake=update"],
            "step.update is called while step.batches is",
        ),
        (["+task._target_=custom_tasks.Careless", "+task.mistake=leave"], "iterate all of it"),
        (["+task._target_=custom_tasks.Careless", "+task.mistake=state"], "its state differs from rank to rank"),
        (
            ["+task._target_=custom_tasks.Moody", "+task.leaves=false"],
            "gave positive in some micro-batches of a step and",
        ),
        (["+task._target_=custom_tasks.Moody", "+task.leaves=true"], "iterate all of it"),
    ],
    ids=["update", "leave", "state", "value", "leaves"],
)
def test_a_step_that_depends_on_the_ranks_is_refused_on_several(
    words: list[str], said: str, shapes: Shapes, tmp_path: Path
) -> None:
    """Include a mistake on one rank while the others wait elsewhere in the step."""
    refused([*CARELESS, "train.batch_size=2", "eval.every_steps=0", *words], said, shapes, tmp_path)


@pytest.mark.slow
def test_weights_must_not_change_in_a_forward_pass_of_any_rank(shapes: Shapes, tmp_path: Path) -> None:
    """A checkpoint holds them, so a run that changes them would continue with other weights."""
    words = [*POINTS, "train.global_batch_size=12", "train.steps=2", "eval.every_steps=0"]
    words += ["+task._target_=custom_tasks.Fine", "+model._target_=custom_tasks.Columns", "+model.keeps=parameter"]
    refused(words, "the model's parameter centre changes in the forward pass", shapes, tmp_path)


def refused(words: list[str], said: str, shapes: Shapes, folder: Path) -> None:
    """Check that a run on two ranks ends in its first step, with one line."""
    with pytest.raises(AssertionError) as raised:
        shapes.run(folder / "run", words, [Part(2)])
    lines = [line for line in str(raised.value).splitlines() if line.startswith("error")]
    assert 1 <= len(lines) <= 2
    assert said in lines[0]
    assert "train.rank_invariant=false" in lines[0]
    assert "Traceback" not in str(raised.value)
    assert not Run(folder / "run", []).lines()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_sum_over_several_passes_does_not_depend_on_ranks(ranks: int, shapes: Shapes, tmp_path: Path) -> None:
    """Use float64, where every order shows; each rank sums the values of one pass."""
    words = [*CARELESS, "train.steps=6", "+task._target_=custom_tasks.Twice", "eval.every_steps=0"]
    runs: list[Run] = []
    for each in (1, ranks):
        assert shapes.run(tmp_path / str(each), words, [Part(each)]) == [0]
        runs.append(Run(tmp_path / str(each), []))
    assert_same_run(*runs)


@pytest.mark.slow
def test_overflow_of_one_optimizer_spares_the_other(shapes: Shapes, tmp_path: Path) -> None:
    """The other's gradients wait with the scale of their backward pass, as without rank-invariant training."""
    words = [*PAIR, "train.global_batch_size=16", "train.steps=4", "eval.every_steps=0", "train.precision=float16"]
    words += ["+task._target_=custom_tasks.Steep", "train.on_nonfinite=skip", "train.clip_norm=null"]
    words += [f"+optimizers.{name}={{_target_: torch.optim.SGD, lr: 0.01}}" for name in ("discriminator", "generator")]
    norms = []
    for wanted in ("true", "false"):
        assert shapes.run(tmp_path / wanted, [*words, f"train.rank_invariant={wanted}"], [Part(1)]) == [0]
        norms.append([each["grad_norm_by_optimizer"]["generator"] for each in Run(tmp_path / wanted, []).records()])
    assert norms[0] == pytest.approx(norms[1], rel=1e-3, nan_ok=True)


@pytest.mark.slow
def test_without_it_the_ranks_decide_the_last_bits(shapes: Shapes, tmp_path: Path) -> None:
    """This shows that the bits compared in the other tests can differ, even if all labels count the same."""
    words = [*GPT, "train.global_batch_size=12", "train.steps=4", "train.rank_invariant=false", "eval.every_steps=0"]
    words += ["model.dropout=0", "task._target_=custom_tasks.Masked"]
    for ranks in (1, 2):
        assert shapes.run(tmp_path / str(ranks), words, [Part(ranks)]) == [0]
    one, two = (Run(tmp_path / str(ranks), []).records() for ranks in (1, 2))
    assert [record["digest"] for record in one] == [record["digest"] for record in two]
    found = [[record[key] for key in ("loss", "grad_norm") for record in records] for records in (one, two)]
    assert found[0] != found[1]
    assert found[0] == pytest.approx(found[1], rel=1e-4)


@pytest.mark.slow
def test_the_end_of_the_data_is_an_error_on_every_rank(shapes: Shapes, tmp_path: Path) -> None:
    """It comes at the same step on any number of ranks: a step is complete or not made."""
    words = [*CARELESS, "train.steps=50", "+task._target_=custom_tasks.Choosy", "sampler.max_epochs={points: 0.3}"]
    for ranks in (1, 3):
        with pytest.raises(AssertionError) as raised:
            shapes.run(tmp_path / str(ranks), words, [Part(ranks)])
        assert "the data ended at step 6, after 72 samples" in str(raised.value)

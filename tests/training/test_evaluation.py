"""An evaluation depends on the weights and the held-out samples, not on the ranks."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from composing import compose
from custom_tasks import Points, PointStream
from hypothesis import given
from hypothesis import strategies as st
from ranks import on_ranks
from torch import nn

from runner.config.schema import Config
from runner.errors import UserError
from runner.system.distributed import World
from runner.training.evaluation.evaluation import Evaluation
from runner.training.evaluation.held_out import HeldOut, RankBatches, StreamSource, evaluation_sets
from runner.training.evaluation.metrics import build_metrics
from runner.training.ranks.parallel import place
from runner.training.step.step import Forward
from runner.training.step.tasks import Task

CPU = torch.device("cpu")
NOISE = 0.0
OWN = ["data=own", "+data.sources.a._target_=custom_tasks.Points"]


@given(samples=st.integers(1, 60), batch_size=st.integers(1, 9), limit=st.integers(1, 9), ranks=st.integers(1, 7))
def test_each_sample_counts_once_and_ranks_take_equal_turns(
    samples: int, batch_size: int, limit: int, ranks: int
) -> None:
    held_out = HeldOut(samples, batch_size, limit)
    worlds = [World(rank, ranks) for rank in range(ranks)]
    counted = sorted(number for world in worlds for number in held_out.turns(world) if number < held_out.batches)
    assert counted == list(range(held_out.batches))
    assert len({len(held_out.turns(world)) for world in worlds}) == 1
    taken = [index for batch in counted for index in held_out.indices(batch)]
    assert taken == list(range(min(samples, batch_size * limit)))
    for world in worlds:
        batches = list(RankBatches(held_out, world))
        assert len(batches) == len(held_out.turns(world))
        assert all(batches)  # a sample that does not count is computed as well, and must not be empty
    # A stream of unknown length is dealt out in the same way.
    numbers = [[number for number, _ in StreamSource(range(samples), limit).turns(world)] for world in worlds]
    assert sorted(number for mine in numbers for number in mine if number is not None) == list(
        range(min(samples, limit))
    )
    assert len({len(mine) for mine in numbers}) == 1


def configured(sizes: dict[str, int], stream: int, *more: str) -> Config:
    """Compose a config with held-out sources of these sizes, and a stream."""
    held_out = [
        f"+data.eval_sources.{name}={{_target_:custom_tasks.Points,size:{n},seed:{n}}}" for name, n in sizes.items()
    ]
    if stream:
        held_out.append(f"+data.eval_sources.stream={{_target_:custom_tasks.PointStream,size:{stream}}}")
    return compose([*OWN, *held_out, "eval.every_steps=1", *more]).config


METRICS = (
    "eval.metrics.mae._target_=torchmetrics.MeanAbsoluteError",  # merges over ranks in its own code, in another order
    "eval.metrics.seen._target_=custom_tasks.NoMerge",
    "eval.metrics.distance._target_=custom_tasks.distance",
)
CASES = [
    ({"a": 10}, 0, ["eval.batch_size=3", "eval.batches=100", *METRICS]),
    ({"a": 10}, 0, ["eval.batch_size=3", "eval.batches=2"]),
    ({"a": 2}, 0, ["eval.batch_size=1"]),  # fewer batches than ranks
    ({"a": 1}, 0, ["eval.batch_size=4"]),  # fewer samples than ranks
    ({"a": 5}, 0, ["+data.eval_sources.noisy._target_=custom_tasks.NoisyStream", "eval.batch_size=2"]),
    ({"a": 5, "b": 11}, 7, ["eval.batch_size=2", "eval.sets.few={sources:[b,stream],batches:1}", *METRICS]),
]


def compute(model: nn.Module, batch: Any) -> Any:
    points = batch["x"] if isinstance(batch, dict) else batch[0] if isinstance(batch, (list, tuple)) else batch
    output = model(points) + NOISE * torch.randn(len(points), 1)
    return {"loss": output.square().mean(1), "preds": output[:, 0], "target": points[:, 0]}


def evaluation(config: Config, world: World, strategy: str = "ddp") -> Evaluation:
    torch.manual_seed(0)
    model = place(nn.Sequential(nn.Linear(2, 32), nn.Dropout(), nn.Linear(32, 1)), strategy, world, CPU)
    forward = Forward(world, CPU, model, Task("task", compute, compute), nullcontext)
    torch.manual_seed(0)  # as a session does
    return Evaluation(forward, evaluation_sets(config, world), build_metrics(config, CPU))


def results(config: Config, world: World | None = None, strategy: str = "ddp") -> dict[str, Any]:
    found = evaluation(config, world or World(), strategy).run(1, lambda: False)
    assert found is not None
    return found


def evaluate(rank: int, ranks: int, strategy: str, directory: str) -> None:
    method = f"file://{directory}/rendezvous-{strategy}-{ranks}"
    torch.distributed.init_process_group("gloo", init_method=method, rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    global NOISE  # noqa: PLW0603 what the task draws does not depend on the ranks either
    NOISE = 0.1
    found = [results(configured(*case[:2], *case[2]), World(rank, ranks), strategy) for case in CASES]
    (Path(directory) / f"{strategy}-{ranks}-{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_every_result_has_the_same_bits_on_any_number_of_ranks(tmp_path: Path) -> None:
    shapes = [("ddp", 1), ("ddp", 2), ("fsdp", 3)]
    for strategy, ranks in shapes:
        on_ranks(evaluate, ranks, ranks, strategy, str(tmp_path))
    found = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert len(found) == sum(ranks for _, ranks in shapes)
    assert all(each == found[0] for each in found)
    assert {"eval_loss", "eval_loss_by_source", "eval_few_mae_by_source", "eval_seen_last"} <= found[0][-1].keys()


@pytest.mark.promise("a metric that no evaluation has is found before training; the check changes nothing")
def test_result_names_are_checked_with_a_batch_per_source() -> None:
    config = configured({"a": 10, "b": 3}, 7, "eval.batch_size=2", *METRICS)
    made = evaluation(config, World())
    before = torch.get_rng_state(), results(config)
    made.check_names({"early_stopping.metric": "eval_mae", "checkpoint.best.metric": None})
    with pytest.raises(
        UserError, match=r"early_stopping\.metric=eval_mea \(did you mean 'eval_mae'\?\) is not a number"
    ):
        made.check_names({"early_stopping.metric": "eval_mea"})
    assert torch.equal(torch.get_rng_state(), before[0])
    assert made.run(1, lambda: False) == before[1]


def test_sources_are_evaluated_together_and_separately() -> None:
    """Compare with an independent computation from the samples."""
    config = configured({"a": 5, "b": 11}, 7, "eval.batch_size=2", "eval.batches=3", *METRICS)
    found = results(config)
    model = evaluation(config, World()).forward.model.eval()
    samples = {"a": Points(5, 5).points[:6], "b": Points(11, 11).points[:6], "stream": PointStream(7).points[:6]}
    with torch.no_grad():
        own = {name: compute(model, points) for name, points in samples.items()}
    losses = {name: one["loss"] for name, one in own.items()}
    errors = {name: (one["preds"] - one["target"]).abs() for name, one in own.items()}
    for key, values in (("eval_loss", losses), ("eval_mae", errors), ("eval_distance", errors)):
        assert found[key] == pytest.approx(torch.cat(list(values.values())).mean().item())
        assert found[f"{key}_by_source"] == pytest.approx({name: one.mean().item() for name, one in values.items()})
    assert found["eval_seen_batches"] == 9
    assert found["eval_seen_batches_by_source"] == {"a": 3, "b": 3, "stream": 3}
    assert "eval_preds" not in found


def weighted(model: nn.Module, batch: torch.Tensor) -> Any:
    return {**compute(model, batch), "weight": batch[:, 0].relu()}


def test_with_weights_a_result_is_the_mean_over_all_of_them() -> None:
    """Functions of a batch are an exception: their values count once each."""
    config = configured({"a": 5, "b": 11}, 0, "eval.batch_size=2", METRICS[2])
    made = evaluation(config, World())
    made.forward.task = Task("task", weighted, weighted)
    found = made.run(1, lambda: False)
    assert found is not None
    points = torch.cat([Points(5, 5).points, Points(11, 11).points])
    with torch.no_grad():
        own = weighted(made.forward.model.eval(), points)
    weight = own["weight"].double()
    assert found["eval_loss"] == pytest.approx(((own["loss"] * weight).sum() / weight.sum()).item())
    first = (own["loss"] * weight)[:5].sum() / weight[:5].sum()
    assert found["eval_loss_by_source"]["a"] == pytest.approx(first.item())
    assert found["eval_distance"] == pytest.approx((own["preds"] - own["target"]).abs().mean().item())


@pytest.mark.parametrize(("left", "refused"), [(1, False), (0, True)])
def test_a_source_without_any_weight_is_left_out_of_the_results(left: int, refused: bool) -> None:
    def some(model: nn.Module, batch: torch.Tensor) -> Any:
        return {**compute(model, batch), "weight": (batch[:, 0] == first) * left}

    first = Points(5, 5).points[0, 0]
    made = evaluation(configured({"a": 5, "b": 11}, 0, "eval.batch_size=2"), World())
    made.forward.task = Task("task", some, some)
    with pytest.raises(UserError, match=r"\(a, b\) sum to 0") if refused else nullcontext():
        found = made.run(1, lambda: False)
        assert found is not None
        assert found["eval_loss_by_source"].keys() == {"a"}


def test_each_set_has_its_own_cadence_sources_and_size() -> None:
    config = configured(
        {"a": 8, "b": 8},
        0,
        "eval.every_steps=4",
        "eval.batch_size=2",
        "eval.sets.b={sources:[b],every_steps:3,batches:1}",
    )
    made = evaluation(config, World())
    due = {step: sorted(made.run(step, lambda: False) or {}) for step in range(1, 13) if made.due(step)}
    every, own = ["eval_loss", "eval_loss_by_source"], ["eval_b_loss"]
    assert due == {3: own, 4: every, 6: own, 8: every, 9: own, 12: [*own, *every]}


def test_evaluation_leaves_generators_and_modes_alone() -> None:
    made = evaluation(configured({"a": 8}, 0, *METRICS), World())
    made.forward.model.train()
    torch.manual_seed(3)
    wanted = torch.rand(3)
    torch.manual_seed(3)
    assert made.run(1, lambda: True) is None
    assert made.run(1, lambda: False)
    assert torch.equal(torch.rand(3), wanted)
    assert made.forward.model.training


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        ("{_target_:custom_tasks.Shapeless}", ["eval.metrics.x", "shape (2, 2)", "a number, a vector"]),
        ("{_target_:custom_tasks.too_short}", ["eval.metrics.x", "()", "one value per sample"]),
        ("{_target_:torchmetrics.MeanMetric}", ["eval.metrics.x", "'value'", "loss, preds, target", "takes.value"]),
        ("{_target_:torchmetrics.MeanMetric,takes:{value:los}}", ["eval.metrics.x", "'los'"]),
        ("{_target_:torchmetrics.MeanMetric,takes:3}", ["eval.metrics.x.takes=3"]),
        ("{_target_:custom_tasks.Pair}", ["eval.metrics.x"]),
        ("{_target_:torchmetrics.classification.MulticlassF1Score,num_classes:3}", ["eval.metrics.x", "preds (4,)"]),
    ],
)
def test_a_metric_that_does_not_fit_is_one_line(metric: str, words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        results(configured({"a": 4}, 0, f"eval.metrics.x={metric}"))
    text = str(error.value)
    assert len(text.splitlines()) == 1
    assert all(word in text for word in words), text


def test_arguments_can_be_renamed() -> None:
    found = results(configured({"a": 4}, 0, "eval.metrics.x={_target_:torchmetrics.MeanMetric,takes:{value:loss}}"))
    assert found["eval_x"] == pytest.approx(found["eval_loss"])


def test_held_out_data_that_cannot_be_evaluated_are_refused() -> None:
    with pytest.raises(UserError, match=r"data.eval_sources \(a\) has 0 samples: .*eval.every_steps=0"):
        evaluation_sets(configured({"a": 0}, 0), World())
    with pytest.raises(UserError, match=r"stream.*gave no samples"):
        results(configured({}, 0, "+data.eval_sources.stream={_target_:custom_tasks.PointStream,size:0}"))
    with pytest.raises(UserError, match=r"OwnIterator.*its own iterator"):
        results(configured({}, 0, "+data.eval_sources.stream._target_=custom_tasks.OwnIterator"))
    with pytest.raises(UserError, match=r"eval.sets.x.sources: no such source 'b'"):
        configured({"a": 4}, 0, "eval.sets.x={sources:[b]}")

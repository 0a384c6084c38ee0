"""The train state: all of it is restored, nothing else is changed, and loading it runs no code."""

from __future__ import annotations

import io
import random
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import Clockwork, manager
from torch import nn

from runner.checkpoint import build_train_state, get_rng_state, restore_train_state, set_rng_state
from runner.checkpoint.files.manifest import TRAIN_STATE
from runner.checkpoint.files.store import step_name
from runner.checkpoint.tensors.staging import snapshot
from runner.checkpoint.tensors.state import TrainState, rng_for_rank
from runner.errors import CheckpointError, UserError
from runner.system.distributed import World


def draw() -> tuple[float, float, list[float]]:
    return random.random(), float(np.random.rand()), torch.randn(3).tolist()


def reloaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_generators_continue_after_a_weights_only_load() -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    np.random.randn()  # fills the cache of a second value
    state = reloaded(get_rng_state())
    first = draw(), np.random.randn()
    set_rng_state(state)
    assert (draw(), np.random.randn()) == first


def test_numpy_state_may_also_be_in_its_own_form() -> None:
    state = {"numpy": np.random.get_state()}
    first = np.random.rand()
    set_rng_state(state)
    assert np.random.rand() == first


@pytest.mark.parametrize("state", [{"pyhton": 1}, {"python": (3, 4, None)}, {"torch_cpu": torch.zeros(3)}])
def test_an_invalid_generator_state_is_one_line(state: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError) as caught:
        set_rng_state(state)
    assert "\n" not in str(caught.value)


def test_new_ranks_get_distinct_reproducible_generators() -> None:
    saved = [get_rng_state()]
    assert rng_for_rank(saved, 0) is saved[0]
    states = [rng_for_rank(saved, rank)["torch_cpu"] for rank in (1, 2, 1)]
    assert torch.equal(states[0], states[2])
    assert not torch.equal(states[0], states[1])
    set_rng_state(reloaded(rng_for_rank(saved, 5)))


def test_everything_is_restored() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    for _ in range(15):
        optimizer.step()
        scheduler.step()
    state = reloaded(build_train_state(15, 99, scheduler, Clockwork(7), {"best": 2.5, "tags": ["a"]}))
    fresh = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1), 10)
    loader = Clockwork()
    assert restore_train_state(state, fresh, loader) == (15, 99, {"best": 2.5, "tags": ["a"]})
    assert loader.position == 7
    assert fresh.state_dict()["_last_lr"] == scheduler.state_dict()["_last_lr"]


def test_parts_that_were_not_passed_are_absent() -> None:
    assert set(build_train_state(0, 0)) == {"step", "tokens_seen", "rng"}


def test_an_extra_entry_with_a_reserved_name_is_refused() -> None:
    with pytest.raises(UserError, match="'rng'"):
        build_train_state(0, 0, extra={"rng": 1})


@pytest.mark.parametrize("missing", ["step", "tokens_seen", "rng", "scheduler", "dataloader"])
def test_missing_entry_is_named_and_an_empty_state_is_fresh(missing: str) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1), 10)
    assert restore_train_state({}, scheduler, Clockwork()) == (0, 0, {})
    state = build_train_state(1, 3, scheduler, Clockwork())
    del state[missing]
    with pytest.raises(CheckpointError, match=f"the train state has no '{missing}', only '"):
        restore_train_state(state, scheduler, Clockwork())


def test_an_incomplete_optimizer_entry_is_named() -> None:
    with pytest.raises(
        CheckpointError, match=r"entry 'optimizer' of a.pt has no 'values', only 'class_name', 'param_g"
    ):
        TrainState.from_dict(
            {**build_train_state(1, 3), "optimizer": {"class_name": "SGD", "param_groups": []}}, "a.pt"
        )


def test_positions_of_other_ranks_are_split_or_refused() -> None:
    state = build_train_state(1, 1, None, Clockwork(1))
    state["dataloader_by_rank"] = [{"position": 1}, {"position": 2}]
    with pytest.raises(CheckpointError, match="resume with 2 ranks"):
        restore_train_state(state, dataloader=Clockwork())

    class Splitting(Clockwork):
        def aggregate_state_dict(self, states: list[dict[str, int]]) -> dict[str, int]:
            return {"sum": sum(state["position"] for state in states)}

        def deaggregate_state_dict(self, aggregated: dict[str, int], rank: int, world: int) -> dict[str, int]:
            return {"position": aggregated["sum"] * 10 + rank + world}

    loader = Splitting()
    restore_train_state(state, dataloader=loader)
    assert loader.position == 31
    restore_train_state(build_train_state(1, 1, None, Clockwork(7)), dataloader=loader)
    assert loader.position == 7, "one rank's is loaded as it was saved"


@pytest.mark.parametrize("ranks", [1, 3])
def test_checkpoint_holds_position_and_generators_of_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """Each rank reads its part of the data. The other ranks are fake: they answer when rank 0 gathers."""

    def gather(world: World, value: Any) -> list[Any]:
        if not isinstance(value, tuple):  # the plan, and what was written
            return [value]
        rng, dataloader = value
        return [(rng, dataloader), *(({**rng, "of_rank": rank}, {"position": 10 * rank}) for rank in range(1, ranks))]

    monkeypatch.setattr(World, "gather_on_main", gather)
    saving = manager(tmp_path)
    assert saving.save(1, nn.Linear(1, 1), None, build_train_state(1, 1, None, Clockwork(5)), wait=True)
    state = torch.load(tmp_path / step_name(1) / TRAIN_STATE, weights_only=True)
    assert [rng.get("of_rank", 0) for rng in state["rng_by_rank"]] == list(range(ranks))
    assert state["dataloader"] == {"position": 5}
    positions = [each["position"] for each in state.get("dataloader_by_rank", [])]
    assert positions == ([5, 10, 20] if ranks > 1 else [])


def test_snapshot_is_independent_and_has_plain_values() -> None:
    tensor = torch.ones(2)
    original = {"a": [tensor, (1, 2.0, None)], "n": np.float64(0.5), "i": np.int64(3)}
    copy = reloaded(snapshot(original))
    tensor.zero_()
    assert copy["a"][0].tolist() == [1, 1]
    assert copy["a"][1] == (1, 2.0, None)
    assert (copy["n"], copy["i"]) == (0.5, 3)
    assert type(copy["n"]) is float


@pytest.mark.parametrize("value", [np.zeros(3), object(), {1, 2}, Clockwork()])
def test_unsafe_train_state_is_refused_at_the_save(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"train state\['loader'\]\[0\]"):
        snapshot({"loader": [value]})


def test_importing_the_package_needs_no_torch() -> None:
    code = (
        "import sys, runner.checkpoint.cadence, runner.checkpoint.files.directory, runner.rundir.lease;"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_manager_import_is_free_of_torch_distributed_checkpoint() -> None:
    code = "import sys, runner.checkpoint.manager; sys.exit('torch.distributed.checkpoint' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_objects_without_a_state_are_named() -> None:
    with pytest.raises(CheckpointError, match="generators is None: pass what get_rng_state"):
        set_rng_state(None)  # type: ignore[arg-type]
    for name in ("scheduler", "dataloader"):
        with pytest.raises(UserError, match=f"the {name} is a object, which has no state_dict"):
            build_train_state(1, 2, **{name: object()})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "steps_on"),
    [
        (torch.optim.AdamW, "cpu"),
        (partial(torch.optim.AdamW, fused=True), "meta"),
        (partial(torch.optim.AdamW, capturable=True), "meta"),
        (torch.optim.Adafactor, "cpu"),
    ],
    ids=["usual", "fused", "capturable", "state of other shapes"],
)
def test_cpu_state_moves_with_the_model_to_another_device(make: Any, steps_on: str, tmp_path: Path) -> None:
    """The step count stays on the CPU where torch requires that; a GPU would misread its memory otherwise."""
    model = nn.Linear(3, 2)
    optimizer = make(model.parameters())
    for group in optimizer.param_groups:  # a capturable step cannot be made on a CPU
        capturable = group.pop("capturable", None)
        group["capturable"] = False
        torch.autograd.backward(model(torch.ones(3)).sum())
        optimizer.step()
        group["capturable"] = capturable
    assert manager(tmp_path).save(1, model, optimizer, build_train_state(1, 0), wait=True)
    elsewhere = nn.Linear(3, 2, device="meta")
    resumed = make(elsewhere.parameters())
    assert manager(tmp_path).load(elsewhere, resumed)
    devices: dict[str, set[str]] = {}
    for state in resumed.state.values():
        for key, value in state.items():
            devices.setdefault(key, set()).add(value.device.type)
    assert devices.pop("step") == {steps_on}
    assert all(found == {"meta"} for found in devices.values())
    assert devices

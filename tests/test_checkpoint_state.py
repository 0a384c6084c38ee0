"""The train state: everything comes back, only what is asked for is touched, nothing needs code to load."""

from __future__ import annotations

import io
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import Clockwork

from runner.checkpoint import build_train_state, get_rng_state, restore_train_state, set_rng_state
from runner.checkpoint.migrations import migrate
from runner.checkpoint.staging import snapshot
from runner.checkpoint.state import rng_for_rank
from runner.errors import CheckpointError, UserError


def draw() -> tuple[float, float, list[float]]:
    return random.random(), float(np.random.rand()), torch.randn(3).tolist()


def reloaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_generators_go_on_exactly_after_a_trip_through_weights_only() -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    np.random.randn()  # leaves a cached gaussian behind
    state = reloaded(get_rng_state())
    first = draw(), np.random.randn()
    set_rng_state(state)
    assert (draw(), np.random.randn()) == first


def test_numpy_state_is_taken_in_its_own_form_too() -> None:
    state = {"numpy": np.random.get_state()}
    first = np.random.rand()
    set_rng_state(state)
    assert np.random.rand() == first


@pytest.mark.parametrize("state", [{"pyhton": 1}, {"python": (3, 4, None)}, {"torch_cpu": torch.zeros(3)}])
def test_a_state_of_no_generator_is_refused_in_one_line(state: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError) as caught:
        set_rng_state(state)
    assert "\n" not in str(caught.value)


def test_new_ranks_derive_generators_that_differ_and_repeat() -> None:
    saved = [get_rng_state()]
    assert rng_for_rank(saved, 0) is saved[0]
    states = [rng_for_rank(saved, rank)["torch_cpu"] for rank in (1, 2, 1)]
    assert torch.equal(states[0], states[2])
    assert not torch.equal(states[0], states[1])
    set_rng_state(reloaded(rng_for_rank(saved, 5)))


def test_round_trip_of_everything() -> None:
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


def test_parts_that_were_not_given_are_not_in_it() -> None:
    assert set(build_train_state(0, 0)) == {"step", "tokens_seen", "rng"}


def test_a_reserved_name_for_an_extra_is_refused() -> None:
    with pytest.raises(UserError, match="'rng'"):
        build_train_state(0, 0, extra={"rng": 1})


def test_what_is_missing_is_named_and_only_an_empty_state_is_a_fresh_start() -> None:
    assert restore_train_state({}) == (0, 0, {})
    with pytest.raises(CheckpointError, match="'step'"):
        restore_train_state({"tokens_seen": 3})
    with pytest.raises(CheckpointError, match="'dataloader'"):
        restore_train_state({"step": 1, "tokens_seen": 3}, dataloader=Clockwork())


def test_a_position_of_other_ranks_is_spread_or_refused() -> None:
    state = {"step": 1, "tokens_seen": 1, "dataloader": {"position": 1}}
    state["dataloader_by_rank"] = [{"position": 1}, {"position": 2}]
    with pytest.raises(CheckpointError, match="resume with 2 ranks"):
        restore_train_state(state, dataloader=Clockwork())

    class Spread(Clockwork):
        def aggregate_state_dict(self, states: list[dict[str, int]]) -> dict[str, int]:
            return {"sum": sum(state["position"] for state in states)}

        def deaggregate_state_dict(self, aggregated: dict[str, int], rank: int, world: int) -> dict[str, int]:
            return {"position": aggregated["sum"] * 10 + rank + world}

    loader = Spread()
    restore_train_state(state, dataloader=loader)
    assert loader.position == 31


def test_a_snapshot_does_not_follow_the_original_and_holds_plain_values() -> None:
    tensor = torch.ones(2)
    original = {"a": [tensor, (1, 2.0, None)], "n": np.float64(0.5), "i": np.int64(3)}
    copy = reloaded(snapshot(original))
    tensor.zero_()
    assert copy["a"][0].tolist() == [1, 1]
    assert copy["a"][1] == (1, 2.0, None)
    assert (copy["n"], copy["i"]) == (0.5, 3)
    assert type(copy["n"]) is float


@pytest.mark.parametrize("value", [np.zeros(3), object(), {1, 2}, Clockwork()])
def test_what_could_not_be_loaded_safely_is_refused_at_the_save(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"train state\['loader'\]\[0\]"):
        snapshot({"loader": [value]})


def test_a_state_of_version_1_is_migrated_and_an_unknown_one_refused() -> None:
    rng = get_rng_state()
    state = migrate({"step": 4, "tokens_seen": 5, "rng": rng})
    assert state["version"] == 2
    assert state["rng_by_rank"][0] is rng
    with pytest.raises(CheckpointError, match="version 9 is unknown"):
        migrate({"version": 9})


def test_importing_the_package_needs_no_torch() -> None:
    code = (
        "import sys, runner.checkpoint, runner.checkpoint.cadence, runner.checkpoint.store, runner.lease;"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_importing_the_manager_does_not_import_torch_distributed_checkpoint() -> None:
    code = "import sys, runner.checkpoint.manager; sys.exit('torch.distributed.checkpoint' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_has_no_state_is_named() -> None:
    with pytest.raises(CheckpointError, match="state is None: give what get_rng_state"):
        set_rng_state(None)  # type: ignore[arg-type]
    for name in ("scheduler", "dataloader"):
        with pytest.raises(UserError, match=f"the {name} is a object, which has no state_dict"):
            build_train_state(1, 2, **{name: object()})  # type: ignore[arg-type]

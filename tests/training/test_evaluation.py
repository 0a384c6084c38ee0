"""An evaluation depends on the weights and the held-out samples, not on the ranks."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import on_ranks
from torch import nn

from runner.errors import UserError
from runner.system.distributed import World
from runner.training import build
from runner.training.evaluation import Evaluation, HeldOut, RankBatches
from runner.training.parallel import wrap
from runner.training.step import Forward

CASES = [HeldOut(10, 3, 100), HeldOut(10, 3, 2), HeldOut(2, 1, 8), HeldOut(1, 4, 8)]
"""Also held-out sets with fewer batches, and fewer samples, than ranks."""


@given(samples=st.integers(1, 60), batch_size=st.integers(1, 9), limit=st.integers(1, 9), ranks=st.integers(1, 7))
def test_each_sample_counts_once_and_ranks_take_equally_many_turns(
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
        assert all(batches)  # one that does not count is computed as well, and must not be empty


def evaluate(rank: int, ranks: int, strategy: str, directory: str) -> None:
    method = f"file://{directory}/rendezvous-{strategy}-{ranks}"
    torch.distributed.init_process_group("gloo", init_method=method, rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    world, device = World(rank, ranks), torch.device("cpu")
    torch.manual_seed(0)
    data = torch.randn(10, 16)
    model = wrap(nn.Sequential(nn.Linear(16, 32), nn.Dropout(), nn.Linear(32, 1)), strategy, world, device)
    forward = Forward(world, device, model, lambda model, batch: model(batch).square().mean(1), nullcontext)
    values = []
    for held_out in CASES:
        loader: Any = torch.utils.data.DataLoader(data, batch_sampler=RankBatches(held_out, world))  # type: ignore[arg-type]
        value = Evaluation(forward, loader, held_out, 1).run(lambda: bool(world.sum(torch.zeros(1))))
        assert value is not None
        values.append(value.hex())
    (Path(directory) / f"{strategy}-{ranks}-{rank}.json").write_text(json.dumps(values))
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_the_value_has_the_same_bits_on_any_number_of_ranks(tmp_path: Path) -> None:
    shapes = [("ddp", 1), ("ddp", 2), ("ddp", 3), ("fsdp", 3)]
    for strategy, ranks in shapes:
        on_ranks(evaluate, ranks, ranks, strategy, str(tmp_path))
    values = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert len(values) == sum(ranks for _, ranks in shapes)
    assert all(value == values[0] for value in values)
    assert len(set(values[0])) == len(CASES)


def test_held_out_data_without_samples_are_refused() -> None:
    assert build.held_out_samples({"a": [], "b": [1, 2]}) == 2
    with pytest.raises(UserError, match=r"data.eval_sources \(a\) has 0 samples: .*eval.every_steps=0"):
        build.held_out_samples({"a": []})

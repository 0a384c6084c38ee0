"""The seeded samplers' epochs are looked up without torch: exactly those that torch draws for the training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import given_in_tiers

from runner.data.order.batch_shape import BatchShape
from runner.data.order.segments import Segment
from runner.data.order.torch_shuffle import BELOW, TorchGenerator
from runner.data.queries.order_record import OrderRecord
from runner.data.queries.seeded_epochs import seeded_position_at
from runner.data.queries.seeded_orders import can_be_looked_up, seeded_order
from runner.data.sampler import DistributedSampler, MixtureSampler, permutation

SIZES = [*range(8), 100, 623, 624, 625, 1247, 1248, 4096]
LARGE = [65535, 65536, 65537, 65538, 131073, 300_001]
SEEDS = [0, 1, 42, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40 + 3, -1, -(2**31)]


@pytest.mark.parametrize(("seed", "sizes"), [*((seed, SIZES) for seed in SEEDS), (2**63 - 1, [*SIZES, *LARGE])])
def test_every_place_holds_the_item_that_torch_has_there(seed: int, sizes: list[int]) -> None:
    """One generator draws permutations of all sizes one after another, as the mixture sampler's does."""
    theirs, ours = torch.Generator().manual_seed(seed), TorchGenerator(seed)
    for n in sizes:
        expected = torch.randperm(n, generator=theirs).numpy()
        mine = ours.randperm(n)
        assert np.array_equal(mine.at(np.arange(n)), expected), n
        for item in {*range(min(n, 5)), *range(max(0, n - 5), n)}:
            assert expected[mine.place_of(item)] == item, n


@settings(max_examples=60)
@given(st.integers(0, 2**64 - 1), st.integers(1, 200_000), st.lists(st.integers(0, 2**32), max_size=20))
def test_any_places_of_any_permutation(seed: int, n: int, drawn: list[int]) -> None:
    expected = permutation(n, torch.Generator().manual_seed(seed))
    mine = TorchGenerator(seed).randperm(n)
    places = np.array([one % n for one in drawn], np.int64)
    assert mine.at(places).tolist() == expected[places].tolist()
    assert [mine.place_of(int(item)) for item in expected[places]] == places.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("n", [10**7, BELOW - 1])
def test_a_permutation_of_the_largest_size(n: int) -> None:
    """From the next size on torch draws in another way, and the samplers themselves are asked."""
    expected = permutation(n, torch.Generator().manual_seed(5))
    places = np.concatenate([np.arange(500), np.arange(n // 2, n // 2 + 500), np.arange(n - 500, n)])
    mine = TorchGenerator(5).randperm(n)
    assert np.array_equal(mine.at(places), expected[places])
    assert [mine.place_of(int(item)) for item in expected[places[::100]]] == places[::100].tolist()


def test_larger_permutations_are_left_to_torch() -> None:
    def record(size: int) -> OrderRecord:
        return OrderRecord("distributed", 0, {"a": size}, 1, (BatchShape(0, 1, 1),), (Segment(0, {"a": 1.0}),))

    assert can_be_looked_up(record(BELOW - 1))
    assert not can_be_looked_up(record(BELOW))


@given_in_tiers(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    ranks=st.integers(1, 6),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    seed=st.integers(0, 5),
    weights=st.lists(st.sampled_from([0.0, 0.2, 1.0, 3.0]), min_size=4, max_size=4),
    mixed=st.booleans(),
    few=40,
    many=500,
)
def test_an_epoch_is_that_of_the_samplers(
    sizes: list[int], ranks: int, shuffle: bool, drop_last: bool, seed: int, weights: list[float], mixed: bool
) -> None:
    common: dict[str, Any] = {"shuffle": shuffle, "seed": seed, "drop_last": drop_last, "num_replicas": ranks}
    named = {f"source{i}": size for i, size in enumerate(sizes)}
    shares = {
        name: weight if drop_last and named[name] >= ranks else 1.0
        for name, weight in zip(named, weights, strict=False)
    }
    if drop_last and mixed:
        shares |= {name: 0.0 for name, size in named.items() if size < ranks}
    if not any(shares.values()):
        return
    samplers: list[Any] = [
        MixtureSampler(np.cumsum([0, *sizes]).tolist(), list(shares.values()), rank=rank, temperature=0.7, **common)
        if mixed
        else DistributedSampler(range(sum(sizes)), rank=rank, **common)
        for rank in range(ranks)
    ]
    record = OrderRecord(
        "mixture" if mixed else "distributed",
        seed,
        named,
        1,
        (BatchShape(0, ranks, 1),),
        (Segment(0, shares, 0.7),),
        shuffle=shuffle,
        drop_last=drop_last,
    )
    order = seeded_order(record, seeded_position_at(record, 0))
    drawn = [list(sampler) for sampler in samplers]
    for rank, expected in enumerate(drawn):
        assert order.indices([rank], 0, len(expected))[0].tolist() == expected
        assert order.indices([rank], 3, 5)[0].tolist() == expected[3:8]
    for index in range(sum(sizes)):
        expected_times = [(rank, i) for rank, one in enumerate(drawn) for i, found in enumerate(one) if found == index]
        assert sorted(order.times(index)) == expected_times

"""Looking ahead changes nothing: samples, keys and states are those of one lookup at a time."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from hypothesis import strategies as st
from properties import given_in_tiers

from exactdata import ElasticSampler, StatefulDataLoader
from exactdata.elastic import MOST
from exactdata.micro_batches import MicroBatchSampler
from exactdata.order.batch_shape import BatchShape

SIZES = {"a": 900, "b": 2500, "c": 40}


def elastic(world: int = 1, rank: int = 0, batch: int = 4, **more: Any) -> ElasticSampler:
    return ElasticSampler(SIZES, [1, 2, 0.5], global_batch_size=batch * world, num_replicas=world, rank=rank, **more)


def boundaries() -> dict[str, Any]:
    """Yield segments and exclusions that begin within blocks, and two at the same place."""
    return {
        "segments": [(101, {"a": 3}), (102, {"a": 0}), (2 * MOST + 1, {"c": 0}), (7000, {"a": 1, "b": 1, "c": 1})],
        "exclude": ["b:3-40", "a:7", "positions:300-333"],
    }


changes = st.dictionaries(st.integers(0, 55), st.sampled_from(["weights", "exclude", "ahead"]), max_size=4)


@given_in_tiers(world=st.integers(1, 3), batch=st.sampled_from([1, 16, 97, 300]), changes=changes, few=5, many=60)
def test_batches_keys_and_states_are_those_of_single_lookups(world: int, batch: int, changes: dict[int, str]) -> None:
    """Change weights, exclude samples or plan a later change after any batch."""
    mine = elastic(world, world - 1, batch, **boundaries())
    for number, found in enumerate(itertools.islice(mine.iter_batches(batch, drop_last=True), 60)):
        positions = mine.positions(number * batch, batch)
        assert (
            positions.tolist() == list(range(number * batch * world, (number + 1) * batch * world))[world - 1 :: world]
        )
        assert found.tolist() == mine.order.indices_at(positions).tolist()
        assert mine.sample_keys(number * batch, batch).tolist() == mine.order.sample_keys(positions).tolist()
        assert mine.state_dict() == mine.state_dict_at((number + 1) * batch)
        assert mine.state_dict()["position"] == (number + 1) * batch * world
        change = changes.get(number)
        if change == "weights":
            mine.update_weights([1 + number, 1, 1])
        elif change == "exclude":
            mine.exclude([f"b:{number}-{number + 9}"])
        elif change == "ahead":
            mine.update_weights([1, 0, 0], position=(number + 2) * batch * world)


@given_in_tiers(cut=st.integers(0, 40), batch=st.sampled_from([16, 33]), ahead=st.integers(1, 9), few=10, many=100)
def test_a_state_counts_yielded_samples_and_resumes_there(cut: int, batch: int, ahead: int) -> None:
    """Also use a loader that has prefetched, and another number of ranks."""
    data: Any = range(sum(SIZES.values()))
    whole = elastic(**boundaries()).indices_at(np.arange(60 * batch)).tolist()
    sampler = elastic(batch=batch, **boundaries())
    loader: Any = StatefulDataLoader(data, batch, sampler=sampler)
    stream = iter(loader)
    taken = [int(index) for _ in range(cut) for index in next(stream)]
    state = loader.state_dict()
    for _ in range(ahead):
        next(stream)
    again: Any = StatefulDataLoader(data, batch, sampler=elastic(batch=batch, **boundaries()))
    again.load_state_dict(state)
    rest = [int(index) for one in itertools.islice(again, 60 - cut) for index in one]
    assert taken + rest == whole
    pair = [elastic(2, rank, batch, **boundaries()) for rank in (0, 1)]
    for one in pair:
        one.load_state_dict(state["sampler"])
    both = [next(one.iter_batches(batch, drop_last=True)).tolist() for one in pair]
    assert [index for two in zip(*both, strict=True) for index in two] == whole[cut * batch : (cut + 2) * batch]


@given_in_tiers(ranks=st.integers(1, 3), change=st.integers(0, 30), few=6, many=60)
def test_micro_batches_are_those_of_single_lookups(ranks: int, change: int) -> None:
    for rank in range(ranks):
        mine = MicroBatchSampler(elastic(batch=20, **boundaries()), BatchShape.dealt(0, ranks, 5, 4), rank)
        for number, found in enumerate(itertools.islice(mine.iter_batches(5, drop_last=True), 60)):
            positions = mine.positions(5 * number, 5)
            assert found.tolist() == mine.sampler.order.indices_at(positions).tolist()
            assert mine.sample_keys(5 * number, 5).tolist() == mine.sampler.order.sample_keys(positions).tolist()
            if number == change:
                mine.sampler.update_weights([0, 1, 0], position=20 * (number + 3))


def test_state_is_small_and_independent_of_the_next() -> None:
    mine = elastic(**boundaries())
    expected = mine.state_dict()
    changed = mine.state_dict()
    assert all(isinstance(value, (int, str)) for value in changed.values())
    changed.clear()
    assert mine.state_dict() == expected
    elastic(**boundaries()).load_state_dict(expected)

"""The elastic order in micro-batches: each is a fixed range of positions, whichever rank takes it."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import given_in_tiers

from exactdata import ElasticSampler
from exactdata.micro_batches import MicroBatchSampler
from exactdata.order.batch_shape import BatchShape, share_of

SIZES = {"one": 50, "two": 30}


def elastic(**options: object) -> ElasticSampler:
    return ElasticSampler(SIZES, {"one": 1, "two": 2}, global_batch_size=12, num_replicas=1, rank=0, **options)  # type: ignore[arg-type]


def of_rank(rank: int, ranks: int, micro_batches: int = 4, size: int = 3, **options: object) -> MicroBatchSampler:
    return MicroBatchSampler(elastic(**options), BatchShape.dealt(0, ranks, size, micro_batches), rank)


@given(micro_batches=st.integers(1, 40), ranks=st.integers(1, 50))
def test_micro_batches_are_spread_evenly_over_ranks(micro_batches: int, ranks: int) -> None:
    shares = [share_of(micro_batches, ranks, rank) for rank in range(ranks)]
    assert [number for share in shares for number in share] == list(range(micro_batches))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    shape = BatchShape.dealt(0, ranks, 3, micro_batches)
    owners, numbers = shape.ranks_of(np.arange(3 * micro_batches))
    assert numbers.tolist() == [offset // 3 for offset in range(3 * micro_batches)]
    assert all(number in shares[rank] for rank, number in zip(owners.tolist(), numbers.tolist(), strict=True))


@given_in_tiers(
    micro_batches=st.integers(1, 9),
    ranks=st.integers(1, 6),
    steps=st.integers(1, 5),
    before=st.integers(0, 3),
    few=15,
    many=200,
)
def test_the_ranks_together_consume_each_position_once(micro_batches: int, ranks: int, steps: int, before: int) -> None:
    """Join the ranks' batches in micro-batch order, also after a resume: they are the sequence."""
    size = 3
    whole = elastic().order.indices_at(np.arange((before + steps) * size * micro_batches)).tolist()
    state = of_rank(0, 2, micro_batches, size)
    iter(state.sampler)
    saved = state.state_dict_at(before * len(share_of(micro_batches, 2, 0)) * size)
    found: dict[int, list[int]] = {}
    for rank in range(ranks):
        sampler = of_rank(rank, ranks, micro_batches, size)
        sampler.load_state_dict(saved)
        share = share_of(micro_batches, ranks, rank)
        batches = list(islice(sampler.iter_batches(size, drop_last=True), steps * len(share)))
        taken = sampler.positions(0, steps * len(share) * size)
        assert elastic().order.indices_at(taken).tolist() == [index for batch in batches for index in batch.tolist()]
        found |= dict(zip(taken.tolist(), [index for batch in batches for index in batch.tolist()], strict=True))
    first = before * micro_batches * size
    assert [found[position] for position in sorted(found)] == whole[first:]
    assert sorted(found) == list(range(first, len(whole)))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_an_incomplete_step_is_left_out_on_every_rank(ranks: int) -> None:
    """Split 100 samples into 8 steps of 12."""
    for rank in range(ranks):
        sampler = of_rank(rank, ranks, samples=100)
        share = len(share_of(4, ranks, rank))
        assert len(sampler) == 8 * 3 * share
        assert len(list(sampler)) == 8 * 3 * share
        assert sampler.samples_left_after(3 * 3 * share) == 5 * 3 * share

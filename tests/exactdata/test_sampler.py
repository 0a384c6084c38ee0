"""The two seeded samplers: the reference semantics index for index, resumable anywhere, clear errors."""

from __future__ import annotations

import contextlib
import json
import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from resume import assert_resumes_exactly

from exactdata.elastic import ElasticSampler
from exactdata.order.weights import SamplerError, SamplerStateError
from exactdata.sampler import DistributedSampler, MixtureSampler

ranks = st.integers(1, 9).flatmap(lambda world: st.tuples(st.just(world), st.integers(0, world - 1)))


def plain_permutation(n: int, generator: torch.Generator | None) -> list[int]:
    return list(range(n)) if generator is None else torch.randperm(n, generator=generator).tolist()


def plain_part(order: list[int], world: int, rank: int, drop_last: bool) -> list[int]:
    """Return the stride of the rank, straight from the definition."""
    if drop_last:
        return order[: len(order) // world * world][rank::world]
    total = math.ceil(len(order) / world) * world
    return [order[i % len(order)] for i in range(rank, total, world)] if order else []


def plain_mixture(sizes: list[int], counts: list[int], options: dict[str, Any], epoch: int) -> list[int]:
    generator = torch.Generator().manual_seed(options["seed"] + epoch) if options["shuffle"] else None
    drawn: list[int] = []
    for i, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        if count:
            order = plain_permutation(size, generator)
            part = plain_part(order, options["num_replicas"], options["rank"], options["drop_last"])
            drawn += [sum(sizes[:i]) + part[k % len(part)] for k in range(count)]
    return [drawn[k] for k in plain_permutation(len(drawn), generator)]


@given(st.integers(0, 60), ranks, st.booleans(), st.booleans(), st.integers(0, 3), st.integers(0, 5))
def test_distributed_sampler_follows_the_reference(
    n: int, place: tuple[int, int], shuffle: bool, drop_last: bool, epoch: int, skip: int
) -> None:
    world, rank = place
    mine = DistributedSampler(range(n), world, rank, shuffle, 7, drop_last)
    mine.set_epoch(epoch)
    order = plain_permutation(n, torch.Generator().manual_seed(7 + epoch) if shuffle else None)
    expected = plain_part(order, world, rank, drop_last)
    assert list(mine) == expected
    assert len(mine) == len(expected)
    assert mine.indices_at(mine.positions(0, len(expected))).tolist() == expected
    mine.set_skip(skip)
    assert [i for batch in mine.iter_batches(4, drop_last=False) for i in batch.tolist()] == expected[skip:]
    assert list(mine) == expected  # the skip acts once


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("size", [1, 7, 4096, 5000, 20_000])
def test_batches_of_any_size_are_the_sequence_in_parts(size: int, drop_last: bool) -> None:
    """Include batches longer than the chunks in which the sampler converts indices."""
    sampler = DistributedSampler(range(10_001), 1, 0)
    order = list(sampler)
    stop = len(order) // size * size if drop_last else len(order)
    batches = list(sampler.iter_batches(size, drop_last))
    assert [batch.tolist() for batch in batches] == [order[at : at + size] for at in range(0, stop, size)]
    assert {batch.dtype for batch in batches} <= {np.dtype(np.int64)}


@st.composite
def mixture_arguments(draw: Any) -> tuple[list[int], list[float], dict[str, Any]]:
    world, rank = draw(ranks)
    sizes = draw(st.lists(st.integers(0, 50), min_size=1, max_size=5))
    weights = [draw(st.sampled_from([0.0, 0.1, 0.7, 1.0, 3.0])) for _ in sizes]
    options = {
        "num_replicas": world,
        "rank": rank,
        "shuffle": draw(st.booleans()),
        "seed": draw(st.integers(0, 3)),
        "drop_last": draw(st.booleans()),
        "temperature": draw(st.sampled_from([1.0, 0.5, 5.0])),
    }
    return sizes, weights, options


@given(mixture_arguments(), st.integers(0, 2))
def test_mixture_sampler_follows_the_reference(
    arguments: tuple[list[int], list[float], dict[str, Any]], epoch: int
) -> None:
    sizes, weights, options = arguments
    assume(any(weights))
    cumulative = np.cumsum([0, *sizes]).tolist()
    available = [plain_part(list(range(n)), options["num_replicas"], 0, options["drop_last"]) for n in sizes]
    heated = [w ** (1 / options["temperature"]) for w in weights]
    if any(w and not part for w, part in zip(weights, available, strict=True)):
        with contextlib.suppress(SamplerError):  # correct, unless no sample of that source is needed
            assert all(
                part or not n
                for part, n in zip(available, MixtureSampler(cumulative, weights, **options).counts, strict=True)
            )
        return
    mine = MixtureSampler(cumulative, weights, **options)
    budget = sum(map(len, available))
    assert sum(mine.counts) == budget == len(mine)
    for weight, count, w in zip(weights, mine.counts, heated, strict=True):
        assert count == 0 or weight > 0
        assert abs(count - w / sum(heated) * budget) <= 1.5 + 1e-9
    mine.set_epoch(epoch)
    expected = plain_mixture(sizes, mine.counts, options, epoch)
    assert list(mine) == expected
    assert mine.indices_at(mine.positions(0, len(expected))).tolist() == expected


def test_mixture_golden() -> None:
    """Compare with recorded numbers, so that no change of torch or of this code goes unnoticed."""
    mine = MixtureSampler([0, 10, 16], [0.7, 0.3], 2, 1, seed=3, temperature=2.0)
    assert list(mine) == [5, 9, 15, 14, 4, 7, 12, 0]
    assert list(DistributedSampler(range(12), 2, 0, seed=5)) == [11, 9, 10, 4, 8, 1]


def test_rounding_is_corrected_in_descending_order_of_share() -> None:
    assert MixtureSampler([0, 2, 4, 7], [1, 1, 1], 1, 0).counts == [3, 2, 2]  # 2.33 each: one more
    assert MixtureSampler([0, 2, 4, 6], [3, 3, 2], 1, 0).counts == [2, 2, 2]  # 2.25, 2.25, 1.5
    assert MixtureSampler([0, 5, 10], [3, 1], 1, 0).counts == [8, 2]  # 7.5 and 2.5, halves to even


@pytest.mark.parametrize("temperature", [5e-324, 1e-310])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_a_temperature_near_zero_leaves_the_largest_weights(temperature: float, scale: float) -> None:
    mine = MixtureSampler([0, 10, 20, 30], [2 * scale, scale, 2 * scale], 1, 0, temperature=temperature)
    assert mine.counts == [15, 0, 15]
    sizes = {"a": 10, "b": 10, "c": 10}
    elastic = ElasticSampler(
        sizes, [2 * scale, scale, 2 * scale], temperature=temperature, global_batch_size=1, num_replicas=1
    )
    assert elastic.order.shares_at(0) == pytest.approx({"a": 0.5, "b": 0, "c": 0.5})


def test_weight_of_zero_draws_nothing_at_any_temperature() -> None:
    for temperature in (0.1, 1.0, 10.0):
        mine = MixtureSampler([0, 10, 20, 30], [1, 0, 1], 1, 0, temperature=temperature)
        assert not [index for index in mine if 10 <= index < 20]
    without = MixtureSampler([0, 0, 10], [0, 1], 1, 0, seed=4)  # an empty source is allowed
    alone = MixtureSampler([0, 10], [1], 1, 0, seed=4)
    assert list(without) == list(alone)


def test_small_sources_are_repeated_evenly() -> None:
    mine = MixtureSampler([0, 3, 103], [1, 1], 1, 0)
    counts = np.bincount([index for index in mine if index < 3])
    assert counts.sum() == mine.counts[0]
    assert counts.max() - counts.min() <= 1


@given(ranks, st.lists(st.integers(0, 30), min_size=1, max_size=4), st.booleans())
def test_resumes_exactly_at_any_cut_within_and_across_epochs(
    place: tuple[int, int], cuts: list[int], mixture: bool
) -> None:
    """Resume like a loader: the state has the epoch, and the loader skips the batches already yielded."""

    class Epochs:
        def __init__(self) -> None:
            if mixture:
                self.sampler: Any = MixtureSampler([0, 30, 95], [1, 2], *place, seed=2)
            else:
                self.sampler = DistributedSampler(range(95), *place, seed=2)
            self.yielded = 0
            self.stream = self.endless()

        def endless(self) -> Any:
            while True:
                for index in self.sampler:
                    self.yielded += 1
                    yield index
                self.sampler.set_epoch(self.sampler.epoch + 1)
                self.yielded = 0

        def __iter__(self) -> Any:
            return self.stream

        def state_dict(self) -> dict[str, Any]:
            return {"yielded": self.yielded, "sampler": self.sampler.state_dict()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.sampler.load_state_dict(state["sampler"])
            self.yielded = state["yielded"]
            self.sampler.set_skip(self.yielded)

    assert_resumes_exactly(Epochs, cuts, total=100)


def test_new_weights_apply_to_the_next_iteration() -> None:
    mine = MixtureSampler([0, 500, 1000], [1, 1], 1, 0)
    running = iter(mine)
    first = [next(running) for _ in range(10)]
    length = len(mine)
    mine.update_weights([9, 1], temperature=2.0)
    assert len(mine) == length
    assert mine.counts == [750, 250]
    mine.update_weights([1, 1])
    assert [*first, *running] == list(mine)


def test_an_iteration_keeps_the_epoch_of_its_start() -> None:
    mine = DistributedSampler(range(50), 1, 0)
    expected = list(mine)
    running = iter(mine)
    mine.set_epoch(1)
    assert list(running) == expected
    assert list(mine) != expected


def test_an_epoch_needs_no_more_memory_than_its_permutation() -> None:
    """Allow 9 bytes per sample at the peak, for a single rank and for one of eight."""
    n = 1_000_000
    for world in (1, 8):
        for mine in (
            DistributedSampler(range(n), world, 0),
            MixtureSampler([0, n // 2, n], [1, 2], world, 0),
        ):
            tracemalloc.start()
            iter(mine)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak <= 9 * n + 2**20


@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_tiny_datasets(n: int) -> None:
    for rank in range(4):
        assert list(DistributedSampler(range(n), 4, rank)) == []
        padded = list(DistributedSampler(range(n), 4, rank, shuffle=False, drop_last=False))
        assert padded == ([rank % n] if n else [])


@pytest.mark.parametrize(
    ("weights", "options", "message"),
    [
        ([1], {}, "Expected 2 weights"),
        ([0, 0], {}, "all 2 sources are 0"),
        ([1, float("nan")], {}, "weight nan of source 1"),
        ([1, -0.5], {}, "weight -0.5 of source 1"),
        ([float("inf"), 1], {}, "weight inf of source 0"),
        ([1, 1], {"temperature": 0}, "temperature 0"),
        ([1, 1], {"temperature": float("nan")}, "temperature nan"),
        ([1, 1], {"num_replicas": 4, "rank": 4}, "rank 4: it must be between 0 and 3"),
        ([1, 1], {"num_replicas": 0}, "num_replicas 0"),
        ([1, 1], {"num_replicas": 8}, "source 0 has 5 samples for 8 replicas"),
    ],
)
def test_invalid_arguments_are_reported(weights: list[float], options: dict[str, Any], message: str) -> None:
    with pytest.raises(SamplerError, match=message):
        MixtureSampler([0, 5, 100], weights, **options)


def test_weights_may_be_numpy_numbers() -> None:
    plain = list(MixtureSampler([0, 5, 100], [1, 3], temperature=2))
    for kind in (np.int64, np.float32, np.float64):
        weights: Any = np.array([1, 3], kind)
        temperature: Any = kind(2)
        assert list(MixtureSampler([0, 5, 100], weights, temperature=temperature)) == plain


def test_invalid_bounds_and_skips_are_reported() -> None:
    with pytest.raises(SamplerError, match="cumulative_sizes"):
        MixtureSampler([0, 5, 3], [1, 1])
    with pytest.raises(SamplerError, match="skip -1"):
        DistributedSampler(range(3)).set_skip(-1)
    with pytest.raises(SamplerError, match="batch_size 0"):
        DistributedSampler(range(3)).iter_batches(0, True)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"seed": 9}, "has seed 9, this sampler has seed 1"),
        ({"num_replicas": 4}, r"has num_replicas 4, this sampler has num_replicas 2.*ElasticSampler resumes"),
        ({"size": 99}, "has size 99, this sampler has size 50"),
        ({"epoch": None}, "epoch None"),
        ({"epoch": -1}, "epoch -1"),
    ],
)
def test_states_that_do_not_fit_are_refused_with_both_values(other: dict[str, Any], message: str) -> None:
    mine = DistributedSampler(range(50), 2, 0, seed=1)
    with pytest.raises(SamplerStateError, match=message):
        mine.load_state_dict({**mine.state_dict(), **other})


def test_foreign_state_without_a_size_is_accepted() -> None:
    mine = DistributedSampler(range(50), 2, 1, seed=1)
    mine.load_state_dict({"epoch": 3, "seed": 1, "num_replicas": 2, "rank": 0})
    assert (mine.epoch, mine.rank) == (3, 1)
    mixture = MixtureSampler([0, 5, 9], [1, 1], 1, 0)
    with pytest.raises(SamplerStateError, match=r"sizes \[5, 4\].*sizes \[5, 5\]"):
        MixtureSampler([0, 5, 10], [1, 1], 1, 0).load_state_dict(mixture.state_dict())


def test_integers_of_numpy_are_accepted_and_floats_are_not() -> None:
    def make(number: Any) -> MixtureSampler:
        bounds = [number(bound) for bound in (0, 10, 40)]
        mine = MixtureSampler(bounds, [1, 2], num_replicas=number(3), rank=number(1), seed=number(3))
        mine.set_epoch(number(3))
        mine.set_skip(number(2))
        return mine

    assert json.dumps(make(np.int64).state_dict()) == json.dumps(make(int).state_dict())
    assert list(make(np.int64)) == list(make(int))
    plain: Any = make(int)
    no_seed: Any = 1.5
    calls = (
        lambda: DistributedSampler(range(4), seed=no_seed),
        lambda: plain.set_epoch(1.0),
        lambda: plain.set_skip(2.5),
    )
    for call in calls:
        with pytest.raises(SamplerError, match="it must be an integer"):
            call()


def test_weights_may_be_a_tensor_or_an_array() -> None:
    expected = list(MixtureSampler([0, 10, 40], [1.0, 2.0]))
    weights: Any
    for weights in (torch.tensor([1.0, 2.0]), np.array([1.0, 2.0]), (torch.tensor(1.0), np.float32(2))):
        assert list(MixtureSampler([0, 10, 40], weights)) == expected


@pytest.mark.parametrize("name", ["shuffle", "drop_last"])
def test_a_state_with_another_shuffle_or_drop_last_is_refused(name: str) -> None:
    state = DistributedSampler(range(10), **{name: False}).state_dict()
    with pytest.raises(SamplerStateError, match=f"has {name} False, this sampler has {name} True"):
        DistributedSampler(range(10)).load_state_dict(state)
    DistributedSampler(range(10)).load_state_dict({key: value for key, value in state.items() if key != name})


def test_other_weights_are_refused_within_an_epoch() -> None:
    """An epoch belongs to the weights with which it began, whatever was set since."""

    def make(*weights: float) -> MixtureSampler:
        return MixtureSampler([0, 20, 40], weights, num_replicas=1)

    mine = make(1, 1)
    whole = list(mine)
    mine.update_weights([3, 1])
    state = mine.state_dict()
    other, same = make(3, 1), make(1, 1)
    for one in (other, same):
        one.load_state_dict(state)
        assert one.state_dict() == state
        one.set_skip(5)
    assert list(same) == whole[5:]
    with pytest.raises(SamplerStateError, match=r"drawn with counts \[20, 20\].*weights give counts \[30, 10\]"):
        iter(other)
    other.load_state_dict(state)
    assert list(other) == list(make(3, 1))
    # Weights that are set after loading are meant for the next iteration.
    other.load_state_dict(state)
    other.update_weights([3, 1])
    other.set_skip(5)
    assert list(other) == list(make(3, 1))[5:]
    four = {name: state[name] for name in ("epoch", "seed", "num_replicas", "rank")}
    other.load_state_dict(four)
    other.set_skip(5)
    assert list(other) == list(make(3, 1))[5:]


@pytest.mark.parametrize("state", [None, [], 3])
def test_anything_but_a_state_is_refused(state: Any) -> None:
    with pytest.raises(SamplerStateError, match="pass what state_dict"):
        DistributedSampler(range(4)).load_state_dict(state)

"""The elastic order: one global sequence under any ranks, interruptions and changes; its inverse; its shares."""

from __future__ import annotations

import itertools
import json
import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import given_in_tiers

from exactdata.elastic import ElasticSampler, opened_state
from exactdata.order.batch_shape import BatchShape
from exactdata.order.segments import Segment
from exactdata.order.weights import SamplerError, SamplerStateError

NAMES = ["code", "prose", "tests", "math", "logs"]

weight = st.sampled_from([0.0, 0.01, 0.3, 1.0, 2.5, 40.0])
temperature = st.sampled_from([1.0, 0.5, 3.0])


@st.composite
def mixtures(draw: Any, cap: bool = False) -> dict[str, Any]:
    """Draw the arguments of an ElasticSampler: sources, weights, planned segments, exclusions, caps."""
    names = draw(st.permutations(NAMES))[: draw(st.integers(1, len(NAMES)))]
    sizes = {name: draw(st.integers(1, 40)) for name in names}

    def weights() -> dict[str, float]:
        values = {name: draw(weight) for name in names}
        values[draw(st.sampled_from(names))] = 1.0
        return values

    starts = draw(st.lists(st.integers(1, 300), max_size=3, unique=True))
    arguments: dict[str, Any] = {
        "sizes": sizes,
        "weights": weights(),
        "seed": draw(st.integers(0, 5)),
        "temperature": draw(temperature),
        "segments": [(start, weights(), draw(temperature)) for start in starts],
    }
    if cap:
        arguments["max_epochs"] = {name: draw(st.sampled_from([1, 2, 2.5])) for name in names}
    else:
        chosen = draw(st.sampled_from(names))
        first = draw(st.integers(0, 300))
        exclude = [f"positions:{first}-{first + draw(st.integers(0, 30))}"]
        if sizes[chosen] > 3:
            exclude.append(f"{chosen}:1-2")
        arguments["exclude"] = draw(st.lists(st.sampled_from(exclude), max_size=2, unique=True))
    return arguments


def sampler(arguments: dict[str, Any], num_replicas: int = 1, rank: int = 0, **more: Any) -> ElasticSampler:
    return ElasticSampler(
        **{**arguments, **more}, global_batch_size=8 * num_replicas, num_replicas=num_replicas, rank=rank
    )


def whole(arguments: dict[str, Any], count: int) -> list[int]:
    return list(itertools.islice(sampler(arguments), count))


@given_in_tiers(
    mixtures(), st.lists(st.tuples(st.integers(1, 7), st.integers(0, 40)), min_size=1, max_size=5), few=6, many=200
)
def test_any_ranks_and_any_interruptions_give_the_same_sequence(
    arguments: dict[str, Any], attempts: list[tuple[int, int]]
) -> None:
    """Give each attempt its own world size and length. The interleaved parts of its ranks are the sequence."""
    consumed: list[int] = []
    state: dict[str, Any] | None = None
    for world, samples in attempts:
        parts, states = [], []
        for rank in range(world):
            mine = sampler(arguments, world, rank)
            if state is not None:
                mine.load_state_dict(state)
            parts.append(list(itertools.islice(mine, samples)))
            states.append(mine.state_dict_at(samples))
        assert all(one["position"] == states[0]["position"] for one in states)
        consumed += [index for together in zip(*parts, strict=True) for index in together]
        state = states[0]
    assert consumed == whole(arguments, len(consumed))


class MinimalLoader:
    """A loader that uses only `state_dict`, `load_state_dict` and, if it `skips`, `set_skip`.

    With `skips`, it counts samples across all resumes, and may have prefetched beyond what it has yielded.
    """

    def __init__(self, samplers: list[ElasticSampler], skips: bool, state: dict[str, Any] | None, counted: int) -> None:
        for mine in samplers:
            if state is not None:
                mine.load_state_dict(state)
            if skips:
                mine.set_skip(counted)
        self.samplers, self.streams = samplers, [iter(mine) for mine in samplers]

    def take(self, samples: int) -> list[int]:
        return [next(stream) for _ in range(samples) for stream in self.streams]

    def state_dict(self) -> dict[str, Any]:
        states = [mine.state_dict() for mine in self.samplers]
        assert all(state == states[0] for state in states)
        return states[0]


@given_in_tiers(
    mixtures(),
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 30), st.integers(0, 9)), min_size=2, max_size=6),
    st.booleans(),
    few=8,
    many=200,
)
def test_minimal_loader_resumes_by_state_or_state_and_skip(
    arguments: dict[str, Any], attempts: list[tuple[int, int, int]], skips: bool
) -> None:
    """Reach the same position by both conventions, after any number of saves, with any number of ranks."""
    consumed: list[int] = []
    state, counted = None, 0
    for world, samples, ahead in attempts:
        loader = MinimalLoader([sampler(arguments, world, rank) for rank in range(world)], skips, state, counted)
        consumed += loader.take(samples)
        counted += samples
        if skips and counted:
            loader.take(ahead)
        state = loader.state_dict()
    assert consumed == whole(arguments, len(consumed))


def test_skip_before_position_zero_is_an_error() -> None:
    mine, other = (ElasticSampler({"a": 50}, [1], global_batch_size=2, num_replicas=n, rank=0) for n in (1, 2))
    expected = list(itertools.islice(mine, 20))
    mine.set_skip(0)
    other.load_state_dict(mine.state_dict())
    other.set_skip(0)
    assert len(list(itertools.islice(other, 10))) == 10
    other.load_state_dict(other.state_dict())
    other.set_skip(0)
    assert next(iter(other)) == other.indices_at(np.array([40]))[0]
    other.load_state_dict(other.state_dict_at(0))
    with pytest.raises(SamplerError, match="skip 3: the loaded state counts 30 samples per rank at position 40"):
        other.set_skip(3)
    mine.load_state_dict(mine.state_dict())
    mine.set_skip(15)
    assert list(itertools.islice(mine, 5)) == expected[15:]


def test_an_older_iteration_can_be_continued() -> None:
    mine = ElasticSampler({"a": 50}, [1], global_batch_size=2, num_replicas=1)
    older, newer = iter(mine), mine.iter_batches(2, True)
    pairs = [(next(older), next(newer)) for _ in range(6)]
    expected = mine.indices_at(np.arange(12)).tolist()
    assert [a for a, _ in pairs] == expected[:6]
    assert np.concatenate([b for _, b in pairs]).tolist() == expected
    assert mine.state_dict()["position"] == 12


@given_in_tiers(mixtures(), st.integers(1, 5), st.integers(1, 9), few=15, many=200)
def test_batches_have_the_same_sequence_as_iteration(arguments: dict[str, Any], world: int, batch: int) -> None:
    expected = whole(arguments, 40 * world)
    for rank in range(world):
        mine = sampler(arguments, world, rank)
        mine.set_skip(3)
        batches = itertools.islice(mine.iter_batches(batch, drop_last=True), 30 // batch)
        indices = np.concatenate([np.zeros(0, int), *batches]).tolist()
        assert indices == expected[rank::world][3 : 3 + len(indices)]
        assert mine.indices_at(mine.positions(0, len(indices))).tolist() == indices


@given_in_tiers(mixtures(), few=20, many=200)
def test_every_epoch_of_a_source_is_a_permutation(arguments: dict[str, Any]) -> None:
    """Cover segments, too: a source neither repeats nor skips a sample within an epoch."""
    arguments = {**arguments, "exclude": []}
    mine = sampler(arguments)
    names, index, epochs = mine.locate(np.arange(600))
    by_source: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for name, i, epoch in zip(names.tolist(), index.tolist(), epochs.tolist(), strict=True):
        by_source[name].append((epoch, i))
    for name, seen in by_source.items():
        size = arguments["sizes"][name]
        for first in range(0, len(seen), size):
            part = seen[first : first + size]
            assert {epoch for epoch, _ in part} == {first // size}
            assert len({i for _, i in part}) == len(part)


@given_in_tiers(mixtures(), few=15, many=200)
def test_positions_round_trip(arguments: dict[str, Any]) -> None:
    mine = sampler(arguments)
    positions = np.arange(700)
    assert np.array_equal(mine.find(*mine.locate(positions)), positions)


@given_in_tiers(mixtures(cap=True), few=20, many=200)
def test_epoch_caps_are_exact_to_the_sample(arguments: dict[str, Any]) -> None:
    mine = sampler(arguments)
    total = mine.order.total
    if total is None:  # a source that no segment draws never ends, but then another does
        return
    indices = list(mine)
    assert len(indices) == total == len(mine)
    names, _, _ = mine.locate(np.arange(total))
    for name, count in zip(*np.unique(names, return_counts=True), strict=True):
        assert count <= int(arguments["max_epochs"][name] * arguments["sizes"][name])
    assert mine.order.consumed_at(total) == {name: int((names == name).sum()) for name in sorted(arguments["sizes"])}


def test_capped_source_completes_its_epochs() -> None:
    mine = ElasticSampler(
        {"a": 7, "b": 100}, {"a": 3, "b": 1}, global_batch_size=4, max_epochs={"a": 2}, num_replicas=1
    )
    names, index, _ = mine.locate(np.arange(200))
    assert (names == "a").sum() == 14
    assert np.bincount(index[names == "a"]).tolist() == [2] * 7
    assert mine.order.total is None
    with pytest.raises(TypeError, match="endless"):
        len(mine)


@given_in_tiers(mixtures(), few=20, many=200)
def test_counts_at_any_position_match_the_sequence(arguments: dict[str, Any]) -> None:
    mine = sampler(arguments)
    names, _, _ = mine.locate(np.arange(400))
    for position in (0, 1, 2, 63, 150, 151, 399):
        expected = {name: int((names[:position] == name).sum()) for name in sorted(arguments["sizes"])}
        assert mine.order.consumed_at(position) == expected


@given_in_tiers(
    st.lists(st.floats(0.001, 100), min_size=1, max_size=9), temperature, st.integers(0, 9), few=20, many=200
)
def test_shares_are_within_the_bound_at_every_prefix(weights: list[float], heat: float, seed: int) -> None:
    sizes = {f"s{i}": 1000 for i in range(len(weights))}
    mine = ElasticSampler(sizes, weights, global_batch_size=8, num_replicas=1, seed=seed, temperature=heat)
    names, _, _ = mine.locate(np.arange(4000))
    ideal = mine.order.shares_at(0)
    for name in sizes:
        counts = np.cumsum(names == name)
        off = np.abs(counts - ideal[name] * np.arange(1, 4001))
        bound = mine.order.share_bound(name)
        assert off.max() < bound + 1e-6
        assert bound <= 1.5 * (len(weights) - 1).bit_length()


def test_shares_are_within_the_bound_after_many_samples() -> None:
    """Look at 10^15 samples, where a rounded fraction would have drifted."""
    mine = ElasticSampler({"a": 10**9, "b": 10**9, "c": 3}, [1, 2, 4], global_batch_size=1, num_replicas=1)
    counts = mine.order.consumed_at(10**15)
    for name, share in mine.order.shares_at(0).items():
        assert abs(counts[name] - share * 10**15) < 2 + 10**15 * 2**-50


def test_the_order_of_the_sources_changes_only_dataset_indices() -> None:
    a = ElasticSampler({"x": 10, "y": 20}, {"x": 1, "y": 2}, global_batch_size=1, num_replicas=1)
    b = ElasticSampler({"y": 20, "x": 10}, {"y": 2, "x": 1}, global_batch_size=1, num_replicas=1)
    for one, other in zip(a.locate(np.arange(99)), b.locate(np.arange(99)), strict=True):
        assert np.array_equal(one, other)
    names, index, _ = b.locate(np.arange(99))
    assert np.array_equal(b.indices_at(np.arange(99)), index + np.where(names == "x", 20, 0))


def test_seeds_epochs_and_sources_have_independent_streams() -> None:
    """Compare seed 42 epoch 1 with seed 43 epoch 0, and two sources of equal size, which are shuffled differently."""

    def epoch(seed: int, number: int, name: str = "a") -> list[int]:
        mine = ElasticSampler({name: 50}, [1], global_batch_size=1, num_replicas=1, seed=seed)
        indices: list[int] = mine.indices_at(np.arange(50 * number, 50 * number + 50)).tolist()
        return indices

    orders = [epoch(42, 0), epoch(42, 1), epoch(43, 0), epoch(43, 1), epoch(42, 0, "b")]
    assert len({tuple(order) for order in orders}) == len(orders)


MIXTURES = [
    ((0.4, 0.6), 5),
    ((1, 1, 1, 1, 1), 5),
    ((0.6, 0.3, 0.1), 10),
    ((0.375, 0.625), 8),
    ((0.9, 0.1), 2),
    ((0.5, 0.5), 2),
    ((1, 1, 1, 1, 1, 1, 1, 1), 8),
    ((0.97, 0.03), 3),
]


def drawn_sources(weights: Sequence[float], count: int, first: int = 0, seed: int = 0) -> np.ndarray:
    """Return the source number at each of `count` positions from `first` on."""
    sizes = {f"s{i:02}": 10**6 for i in range(len(weights))}
    mine = ElasticSampler(sizes, weights, global_batch_size=1, num_replicas=1, seed=seed)
    ids: np.ndarray = mine.order.numbers(np.arange(first, first + count))[0]
    return ids


def check_shares_of_ranks(ids: np.ndarray, weights: Sequence[float], ranks: int) -> None:
    """Check each rank's shares: exact to 5 % and to what chance allows in a sequence of independent samples."""
    share = np.array(weights) / sum(weights)
    for rank in range(ranks):
        mine = ids[rank::ranks]
        counts = np.bincount(mine, minlength=len(weights))
        allowed = 0.05 * share * len(mine) + 4 * np.sqrt(share * (1 - share) * len(mine))
        assert (np.abs(counts - share * len(mine)) <= allowed).all(), (rank, counts / len(mine), share)


@pytest.mark.parametrize(("weights", "ranks"), MIXTURES)
def test_every_rank_has_the_shares(weights: tuple[float, ...], ranks: int) -> None:
    """Cover any number of ranks that divides the positions, and any share that divides the number of ranks."""
    ids = drawn_sources(weights, 500_000)
    share = np.array(weights) / sum(weights)
    for number in (2, 3, ranks):
        for rank in range(number):
            mine = ids[rank::number]
            assert np.bincount(mine) / len(mine) == pytest.approx(share, rel=0.05)
    shape = BatchShape(0, ranks, 2, 3)
    of_rank = np.arange(len(ids)) % shape.global_batch_size % shape.world_size
    assert np.array_equal(of_rank, np.arange(len(ids)) % ranks), "a micro-batch is dealt out like all positions"


@given_in_tiers(
    st.lists(st.one_of(st.floats(0.02, 1), st.integers(1, 8)), min_size=2, max_size=7),
    st.integers(2, 12),
    st.integers(0, 10**12),
    few=20,
    many=200,
)
def test_every_rank_has_the_shares_of_any_mixture(weights: list[float], ranks: int, first: int) -> None:
    check_shares_of_ranks(drawn_sources(weights, 3000 * ranks, first), weights, ranks)


def autocorrelation(ids: np.ndarray, source: int, lags: int) -> np.ndarray:
    """Return a source indicator's autocorrelation at lags 0 to `lags`, in deviations of an independent sequence."""
    indicator = (ids == source) - (ids == source).mean()
    spectrum = np.fft.rfft(indicator, 2 * len(indicator))
    sums = np.fft.irfft(np.abs(spectrum) ** 2)[: lags + 1]
    scaled: np.ndarray = sums / sums[0] * np.sqrt(len(indicator))
    return scaled


@pytest.mark.parametrize(("weights", "ranks"), MIXTURES)
def test_sources_have_no_period(weights: tuple[float, ...], ranks: int) -> None:
    """Check that no lag repeats a source more often than chance, in the whole sequence and on each rank.

    It is not less often either, except for lags of the length within which the shares are exact: there a source that
    has just been drawn must be drawn less.
    """
    ids, lags = drawn_sources(weights, 1 << 18), 4000
    exact_within = sum(weights) / min(weights) + 3
    for step in (1, ranks):
        for rank in range(min(step, 3)):
            for source in range(len(weights)):
                strength = autocorrelation(ids[rank::step], source, lags)
                assert strength[1:].max() < 6
                assert strength[1 + int(exact_within / step) :].min() > -6


# --- changes during a run ---------------------------------------------------------------------------------------


@given_in_tiers(
    mixtures(),
    st.lists(st.tuples(st.integers(1, 60), weight, temperature), max_size=4),
    st.integers(1, 3),
    few=15,
    many=200,
)
def test_changes_during_a_run_repeat_and_skip_nothing(
    arguments: dict[str, Any], edits: list[tuple[int, float, float]], world: int
) -> None:
    arguments = {**arguments, "exclude": []}
    ranks = [sampler(arguments, world, rank) for rank in range(world)]
    streams = [iter(mine) for mine in ranks]
    seen: list[int] = []
    first = next(iter(arguments["sizes"]))
    for samples, changed, heat in [*edits, (30, 1.0, 1.0)]:
        for _ in range(samples):
            seen += [next(stream) for stream in streams]
        for mine in ranks:
            mine.update_weights({**dict.fromkeys(arguments["sizes"], 1.0), first: changed + 0.5}, heat)
    assert seen == ranks[0].indices_at(np.arange(len(seen))).tolist()
    start = 0
    for size in arguments["sizes"].values():
        mine_only = [index for index in seen if start <= index < start + size]
        for i in range(0, len(mine_only), size):
            part = mine_only[i : i + size]
            assert len(set(part)) == len(part)
        start += size
    again = sampler(arguments, 1, 0)
    again.load_state_dict(ranks[0].state_dict_at(len(seen) // world))
    assert list(itertools.islice(again, 50)) == again.indices_at(np.arange(len(seen), len(seen) + 50)).tolist()
    assert np.array_equal(again.indices_at(np.arange(len(seen))), seen)


@pytest.mark.parametrize("caps", [None, {"a": 10, "b": 20.5}])
def test_hundreds_of_changes_of_weights_repeat_and_skip_nothing(caps: dict[str, float] | None) -> None:
    """Change the weights at every step."""
    sizes = {"a": 40, "b": 30}
    arguments: dict[str, Any] = {"sizes": sizes, "weights": [1, 1], "max_epochs": caps}
    arguments["segments"] = [(3 * change, {"a": 1 + change % 7}) for change in range(1, 300)]
    mine, positions = sampler(arguments), np.arange(950)
    names, index, epochs = mine.locate(positions)
    for name, size in sizes.items():
        drawn = index[names == name]
        for first in range(0, len(drawn) - size, size):
            assert sorted(drawn[first : first + size].tolist()) == list(range(size))
    other = sampler(arguments)  # which has looked up nothing yet
    assert np.array_equal(other.find(names, index, epochs), positions)
    again = sampler(arguments, 2, 1)
    again.load_state_dict(json.loads(json.dumps(mine.state_dict_at(500))))
    assert list(itertools.islice(again, 200)) == mine.indices_at(np.arange(501, 900, 2)).tolist()


def test_a_source_that_pauses_for_many_changes_is_found_again() -> None:
    weights = [{"a": 0 if 3 <= change < 12 else 1 + change % 3, "b": 1} for change in range(1, 15)]
    arguments: dict[str, Any] = {"sizes": {"a": 40, "b": 70}, "weights": [1, 1]}
    arguments["segments"] = [(6 * change, each) for change, each in enumerate(weights, 1)]
    positions = np.arange(100)
    assert np.array_equal(sampler(arguments).find(*sampler(arguments).locate(positions)), positions)


def test_equal_weights_do_not_change_the_order() -> None:
    plain = ElasticSampler({"a": 9, "b": 9}, [1, 3], global_batch_size=1, num_replicas=1)
    expected = plain.indices_at(np.arange(100)).tolist()
    mine = ElasticSampler(
        {"a": 9, "b": 9}, [1, 3], global_batch_size=1, num_replicas=1, segments=[(17, {"a": 2, "b": 6})]
    )
    mine.update_weights([2, 6], position=40)
    assert mine.indices_at(np.arange(100)).tolist() == expected


def test_excluded_samples_are_never_drawn_and_order_is_kept() -> None:
    plain = ElasticSampler({"a": 30, "b": 30}, [1, 1], global_batch_size=1, num_replicas=1, seed=4)
    mine = ElasticSampler({"a": 30, "b": 30}, [1, 1], global_batch_size=1, num_replicas=1, seed=4)
    mine.exclude(["a:3-7", "b:0"], position=20)
    names, index, epochs = mine.locate(np.arange(400))
    old_names, old_index, old_epochs = plain.locate(np.arange(500))
    assert np.array_equal(index[:20], old_index[:20])
    for name, gone in (("a", [3, 4, 5, 6, 7]), ("b", [0])):
        chosen = names[20:] == name
        assert not np.isin(index[20:][chosen], gone).any()
        before = int((names[:20] == name).sum())
        kept = [
            (i, e)
            for n, (i, e) in enumerate(zip(old_index[old_names == name], old_epochs[old_names == name], strict=True))
            if n < before or i not in gone
        ]
        got = list(zip(index[names == name], epochs[names == name], strict=True))
        assert got == kept[: len(got)]
    assert mine.find("a", 3, 5) == -1
    assert np.array_equal(mine.find(names, index, epochs), np.arange(400))


def by_source(mine: ElasticSampler, count: int) -> dict[str, list[tuple[int, int]]]:
    """Return (epoch, index) of each source's samples among the first `count` positions, in order."""
    given: dict[str, list[tuple[int, int]]] = defaultdict(list)
    names, index, epochs = mine.locate(np.arange(count))
    for name, one, epoch in zip(names.tolist(), index.tolist(), epochs.tolist(), strict=True):
        given[name].append((epoch, one))
    return given


@given_in_tiers(
    mixtures(),
    st.lists(st.tuples(st.integers(0, 250), st.integers(0, 30)), min_size=1, max_size=4),
    st.randoms(),
    few=12,
    many=200,
)
def test_positions_excluded_together_are_the_old_samples(
    arguments: dict[str, Any], ranges: list[tuple[int, int]], random: Any
) -> None:
    """Write the positions in any order, overlapping or not, across changes of weights."""
    plain = sampler({**arguments, "exclude": []})
    gone = sorted({position for first, length in ranges for position in range(first, first + length + 1)})
    texts = [f"{first}-{first + length}" for first, length in ranges]
    mine = sampler({**arguments, "exclude": texts})
    singly = [f"positions:{position}" for position in gone]
    random.shuffle(singly)
    again = sampler({**arguments, "exclude": singly})
    assert again.order.exclusions == mine.order.exclusions
    assert again.state_dict() == mine.state_dict()
    left_out = set(zip(*(part[gone].tolist() for part in plain.locate(np.arange(700))), strict=True))
    for name, come in by_source(mine, 300).items():
        alone = {"sizes": {name: arguments["sizes"][name]}, "weights": [1], "seed": arguments["seed"]}
        stream = by_source(sampler(alone), 700)[name]
        expected = [(epoch, index) for epoch, index in stream if (name, index, epoch) not in left_out]
        assert come == expected[: len(come)]
    found = mine.find(*(np.array(column) for column in zip(*sorted(left_out), strict=True)))
    assert (found == -1).all()
    positions = np.arange(600)
    assert np.array_equal(mine.find(*mine.locate(positions)), positions)
    assert mine.indices_at(np.arange(gone[0])).tolist() == plain.indices_at(np.arange(gone[0])).tolist()
    assert np.array_equal(mine.locate(positions)[0], plain.locate(positions)[0]), "the same sources at every position"


def test_later_exclusion_counts_in_the_reduced_order() -> None:
    arguments: dict[str, Any] = {"sizes": {"a": 300}, "weights": [1], "global_batch_size": 1, "num_replicas": 1}
    plain, mine = ElasticSampler(**arguments), ElasticSampler(**arguments, exclude=["20-24"])
    mine.exclude(["25-29", "20"], position=3)
    expected = np.delete(plain.indices_at(np.arange(200)), [*range(20, 25), 25, *range(30, 35)])
    assert mine.indices_at(np.arange(150)).tolist() == expected[:150].tolist()
    configured = ElasticSampler(**arguments, exclude=["20-24", "25-29"], allow_data_change=True)
    configured.load_state_dict(ElasticSampler(**arguments, exclude=["20-24"]).state_dict_at(3))
    expected = np.delete(plain.indices_at(np.arange(200)), [*range(20, 25), *range(30, 35)])
    assert configured.indices_at(np.arange(150)).tolist() == expected[:150].tolist()


def test_positions_excluded_before_new_weights_are_the_old_ones() -> None:
    arguments: dict[str, Any] = {"sizes": {"a": 99, "b": 99}, "global_batch_size": 1, "num_replicas": 1}
    plain = ElasticSampler(**arguments, weights=[1, 1])
    gone = set(zip(*(part.tolist() for part in plain.locate(np.arange(20, 30))), strict=True))
    called = ElasticSampler(**arguments, weights=[1, 1])
    called.exclude(["20-29"], position=20)
    called.update_weights([1, 9], position=20)
    configured = ElasticSampler(**arguments, weights=[1, 9], exclude=["20-29"], allow_data_change=True)
    configured.load_state_dict(plain.state_dict_at(20))
    for mine in (called, configured):
        assert mine.order.shares_at(20) == pytest.approx({"a": 0.1, "b": 0.9})
        assert not gone & set(zip(*(part.tolist() for part in mine.locate(np.arange(100))), strict=True))
        for name, come in by_source(mine, 100).items():
            kept = [sample for sample in by_source(plain, 250)[name] if (name, sample[1], sample[0]) not in gone]
            assert come == kept[: len(come)]


FORMS = {
    "positions:50-59": ["50-59", "50-54", "55-59", "positions:52-58"],
    "a:3": ["a:3-3"],
    "a:3-7": ["a:5-7", "a:3-5"],
}


@pytest.mark.parametrize("changed", [{"max_epochs": {"a": 5}}, {"weights": [1, 3]}, {"segments": [(300, {"a": 9})]}])
@pytest.mark.parametrize("exclude", FORMS)
def test_an_exclusion_survives_every_other_change(exclude: str, changed: dict[str, Any]) -> None:
    """Cover a pending exclusion, one in force, and one made and saved in the run, however it is written."""
    arguments: dict[str, Any] = {"sizes": {"a": 40, "b": 40}, "weights": [1, 1], "global_batch_size": 1}
    arguments |= {"num_replicas": 1, "allow_data_change": True}
    for written in ([exclude], FORMS[exclude]):
        old = ElasticSampler(**arguments, exclude=[exclude])
        expected = set(zip(*(part.tolist() for part in old.locate(np.arange(80))), strict=True))
        configured = ElasticSampler(**{**arguments, **changed}, exclude=written)
        same = ElasticSampler(**arguments, exclude=written)
        for at in (0, 10, 70):
            same.load_state_dict(old.state_dict_at(at))
            assert same.changes_from(opened_state(old.state_dict_at(at))) == ([] if same._plan == old._plan else [ANY])
            assert same.order.exclusions == old.order.exclusions
            configured.load_state_dict(old.state_dict_at(at))
            assert configured.order.exclusions == old.order.exclusions
    made = ElasticSampler(**arguments)
    list(itertools.islice(made, 10))
    made.exclude([exclude])
    configured = ElasticSampler(**{**arguments, **changed})
    configured.load_state_dict(made.state_dict())
    assert configured.order.exclusions == made.order.exclusions != ()
    assert expected
    assert not set(configured.find(["a"] * 3, [3] * 3, [1, 2, 3])) - {-1} or exclude.startswith("pos")


@pytest.mark.parametrize("made", ["a:3", "a:2-4", "positions:20-29"])
@pytest.mark.parametrize("configured", [["a:3"], ["a:1-3"], ["positions:18-24"]])
def test_withdrawn_configuration_does_not_undo_a_call(made: str, configured: list[str]) -> None:
    arguments: dict[str, Any] = {"sizes": {"a": 40, "b": 40}, "weights": [1, 1], "global_batch_size": 1}
    arguments |= {"num_replicas": 1, "allow_data_change": True}
    alone = {**arguments, "sizes": {"b": 40}, "weights": [1]}
    run = ElasticSampler(**arguments, exclude=configured)
    list(itertools.islice(run, 10))
    run.exclude([made])
    (expected,) = (one for one in run.order.exclusions if not one.planned)
    for withdrawn in (arguments, alone, arguments):  # the source may be removed in between, and return
        resumed = ElasticSampler(**withdrawn)
        resumed.load_state_dict(run.state_dict())
        list(itertools.islice(resumed, 4))
        run = resumed
    assert [one for one in run.order.exclusions if one.until is None] == [expected]
    if made.startswith("a"):
        names, indices, _ = run.locate(np.arange(22, 400))
        assert ("a", 3) not in set(zip(names.tolist(), indices.tolist(), strict=True))


def test_excluded_positions_named_later_are_other_samples() -> None:
    """Positions name samples of the run that was inspected. After the call, they mean its next samples."""

    def at(sampler: ElasticSampler) -> list[int]:
        indices: list[int] = sampler.locate(np.arange(8, 20))[1].tolist()
        return indices

    arguments: dict[str, Any] = {"sizes": {"a": 50}, "weights": [1], "global_batch_size": 1, "num_replicas": 1}
    run = ElasticSampler(**arguments)
    run.exclude(["8-12"])
    shown = at(run)
    configured = ElasticSampler(**arguments, exclude=["8-10"], allow_data_change=True)
    configured.load_state_dict(run.state_dict())
    assert at(configured)[:9] == shown[3:]
    again = ElasticSampler(**arguments, exclude=["8-10"])
    again.load_state_dict(configured.state_dict())  # the plan is the same, and is not applied twice
    assert at(again) == at(configured)


@given_in_tiers(
    changed=st.sampled_from(
        [
            {"max_epochs": {"a": 50}},
            {"weights": [1, 3]},
            {"temperature": 2.0},
            {"segments": [(30, {"a": 9})]},
            {"segments": [(200, {"a": 9})]},
            {"exclude": ["a:3"]},
            {"exclude": ["positions:70-79"]},
            {"sizes": {"a": 40, "b": 40, "c": 10}, "weights": [1, 1, 1]},
        ]
    ),
    position=st.integers(100, 160),
    cuts=st.lists(st.integers(1, 69), min_size=1, max_size=2, unique=True).map(sorted),
    few=20,
    many=100,
)
def test_a_pending_change_of_weights_survives_every_other_change(
    changed: dict[str, Any], position: int, cuts: list[int]
) -> None:
    arguments: dict[str, Any] = {"sizes": {"a": 40, "b": 40}, "weights": [1, 1], "global_batch_size": 1}
    arguments |= {"num_replicas": 1, "allow_data_change": True}
    made = ElasticSampler(**arguments)
    list(itertools.islice(made, cuts[0]))
    made.update_weights({"a": 1, "b": 0}, position=position)
    configured = ElasticSampler(**{**arguments, **changed})
    configured.load_state_dict(made.state_dict())
    for before, after in itertools.pairwise(cuts):  # and every resume after that
        again = ElasticSampler(**{**arguments, **changed})
        again.load_state_dict(configured.state_dict_at(after - before))
        configured = again
    new = {"c": 1} if "sizes" in changed else {}
    segment = next(one for one in configured.order.segments if one.start == position)
    assert (segment.weights, segment.temperature) == ({"a": 1, "b": 0, **new}, 1.0)
    assert segment.max_epochs == changed.get("max_epochs", {})
    assert set(configured.locate(np.arange(position, 200))[0]) == {"a", *new}
    assert set(configured.locate(np.arange(cuts[0], position))[0]) == {"a", "b", *new}


def test_a_planned_change_replaces_a_pending_one() -> None:
    arguments: dict[str, Any] = {"global_batch_size": 1, "num_replicas": 1, "allow_data_change": True}
    made = ElasticSampler({"a": 40, "b": 40}, [1, 1], **arguments)
    list(itertools.islice(made, 10))
    made.update_weights({"a": 1, "b": 0}, position=50)
    planned = ElasticSampler({"a": 40, "b": 40}, [1, 1], segments=[(50, {"a": 0})], **arguments)
    planned.load_state_dict(made.state_dict())
    assert set(planned.locate(np.arange(50, 90))[0]) == {"b"}
    without = ElasticSampler({"b": 40}, [1], **arguments)
    without.load_state_dict(made.state_dict())
    assert set(without.locate(np.arange(10, 90))[0]) == {"b"}


def test_samples_no_longer_excluded_return_from_there_on() -> None:
    arguments: dict[str, Any] = {"sizes": {"a": 10}, "weights": [1], "global_batch_size": 1, "num_replicas": 1}
    old = ElasticSampler(**arguments, exclude=["a:3-5", "50-59"])
    new = ElasticSampler(**arguments, exclude=["a:4", "50-54"], allow_data_change=True)
    new.load_state_dict(old.state_dict_at(21))  # three epochs of seven samples
    assert np.array_equal(new.indices_at(np.arange(21)), old.indices_at(np.arange(21)))
    without = ElasticSampler(**arguments, exclude=["a:4"], allow_data_change=True)
    without.load_state_dict(old.state_dict_at(21))
    _, index, epochs = without.locate(np.arange(21, 80))
    for epoch in (3, 4, 5):
        assert sorted(index[epochs == epoch].tolist()) == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    expected = np.delete(without.indices_at(np.arange(100)), np.arange(50, 55))
    assert new.indices_at(np.arange(95)).tolist() == expected.tolist()


@given_in_tiers(
    st.integers(0, 19),
    st.lists(st.integers(0, 9), unique=True, max_size=9),
    st.integers(0, 12),
    st.booleans(),
    few=20,
    many=200,
)
def test_excluding_the_rest_of_a_capped_source_ends_it(at: int, samples: list[int], jump: int, alone: bool) -> None:
    """Check that no past sample is drawn anew and no other source is disturbed."""
    sizes = {"a": 10} if alone else {"a": 10, "b": 30}
    arguments: dict[str, Any] = {"sizes": sizes, "weights": [1] * len(sizes), "max_epochs": {"a": 1, "b": 2}}
    arguments["max_epochs"] = {name: arguments["max_epochs"][name] for name in sizes}
    plain, mine = sampler(arguments), sampler(arguments)
    at = min(at, len(plain))
    texts = [f"a:{sample}" for sample in samples] + ([f"{at}-{at + jump - 1}"] if jump else [])
    left = set(range(len(plain))) - set(range(at, at + jump))
    kept = {
        (name, index, epoch)
        for position, (name, index, epoch) in enumerate(
            zip(*(part.tolist() for part in plain.locate(np.arange(len(plain)))), strict=True)
        )
        if position < at or (position in left and not (name == "a" and index in samples))
    }
    if not kept:
        with pytest.raises(SamplerError, match="the order is empty"):
            mine.exclude(texts, position=at)
        return
    mine.exclude(texts, position=at)
    positions = np.arange(mine.order.total or 0)
    assert np.array_equal(mine.indices_at(np.arange(at)), plain.indices_at(np.arange(at)))
    assert np.array_equal(mine.find(*mine.locate(positions)), positions)
    assert set(zip(*(part.tolist() for part in mine.locate(positions)), strict=True)) == kept
    assert (np.diff(mine.order.spans.start) > 0).all()


@given(st.integers(0, 10**6), st.integers(0, 4), st.integers(1, 10**6))
def test_caps_are_exact_decimal_arithmetic(hundredths: int, digits: int, size: int) -> None:
    cap = float(f"{hundredths}e-{digits}")
    mine = Segment(0, {"a": 1.0}, 1.0, {"a": cap}).cap("a", size)
    assert mine == hundredths * size // 10**digits


def test_a_cap_of_a_part_of_an_epoch_gives_all_of_that_part() -> None:
    for cap, size, samples in ((4.35, 100, 435), (0.29, 100, 29), (1.1, 10, 11), (np.float64(4.35), 100, 435)):
        mine = ElasticSampler({"a": size}, [1], max_epochs=cap, global_batch_size=1, num_replicas=1)
        assert mine.order.total == samples
    assert ElasticSampler({"a": 3}, [1], max_epochs=1e300, global_batch_size=1, num_replicas=1).order.total is None


def test_a_segment_after_the_last_position_changes_nothing() -> None:
    arguments: dict[str, Any] = {"sizes": {"a": 5, "b": 7}, "weights": [1, 1]}
    without, mine = sampler(arguments), sampler(arguments, segments=[(2**62, {"a": 7})])
    located = mine.locate(np.arange(100))
    assert all(map(np.array_equal, located, without.locate(np.arange(100))))
    assert mine.find(*located).tolist() == list(range(100))


@pytest.mark.parametrize("exclude", [[], ["a:1", "b:7"], ["30-40"]])
def test_find_is_minus_one_for_whatever_is_never_consumed(exclude: list[str]) -> None:
    arguments: dict[str, Any] = {"global_batch_size": 1, "num_replicas": 1, "exclude": exclude}
    mine = ElasticSampler({"a": 10, "b": 90, "c": 5}, [1, 1, 0], **arguments)
    for epoch in (2**56, 2**58, 2**60, 2**61, 2**62, 2**63 - 1, 2**63, 2**64, 2**70):
        for index in (0, 5):
            found = mine.find("a", index, epoch)
            assert found == -1 or mine.locate(found) == ("a", index, epoch)
            assert (found == -1) == (epoch > 2**57)
    assert mine.find("c", 0, 0) == -1
    assert (mine.find(["a", "b"], [0, 0], np.array([2**63, 2**64 - 1], np.uint64)) == -1).all()
    large = ElasticSampler({"a": 2**61, "b": 2**60}, [1, 2**-40], **{**arguments, "exclude": []})
    for name, epoch in (("a", 2), ("a", 3), ("a", 2**61), ("b", 1), ("b", 2**62)):
        found = large.find(name, 1, epoch)
        assert found == -1 or large.locate(found) == (name, 1, epoch)


def test_changed_configuration_keeps_the_past() -> None:
    old = ElasticSampler({"a": 40, "b": 40}, [1, 1], global_batch_size=2, num_replicas=2, rank=0)
    state = old.state_dict_at(30)
    new: dict[str, Any] = {
        "sizes": {"c": 10, "a": 40},
        "weights": {"a": 1.0, "c": 1.0},
        "global_batch_size": 3,
        "num_replicas": 3,
        "rank": 1,
    }
    with pytest.raises(SamplerStateError, match=r"source 'c' is new; source 'b' is retired"):
        ElasticSampler(**new).load_state_dict(state)
    mine = ElasticSampler(**new, allow_data_change=True)
    mine.load_state_dict(state)
    for mixed, plain in zip(mine.locate(np.arange(60)), old.locate(np.arange(60)), strict=True):
        assert np.array_equal(mixed, plain)
    names, index, _ = mine.locate(np.arange(60, 200))
    assert set(names) == {"a", "c"}
    old_names, old_index, _ = old.locate(np.arange(60))
    first_epoch = [*old_index[old_names == "a"], *index[names == "a"]][:40]
    assert sorted(first_epoch) == list(range(40))
    assert next(iter(mine)) == mine.indices_at(np.array([61]))[0]
    later = ElasticSampler(**new)  # the change is part of the state now
    later.load_state_dict(mine.state_dict_at(4))
    assert np.array_equal(later.indices_at(np.arange(60, 150)), mine.indices_at(np.arange(60, 150)))


def test_without_shuffle_each_source_keeps_its_own_order() -> None:
    mine = ElasticSampler({"a": 5, "b": 3}, [1, 1], global_batch_size=1, num_replicas=1, shuffle=False, exclude=["a:2"])
    names, index, epochs = mine.locate(np.arange(60))
    assert index[names == "a"].tolist()[:9] == [0, 1, 3, 4, 0, 1, 3, 4, 0]
    assert index[names == "b"].tolist()[:7] == [0, 1, 2, 0, 1, 2, 0]
    assert np.array_equal(mine.find(names, index, epochs), np.arange(60))


def test_a_planned_segment_that_has_not_begun_may_move() -> None:
    """A phase begins at a step, whose position changes with the global batch."""
    arguments: dict[str, Any] = {"sizes": {"a": 50, "b": 50}, "weights": [1, 1], "num_replicas": 1}
    old = ElasticSampler(**arguments, global_batch_size=4, segments=[(400, {"b": 9})])
    new = ElasticSampler(**arguments, global_batch_size=8, segments=[(700, {"b": 9})])
    new.load_state_dict(old.state_dict_at(100))
    plain = ElasticSampler(**arguments, global_batch_size=8)
    assert np.array_equal(new.indices_at(np.arange(700)), plain.indices_at(np.arange(700)))
    assert new.order.shares_at(700) == pytest.approx({"a": 0.1, "b": 0.9})
    with pytest.raises(SamplerStateError, match="segment 1 was"):
        ElasticSampler(**arguments, global_batch_size=8, segments=[(700, {"b": 9})]).load_state_dict(
            old.state_dict_at(500)
        )


def test_an_exclusion_is_recorded_once() -> None:
    arguments: dict[str, Any] = {"sizes": {"a": 50}, "weights": [1], "global_batch_size": 1, "num_replicas": 1}
    state = ElasticSampler(**arguments).state_dict_at(10)
    first = ElasticSampler(**arguments, exclude=["positions:20-29", "a:4"], allow_data_change=True)
    first.load_state_dict(state)
    again = ElasticSampler(**arguments, exclude=["positions:20-29", "a:4"])
    again.load_state_dict(first.state_dict_at(25))
    assert again.order.exclusions == first.order.exclusions
    assert len(again.order.exclusions) == 2


# --- invalid input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weights": {"cod": 1, "prose": 1}}, r"unknown source 'cod' \(did you mean 'code'\?\)"),
        ({"weights": {"code": 1}}, "no weight for source 'prose'"),
        ({"weights": [0, 0]}, "all 2 sources are 0"),
        ({"weights": [float("nan"), 1]}, "weight nan of source 'code'"),
        ({"weights": [float("inf"), 1]}, "weight inf of source 'code'"),
        ({"weights": [-1, 1]}, "weight -1 of source 'code'"),
        ({"weights": [1]}, "Expected 2 weights"),
        ({"temperature": 0}, "temperature 0"),
        ({"temperature": float("inf")}, "temperature inf"),
        ({"sizes": {}}, "no sources"),
        ({"sizes": {"code": 0, "prose": 1}}, "source 'code' has weight 1 but no samples"),
        ({"sizes": {"code": -3, "prose": 1}}, "size -3"),
        ({"sizes": {"code": 2**62 + 1, "prose": 1}}, "between 0 and 2\\^62"),
        ({"sizes": {"code": 2**62, "prose": 2**62}}, "at most 2\\^62"),
        ({"exclude": [f"0-{2**61}"]}, "must be below 2\\^61"),
        ({"max_epochs": float("nan")}, "max_epochs nan"),
        ({"max_epochs": "2"}, "max_epochs '2'"),
        ({"global_batch_size": 10, "num_replicas": 4}, "the nearest is 8 or 12"),
        ({"num_replicas": 2, "rank": 2}, "rank 2"),
        ({"exclude": ["code"]}, "expected SOURCE:INDEX"),
        ({"exclude": ["code:x"]}, "expected SOURCE:INDEX"),
        ({"exclude": ["code:10"]}, "indices 0 to 9"),
        ({"exclude": ["code:0-9"]}, "all 10 samples"),
        ({"exclude": ["prosa:1"]}, "did you mean 'prose'"),
        ({"exclude": ["code:5-3"]}, "5 comes after 3"),
        ({"max_epochs": {"cod": 1}}, "max_epochs for unknown source"),
        ({"max_epochs": -1}, "max_epochs -1"),
        ({"max_epochs": 0}, "the order is empty"),
        ({"segments": [{"start": -1}]}, "expected start"),
        ({"segments": [{"start": 5, "wieghts": {}}]}, "expected start"),
        ({"segments": [(4, [0, 1])]}, "expected start"),
        ({"segments": [7]}, "expected start"),
        ({"segments": [(1, {}, 1.0, {})]}, "expected start"),
        ({"segments": [{"start": 5, "max_epochs": 2}]}, "expected start"),
        ({"segments": [(5, {"code": 1}), (5, {"code": 2})]}, "same position"),
        ({"segments": 5}, "segments 5: it must be a list"),
        ({"segments": [(2**62 + 1, {"code": 2})]}, "from 0 to 2\\^62"),
        ({"exclude": "500-599"}, "exclude '500-599': it must be a list"),
        ({"exclude": 3}, "exclude 3: it must be a list"),
        ({"weights": "ab"}, "weights 'ab': expected a mapping"),
        ({"weights": None}, "weights None: expected a mapping"),
        ({"weights": ["1", 1]}, "weight '1' of source 'code'"),
        ({"weights": [10**400, 1]}, "of source 'code': weights must be finite"),
        ({"weights": [True, 1]}, "weight True of source 'code'"),
        ({"temperature": 10**400}, "must be a finite number above 0"),
        ({"max_epochs": True}, "max_epochs True"),
        ({"max_epochs": 10**400}, "expected a finite number"),
        ({"max_epochs": {"code": None}}, "max_epochs None"),
        ({"global_batch_size": 2**62 + 1}, "at most 2\\^62"),
        ({"samples": 2**62 + 1}, "at most 2\\^62"),
        ({"epochs": 1e18}, "at most 2\\^62"),
    ],
)
def test_invalid_arguments_are_reported(arguments: dict[str, Any], message: str) -> None:
    good = {"sizes": {"code": 10, "prose": 10}, "weights": [1, 1], "global_batch_size": 8, "num_replicas": 1, "rank": 0}
    with pytest.raises(SamplerError, match=message):
        ElasticSampler(**{**good, **arguments})


def test_integers_of_numpy_are_accepted_and_floats_are_not() -> None:
    def make(number: Any, **more: Any) -> ElasticSampler:
        arguments: dict[str, Any] = {"sizes": {"a": number(40)}, "global_batch_size": number(6), "seed": number(3)}
        segments = [(number(10), {"a": 2.0})]
        return ElasticSampler(**{**arguments, **more}, weights=[1], num_replicas=number(1), segments=segments)

    assert json.dumps(make(np.int64).state_dict()) == json.dumps(make(int).state_dict())
    assert list(itertools.islice(make(np.int64), 9)) == list(itertools.islice(make(int), 9))
    for wrong in ({"seed": 3.0}, {"global_batch_size": 6.0}, {"sizes": {"a": 40.0}}):
        with pytest.raises(SamplerError, match="integer"):
            make(int, **wrong)
    with pytest.raises(SamplerError, match=r"skip 1\.5: it must be an integer"):
        make(int).set_skip(1.5)  # type: ignore[arg-type]


def test_consumed_positions_cannot_be_changed() -> None:
    mine: Any = ElasticSampler({"a": 9, "b": 9}, [1, 3], global_batch_size=1, num_replicas=1)
    list(itertools.islice(mine, 10))
    changes: list[Any] = [
        lambda at: mine.update_weights([2, 1], position=at),
        lambda at: mine.exclude(["a:1"], position=at),
    ]
    for change in changes:
        with pytest.raises(SamplerError, match="position 9: a change cannot begin before position 10"):
            change(9)
        change(10)


def test_changes_that_make_no_sense_are_errors() -> None:
    mine: Any = ElasticSampler({"a": 9, "b": 9}, [1, 3], global_batch_size=1, num_replicas=1)
    calls: list[tuple[str, Any]] = [
        ("exclude None", lambda: mine.exclude(None)),
        ("exclude 'a:3'", lambda: mine.exclude("a:3")),
        ("weights None", lambda: mine.update_weights(None)),
        ("weight 'x'", lambda: mine.update_weights({"a": "x"})),
        ("position -1", lambda: mine.update_weights([1, 1], position=-1)),
        ("at most 2\\^62", lambda: mine.update_weights([1, 1], position=2**62 + 1)),
    ]
    for message, call in calls:
        with pytest.raises(SamplerError, match=message):
            call()
    mine.update_weights([1, 1], position=2**62)
    again = ElasticSampler({"a": 9, "b": 9}, [1, 3], global_batch_size=1, num_replicas=1)
    again.load_state_dict(mine.state_dict())  # a state and an argument have the same largest position


@given_in_tiers(
    st.lists(st.tuples(st.integers(0, 60), st.sampled_from([1.0, 2.0, 5.0])), max_size=6),
    st.randoms(),
    few=20,
    many=200,
)
def test_future_weight_changes_commute(changes: list[tuple[int, float]], shuffler: random.Random) -> None:
    """A weight change that repeats the weights in force keeps its effect if another change is put before it."""
    last = dict(changes)
    played = list(last.items())
    shuffler.shuffle(played)
    called = ElasticSampler({"a": 90, "b": 90}, [1, 1], global_batch_size=1, num_replicas=1)
    for position, weight in played:
        called.update_weights({"a": weight, "b": 1}, position=position)
    planned = ElasticSampler(
        {"a": 90, "b": 90},
        [1, 1],
        global_batch_size=1,
        num_replicas=1,
        segments=[(position, {"a": weight, "b": 1}) for position, weight in last.items()],
    )
    assert list(itertools.islice(called, 100)) == list(itertools.islice(planned, 100))


def test_lookups_of_anything_but_integers_are_errors() -> None:
    mine: Any = ElasticSampler({"a": 9}, [1], global_batch_size=1, num_replicas=1)
    calls: list[Any] = [
        lambda: mine.locate(np.zeros((2, 2), int)),
        lambda: mine.locate(1.5),
        lambda: mine.find("a", 1.0, 0),
        lambda: mine.find("a", 1, [[0]]),
        lambda: mine.find([["a"]], 1, 0),
    ]
    for call in calls:
        with pytest.raises(SamplerError, match="one-dimensional"):
            call()
    assert mine.locate([])[1].tolist() == []


def test_states_that_do_not_fit_are_refused_with_both_values() -> None:
    def make(**changes: Any) -> ElasticSampler:
        good: dict[str, Any] = {"sizes": {"a": 10, "b": 5}, "weights": [1, 1], "global_batch_size": 2, "seed": 1}
        return ElasticSampler(**{**good, **changes}, num_replicas=1)

    state = make().state_dict_at(7)
    make(global_batch_size=5).load_state_dict(state)
    with pytest.raises(SamplerStateError, match="has seed 1, this sampler has seed 2"):
        make(seed=2).load_state_dict(state)
    with pytest.raises(SamplerStateError, match="had 10 samples when the state was saved and has 11 now"):
        make(sizes={"a": 11, "b": 5}).load_state_dict(state)
    with pytest.raises(SamplerStateError, match=r"a 1, b 1.*and is .*a 1, b 2.*allow_data_change"):
        make(weights=[1, 2]).load_state_dict(state)
    with pytest.raises(SamplerStateError, match="truncated or edited"):
        make().load_state_dict({**state, "position": 8})
    cut = {name: value for name, value in state.items() if name != "order"}
    with pytest.raises(SamplerStateError, match="truncated or edited"):
        make().load_state_dict(cut)
    with pytest.raises(SamplerStateError, match="version 2; this program knows version 1"):
        make().load_state_dict({**state, "version": 2})
    with pytest.raises(SamplerStateError, match="not an elastic sampler's"):
        make().load_state_dict({"epoch": 0, "seed": 1})
    with pytest.raises(SamplerStateError, match="the saved sampler state is None"):
        make().load_state_dict(None)  # type: ignore[arg-type]


def test_the_example_in_the_docs_shows_its_real_results() -> None:
    text = (Path(__file__).parents[2] / "docs" / "data-order.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    scope: dict[str, Any] = {}
    exec(code.split("sampler.locate")[0], scope)
    lines = dict(
        line.split("  # ", 1) for line in code.splitlines() if line.startswith(("sampler.locate", "sampler.find"))
    )
    for call, shown in lines.items():
        assert str(eval(call.strip(), scope)) == shown.strip().removesuffix(": source, index, epoch")
    scope["sampler"].update_weights({"code": 2.0}, temperature=0.7)
    assert scope["sampler"].state_dict_at(40)["position"] == 160


def test_a_refused_change_leaves_the_order_as_it_was() -> None:
    mine = ElasticSampler({"a": 9, "b": 9}, [1, 3], global_batch_size=1, num_replicas=1)
    expected = mine.indices_at(np.arange(50)).tolist()
    for _ in range(2):
        with pytest.raises(SamplerError, match="all 9 samples"):
            mine.exclude(["a:0-8"])
        with pytest.raises(SamplerError, match="temperature nan"):
            mine.update_weights([1, 1], temperature=float("nan"))
        assert mine.indices_at(np.arange(50)).tolist() == expected


# --- the published contract ----------------------------------------------------------------------


def test_golden_sequences() -> None:
    """Check version 1 of the order. These numbers must never change: a change is a new version."""
    one = ElasticSampler({"a": 20}, [1], global_batch_size=1, num_replicas=1, seed=7)
    assert one.state_dict()["version"] == 1
    assert one.indices_at(np.arange(24)).tolist() == GOLDEN_ONE
    four = ElasticSampler(
        {"code": 1000, "prose": 500, "tests": 7, "math": 10**9},
        {"code": 0.5, "prose": 0.25, "tests": 0.15, "math": 0.1},
        global_batch_size=1,
        num_replicas=1,
        seed=11,
        temperature=0.7,
        segments=[(10, {"tests": 0.0})],
    )
    assert four.indices_at(np.arange(20)).tolist() == GOLDEN_FOUR
    far = four.indices_at(np.array([10**6, 10**9, 10**12, 10**15]))
    assert far.tolist() == GOLDEN_FAR
    four.exclude(["positions:3-6", "code:0-600"], position=2)
    assert four.indices_at(np.arange(20)).tolist() == GOLDEN_EXCLUDED


GOLDEN_ONE = [19, 0, 18, 13, 16, 5, 3, 11, 8, 9, 7, 17, 1, 14, 2, 4, 6, 12, 10, 15, 12, 3, 15, 10]
GOLDEN_FOUR = [683, 1434, 1503, 206, 464, 839, 1244, 891, 268, 71]
GOLDEN_FOUR += [807107267, 450, 488, 1011, 244, 247, 760, 1467, 406, 883]
GOLDEN_FAR = [268, 1074, 290, 528]
GOLDEN_EXCLUDED = [683, 1434, 1503, 891, 760, 883, 1011, 942, 642, 870]
GOLDEN_EXCLUDED += [807107267, 697, 765, 1467, 611, 664, 965, 1262, 762, 966]

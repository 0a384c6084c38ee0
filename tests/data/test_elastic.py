"""The elastic order: one global sequence for any ranks, interruptions and changes; its inverse; its shares."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.data.elastic import ElasticSampler
from runner.data.order.weights import SamplerError, SamplerStateError

NAMES = ["code", "prose", "tests", "math", "logs"]

weight = st.sampled_from([0.0, 0.01, 0.3, 1.0, 2.5, 40.0])
temperature = st.sampled_from([1.0, 0.5, 3.0])


@st.composite
def mixtures(draw: Any, cap: bool = False) -> dict[str, Any]:
    """Arguments of an ElasticSampler: sources, weights, planned segments, exclusions, caps."""
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


@given(mixtures(), st.lists(st.tuples(st.integers(1, 7), st.integers(0, 40)), min_size=1, max_size=5))
def test_any_ranks_and_any_interruptions_give_the_same_sequence(
    arguments: dict[str, Any], attempts: list[tuple[int, int]]
) -> None:
    """Each attempt has its own world size and length; the interleaved parts of its ranks are the sequence."""
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

    One that skips counts samples across all resumes, and may have prefetched beyond what it has yielded.
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


@given(
    mixtures(),
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 30), st.integers(0, 9)), min_size=2, max_size=6),
    st.booleans(),
)
def test_a_minimal_loader_resumes_with_the_state_alone_or_with_an_additional_skip(
    arguments: dict[str, Any], attempts: list[tuple[int, int, int]], skips: bool
) -> None:
    """Both conventions reach the same position, after any number of saves, with any number of ranks."""
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


def test_a_skip_of_zero_resumes_at_the_state_and_one_before_position_zero_is_an_error() -> None:
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


@given(mixtures(), st.integers(1, 5), st.integers(1, 9))
def test_batches_have_the_same_sequence_as_iteration(arguments: dict[str, Any], world: int, batch: int) -> None:
    expected = whole(arguments, 40 * world)
    for rank in range(world):
        mine = sampler(arguments, world, rank)
        mine.set_skip(3)
        batches = itertools.islice(mine.iter_batches(batch, drop_last=True), 30 // batch)
        indices = np.concatenate([np.zeros(0, int), *batches]).tolist()
        assert indices == expected[rank::world][3 : 3 + len(indices)]
        assert mine.indices_at(mine.positions(0, len(indices))).tolist() == indices


@given(mixtures())
def test_every_epoch_of_a_source_is_a_permutation(arguments: dict[str, Any]) -> None:
    """Also across segments: a source neither repeats nor skips a sample within an epoch."""
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


@given(mixtures())
def test_positions_round_trip(arguments: dict[str, Any]) -> None:
    mine = sampler(arguments)
    positions = np.arange(700)
    assert np.array_equal(mine.find(*mine.locate(positions)), positions)


@given(mixtures(cap=True))
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


def test_a_capped_source_completes_its_epochs_and_the_others_continue() -> None:
    mine = ElasticSampler(
        {"a": 7, "b": 100}, {"a": 3, "b": 1}, global_batch_size=4, max_epochs={"a": 2}, num_replicas=1
    )
    names, index, _ = mine.locate(np.arange(200))
    assert (names == "a").sum() == 14
    assert np.bincount(index[names == "a"]).tolist() == [2] * 7
    assert mine.order.total is None
    with pytest.raises(TypeError, match="endless"):
        len(mine)


@given(mixtures())
def test_counts_at_any_position_match_the_sequence(arguments: dict[str, Any]) -> None:
    mine = sampler(arguments)
    names, _, _ = mine.locate(np.arange(400))
    for position in (0, 1, 2, 63, 150, 151, 399):
        expected = {name: int((names[:position] == name).sum()) for name in sorted(arguments["sizes"])}
        assert mine.order.consumed_at(position) == expected


@given(st.lists(st.floats(0.001, 100), min_size=1, max_size=9), temperature, st.integers(0, 9))
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
        assert bound <= max(0, (len(weights) - 1).bit_length())


def test_shares_are_within_the_bound_after_many_samples() -> None:
    """At 10^15 samples, where a rounded fraction would have drifted."""
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
    """Seed 42 epoch 1 differs from seed 43 epoch 0, and two sources of equal size are shuffled differently."""

    def epoch(seed: int, number: int, name: str = "a") -> list[int]:
        mine = ElasticSampler({name: 50}, [1], global_batch_size=1, num_replicas=1, seed=seed)
        indices: list[int] = mine.indices_at(np.arange(50 * number, 50 * number + 50)).tolist()
        return indices

    orders = [epoch(42, 0), epoch(42, 1), epoch(43, 0), epoch(43, 1), epoch(42, 0, "b")]
    assert len({tuple(order) for order in orders}) == len(orders)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_sources_are_spread_evenly_over_ranks_and_steps(world: int) -> None:
    """With `world` equal sources, each rank sees all of them evenly, and each step mixes them."""
    sizes = {f"s{i}": 1000 for i in range(world)}
    mine = ElasticSampler(sizes, [1.0] * world, global_batch_size=world, num_replicas=1)
    names, _, _ = mine.locate(np.arange(512 * world))
    steps = names.reshape(-1, world)
    assert all(len(set(step)) > 1 for step in steps.tolist())
    for rank in range(world):
        _, counts = np.unique(steps[:, rank], return_counts=True)
        assert len(counts) == world
        assert counts.max() - counts.min() < 8 * np.sqrt(512 / world)


# --- changes during a run ---------------------------------------------------------------------------------------


@given(mixtures(), st.lists(st.tuples(st.integers(1, 60), weight, temperature), max_size=4), st.integers(1, 3))
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


def test_equal_weights_do_not_change_the_order() -> None:
    plain = ElasticSampler({"a": 9, "b": 9}, [1, 3], global_batch_size=1, num_replicas=1)
    expected = plain.indices_at(np.arange(100)).tolist()
    mine = ElasticSampler(
        {"a": 9, "b": 9}, [1, 3], global_batch_size=1, num_replicas=1, segments=[(17, {"a": 2, "b": 6})]
    )
    mine.update_weights([2, 6], position=40)
    assert mine.indices_at(np.arange(100)).tolist() == expected


def test_excluded_samples_are_never_drawn_and_the_others_keep_their_order() -> None:
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


def test_excluded_positions_are_skipped() -> None:
    plain = ElasticSampler({"a": 300, "b": 300}, [1, 2], global_batch_size=1, num_replicas=1)
    mine = ElasticSampler(
        {"a": 300, "b": 300}, [1, 2], global_batch_size=1, num_replicas=1, exclude=["positions:50-79"]
    )
    expected = np.delete(plain.indices_at(np.arange(200)), np.arange(50, 80))
    assert np.array_equal(mine.indices_at(np.arange(170)), expected)
    name, index, epoch = plain.locate(60)
    assert mine.find(name, index, epoch) == -1


def test_a_changed_configuration_keeps_the_past_and_changes_the_future() -> None:
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
    """A phase begins at a step; with another global batch that step has another position."""
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
        ({"weights": [-1, 1]}, "weight -1.0 of source 'code'"),
        ({"weights": [1]}, "Expected 2 weights"),
        ({"temperature": 0}, "temperature 0"),
        ({"sizes": {}}, "no sources"),
        ({"sizes": {"code": 0, "prose": 1}}, "source 'code' has weight 1 but no samples"),
        ({"sizes": {"code": -3, "prose": 1}}, "size -3"),
        ({"sizes": {"code": 2**62 + 1, "prose": 1}}, "between 0 and 2\\^62"),
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
        ({"segments": [(5, {"code": 1}), (5, {"code": 2})]}, "same position"),
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


def test_what_was_consumed_cannot_be_changed() -> None:
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
    cut = {name: value for name, value in state.items() if name != "segments"}
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
    """Version 1 of the order. These numbers must never change: a change is a new version."""
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


GOLDEN_ONE = [19, 0, 18, 13, 16, 5, 3, 11, 8, 9, 7, 17, 1, 14, 2, 4, 6, 12, 10, 15, 12, 3, 15, 10]
GOLDEN_FOUR = [
    683,
    1434,
    206,
    1503,
    464,
    839,
    1244,
    891,
    268,
    71,
    807107267,
    450,
    1011,
    488,
    244,
    1467,
    247,
    760,
    406,
    1262,
]
GOLDEN_FAR = [268, 738, 208, 381]

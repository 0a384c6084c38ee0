"""Exclusions, compared with plain Python: sets of ranges, and the places of the samples that are left."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from threading import Barrier
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import given_in_tiers

from exactdata.datasets import MixtureDataset
from exactdata.elastic import ElasticSampler
from exactdata.order.exclusions import Exclusion, Selections
from exactdata.order.kept_samples import KeptSamples
from exactdata.order.packed import pack_rows, unpack_rows
from exactdata.order.ranges import Ranges
from exactdata.order.weights import SamplerError, SamplerStateError

bounds = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), max_size=12)


def ranges(pairs: list[tuple[int, int]]) -> Ranges:
    return Ranges.of([(low, low + length) for low, length in pairs])


def members(pairs: list[tuple[int, int]]) -> set[int]:
    return {value for low, length in pairs for value in range(low, low + length + 1)}


@given(bounds, bounds, st.integers(0, 70))
def test_ranges_are_sets(some: list[tuple[int, int]], others: list[tuple[int, int]], lowest: int) -> None:
    one, other, mine, theirs = ranges(some), ranges(others), members(some), members(others)

    def values(each: Ranges) -> set[int]:
        found = [value for low, high in each for value in range(low, high + 1)]
        assert len(found) == len(set(found)) == each.total
        assert (each.first[1:] > each.last[:-1] + 1).all(), "sorted, and no two touch"
        return set(found)

    assert values(one) == mine
    assert values(one.without(other)) == mine - theirs
    assert values(one.from_on(lowest)) == {value for value in mine if value >= lowest}
    assert (one == other) == (mine == theirs)
    assert one.values().tolist() == sorted(mine)


@given(
    size=st.integers(1, 60),
    gone=bounds,
    seed=st.integers(0, 99),
    keys=st.lists(st.integers(0, 90), min_size=1, max_size=20),
    far=st.booleans(),
)
def test_remaining_samples_of_each_epoch_are_counted(
    size: int, gone: list[tuple[int, int]], seed: int, keys: list[int], far: bool
) -> None:
    """Look up epochs in turn and far ahead, with more samples excluded or more left."""
    excluded = ranges([(low, length) for low, length in gone if low + length < size])
    if excluded.total == size:
        return

    @cache
    def order(epoch: int) -> np.ndarray:
        return np.random.default_rng([seed, epoch]).permutation(size)

    def permute(epoch: int, values: np.ndarray, inverse: bool) -> np.ndarray:
        found: np.ndarray = (np.argsort(order(epoch)) if inverse else order(epoch))[values]
        return found

    left = KeptSamples(size, excluded, permute)
    expected = [
        (epoch, offset)
        for epoch in range(max(keys) // left.left + 1)
        for offset in np.flatnonzero(~np.isin(order(epoch), excluded.values())).tolist()
    ]
    wanted = np.array(keys if far else sorted(keys), np.int64)
    epochs, offsets = left.locate(wanted)
    assert list(zip(epochs.tolist(), offsets.tolist(), strict=True)) == [expected[key] for key in wanted]
    ranks, is_gone = KeptSamples(size, excluded, permute).before(
        np.repeat(epochs, size), np.tile(np.arange(size), len(keys))
    )
    for i, epoch in enumerate(epochs.tolist()):
        kept = [(epoch, offset) in expected for offset in range(size)]
        assert (~is_gone[i * size : (i + 1) * size]).tolist() == kept
        assert ranks[i * size : (i + 1) * size].tolist() == [sum(kept[:offset]) for offset in range(size)]


def test_source_of_one_sample_is_drawn_once_an_epoch() -> None:
    mine = make(sizes={"a": 1, "b": 4}, weights=[1, 1], exclude=["b:0"])
    ids, index, epochs = mine.locate(np.arange(20))
    of_a = ids == "a"
    assert index[of_a].tolist() == [0] * 10
    assert epochs[of_a].tolist() == list(range(10))


@pytest.mark.parametrize(
    ("size", "gone", "position"),
    [
        (2**62, f"0-{2**62 - 10}", 10**6),  # a few are left
        (10**9, "100000-999999999", 10**6),
        (10**15, "0-199999", 10**14),  # of a source so large that blocks of it could not be counted
        (10**12, "0-999999", 10**6),
    ],
)
def test_sources_of_any_size_are_looked_up_anywhere(size: int, gone: str, position: int) -> None:
    """Exclude few samples, or leave few."""
    mine = make(sizes={"a": size}, weights=[1], exclude=[f"a:{gone}"])
    positions = np.arange(position, position + 500)
    _, index, epochs = mine.locate(positions)
    first, last = map(int, gone.split("-"))
    assert not ((index >= first) & (index <= last)).any()
    left = size - (last - first + 1)
    assert epochs.tolist() == (positions // left).tolist()
    for epoch in np.unique(epochs).tolist():
        assert len(set(index[epochs == epoch].tolist())) == (epochs == epoch).sum()
    assert np.array_equal(mine.find("a", index, epochs), positions)


@pytest.mark.parametrize(
    "changes",
    [
        {"sizes": {"a": 300_000, "b": 700}, "exclude": ["a:0-200000"]},
        {"segments": [(7 * i, {"a": 1 + i % 3}) for i in range(1, 2000)]},
        {"exclude": ["a:0-9"], "segments": [(500 * i, {"b": i}) for i in range(1, 9)], "max_epochs": {"a": 3}},
    ],
)
def test_two_threads_may_look_up_samples_at_once(changes: dict[str, Any]) -> None:
    """A loader that prefetches looks up keys in its thread while training looks up indices."""
    blocks = [np.arange(first, first + 512) for first in range(0, 60_000, 512)]
    alone = make(**changes)
    expected = [alone.indices_at(block).tolist() for block in blocks]
    keys = [alone.order.sample_keys(block).tolist() for block in blocks]
    for _ in range(3):
        mine, start = make(**changes), Barrier(2)

        def look_up(what: Any, start: Barrier = start) -> list[Any]:
            start.wait()
            return [what(block).tolist() for block in blocks]

        with ThreadPoolExecutor(2) as pool:
            found = [pool.submit(look_up, what) for what in (mine.indices_at, mine.order.sample_keys)]
            assert found[0].result() == expected
            assert found[1].result() == keys


@pytest.mark.parametrize("spoilt", ["{}!", "!{}", "{}\n"])
def test_a_text_with_foreign_characters_is_refused(spoilt: str) -> None:
    """Rows have no checksum, so no other edit could be detected."""
    text = pack_rows(np.arange(6, dtype=np.uint64).reshape(3, 2))
    assert len(unpack_rows(text, 2, 3)) == 3
    with pytest.raises(ValueError, match="damaged"):
        unpack_rows(spoilt.format(text), 2, 3)


def test_more_samples_than_can_be_sorted_are_refused() -> None:
    with pytest.raises(SamplerError, match=r"500000000 of 1000000000 samples of source 'a' .* split the source in two"):
        make(sizes={"a": 10**9}, weights=[1], exclude=["a:0-499999999"])


def make(**changes: Any) -> ElasticSampler:
    good: dict[str, Any] = {"sizes": {"a": 10**6, "b": 10**6}, "weights": [1, 2], "global_batch_size": 4}
    return ElasticSampler(**{**good, "num_replicas": 1, **changes})


def many(kind: str, count: int = 1000) -> list[str]:
    rng = np.random.default_rng(0)
    first = np.sort(rng.choice(900_000, count, replace=False))
    length = rng.integers(0, 8, count)
    source = {"samples": "a:", "positions": ""}[kind]
    return [f"{source}{low}-{low + more}" for low, more in zip(first.tolist(), length.tolist(), strict=True)]


@pytest.mark.parametrize("kind", ["samples", "positions"])
def test_1000_exclusions_mean_the_same_after_a_resume(kind: str) -> None:
    texts = many(kind)
    mine = make(exclude=texts)
    state = json.loads(json.dumps(mine.state_dict_at(1000)))
    assert len(mine.order.exclusions) > 900
    again = make(exclude=texts[::-1])
    again.load_state_dict(state)
    assert again.order.exclusions == mine.order.exclusions
    positions = np.arange(3000, 9000)
    assert np.array_equal(again.indices_at(positions), mine.indices_at(positions))
    assert np.array_equal(mine.find(*mine.locate(positions)), positions)
    gone = set(mine.order.exclusions[5].keys) if kind == "positions" else {"a"}
    assert gone <= {"a", "b"}
    fewer = make(exclude=texts[100:], allow_data_change=True)
    fewer.load_state_dict(state)
    assert np.array_equal(fewer.indices_at(np.arange(1000)), mine.indices_at(np.arange(1000)))
    with pytest.raises(SamplerStateError, match=r"exclude was .* and \d+ more and is") as error:
        make(exclude=texts[100:]).load_state_dict(state)
    assert len(str(error.value)) < 1000


def test_remaining_exclusions_keep_their_samples() -> None:
    """Withdraw any others before they act, also in the state that the run saves."""
    texts = ["a:7", "10-12", "40-45", "b:3", "70", "90-99"]
    state = make(exclude=texts).state_dict_at(0)
    for gone in (["a:7"], ["10-12"], ["40-45", "70"], ["10-12", "b:3", "90-99"]):
        rest = [text for text in texts if text not in gone]
        mine = make(exclude=rest, allow_data_change=True)
        mine.load_state_dict(state)
        assert mine.order.exclusions == make(exclude=rest).order.exclusions
        for one in mine.order.exclusions:
            assert Exclusion.from_json(one.to_json()) == one


def test_many_exclusions_mean_the_same_one_by_one() -> None:
    one, other = make(), make()
    texts = many("samples", 200)
    for text in texts:
        one.exclude([text])
    other.exclude(texts)
    assert np.array_equal(one.indices_at(np.arange(5000)), other.indices_at(np.arange(5000)))


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["a:1\n2"], "expected SOURCE:INDEX"),
        (["a:1", "a:2-"], "'a:2-'"),
        (["a:1", "a:-2"], "'a:-2'"),
        (["a:1", "a:1-2-3"], "'a:1-2-3'"),
        (["a:1", ":2"], "':2'"),
        (["a:1", "a:"], "'a:'"),
        (["a:1", "a:7-6"], "7 comes after 6"),
        (["a:1", f"a:{10**30}"], "at most 2\\^62"),
        (["a:1", "a:\ud800"], "expected SOURCE:INDEX"),
        (["a:1", "a: 2"], "'a: 2'"),
        (["a:1", "a:1_0"], "'a:1_0'"),
    ],
)
def test_a_wrong_text_among_others_is_named(texts: list[str], message: str) -> None:
    with pytest.raises(SamplerError, match=message):
        make(exclude=texts)


def test_numbers_may_be_written_in_any_digits() -> None:
    assert Selections.parse(["a:\u0663", "a:007"]) == Selections.parse(["a:3", "a:7"])


@given_in_tiers(st.data(), few=60, many=1000)
def test_edited_exclusions_are_refused_or_usable(data: st.DataObject) -> None:
    """Read any edited exclusions as exclusions, or raise one ValueError."""
    number = st.integers(-3, 5) | st.integers(-(2**62), 2**63) | st.none() | st.floats() | st.just("1")
    value = {
        "at": data.draw(number),
        "what": data.draw(st.sampled_from(["a:3", "positions:3-5", "a:-1", "a:4-1", f"a:{2**63}", ""])),
        "keys": {"a": [data.draw(number), data.draw(number)]} if data.draw(st.booleans()) else {},
        "until": data.draw(number),
        "planned": data.draw(st.sampled_from([True, False, 1])),
    }
    with suppress(ValueError):
        found = Exclusion.from_json(value)
        assert Exclusion.from_json(found.to_json()) == found


@pytest.mark.parametrize("name", ["positions", "\ud800", "two\nlines", "", 3, None, b"code"])
def test_a_source_has_a_name_that_can_be_written_and_excluded(name: Any) -> None:
    for refused in (
        lambda: ElasticSampler({name: 10, "b": 5}, [1, 1], global_batch_size=1, num_replicas=1),
        lambda: MixtureDataset([range(10), range(5)], ["b", name]),
    ):
        with pytest.raises(ValueError, match=f"^source name {re.escape(repr(name))}: it must be [^\n]+$"):
            refused()

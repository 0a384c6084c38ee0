"""Exclusions and segments are parsed, kept and looked up many at once: exactly as each would be by itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import given_in_tiers

from runner.data.order.exclusion_texts import Selection, parse_selections
from runner.data.order.interleave import Interleave
from runner.data.order.ranges import NarrowRanges, Ranges, RunningTotals, narrow, search
from runner.data.order.weights import SamplerError

names = st.sampled_from(["a", "a:b", "x-y", "positions", "eight888", "longer than a word", "ü", "\ud800", "7"])
numbers = st.one_of(st.integers(0, 30), st.sampled_from([10**8 - 1, 10**8, 10**16, 10**18 - 1, 10**18, 2**62]))
forms = st.sampled_from(["{name}:{first}", "{name}:{first}-{last}", "{first}", "{first}-{last}"])
spoilt = st.sampled_from(["", "", "", "", "", "", "", ":", "-", "/", "x", "\n", "\0", "\u0661"])


@st.composite
def texts(draw: st.DrawFn) -> str:
    first = draw(numbers)
    text = draw(forms).format(name=draw(names), first=first, last=min(2**62, first + draw(st.integers(0, 9))))
    at = draw(st.integers(0, len(text)))
    return text[:at] + draw(spoilt) + text[at:]


@given(st.lists(texts(), max_size=6), st.integers(1, 3))
def test_texts_are_parsed_together_as_one_by_one(given_texts: list[str], repeated: int) -> None:
    """The same samples, and what one refuses is refused."""
    given_texts = given_texts * repeated
    try:
        ones = [Selection.parse(text) for text in given_texts]
    except SamplerError:
        ones = []
    if len(ones) < len(given_texts) or any(one.last > 2**62 for one in ones):
        with pytest.raises(SamplerError):
            parse_selections(given_texts)
        return
    found = parse_selections(given_texts)
    assert set(found) == {one.source for one in ones}
    for source, part in found.items():
        mine = [one for one in ones if one.source == source]
        assert part == Ranges.of(np.array([one.first for one in mine]), np.array([one.last for one in mine]))


def test_texts_of_several_sources_in_any_order() -> None:
    """More than are parsed together."""
    given_texts = [f"{'abc'[at % 3] * (1 + at % 2)}:{3 * at}-{3 * at + 1}" for at in range(10_000)]
    found = parse_selections(given_texts)
    assert list(found) == ["a", "bb", "c", "aa", "b", "cc"]
    assert list(found["bb"])[:2] == [(3, 4), (21, 22)]
    assert sum(map(len, found.values())) == 10_000


@given_in_tiers(st.integers(1, 9), st.integers(1, 6), st.integers(0, 2**32), few=15, many=200)
def test_mixtures_looked_up_together_are_those_by_themselves(sources: int, mixtures: int, seed: int) -> None:
    """Shares that swap the lighter child, and any number of sources."""
    draw = np.random.default_rng(seed)
    quanta, keys = draw.integers(1, 50, (mixtures, sources)), draw.integers(0, 2**63, mixtures).astype(np.uint64)
    together, mixture = Interleave(quanta, keys), draw.integers(0, mixtures, 3000)
    slots = draw.integers(0, [10, 2**40][seed % 2], 3000)
    ids, counted = together.locate(slots.astype(np.uint64), mixture)
    counts = together.counts(slots, mixture)
    assert np.array_equal(together.find(ids, counted, mixture), slots)
    for i in range(mixtures):
        alone, mine = Interleave(quanta[i : i + 1], keys[i : i + 1]), mixture == i
        for found, expected in zip(alone.locate(slots[mine].astype(np.uint64)), (ids, counted), strict=True):
            assert np.array_equal(found, expected[mine])
        assert np.array_equal(alone.counts(slots[mine]), counts[mine])
        assert np.array_equal(together.counts(slots[mine], i), counts[mine])


edges = st.sampled_from([0, 1, 126, 127, 128, 2**15 - 2, 2**15 - 1, 2**15, 2**31 - 2, 2**31 - 1, 2**31, 2**62])


@given(st.lists(edges, max_size=8), st.lists(edges.map(lambda edge: edge - 1), min_size=1))
def test_narrow_columns_hold_and_find_what_wide_ones_do(values: list[int], wanted: list[int]) -> None:
    """Where a number just fits its type, and where a wanted one does not."""
    wide, places = np.array(sorted(values), np.int64), np.array(wanted, np.int64)
    column = narrow(wide)
    assert np.array_equal(column, wide)
    for side in ("left", "right"):
        assert np.array_equal(search(column, places, side), np.searchsorted(wide, places, side))
    ranges = Ranges.of(wide, wide + 5)
    assert NarrowRanges(ranges).widened() == ranges


@given(st.lists(st.integers(0, 2**40), max_size=100))
def test_running_totals_are_cumulative_sums(values: list[int]) -> None:
    totals = RunningTotals(np.array(values, np.int64))
    assert totals[np.arange(len(values) + 1)].tolist() == np.cumsum([0, *values]).tolist()

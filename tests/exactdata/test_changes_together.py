"""Looking up many mixtures at once gives the result of looking up each alone."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from properties import given_in_tiers

from exactdata.order.interleave import Interleave


@given_in_tiers(st.integers(1, 9), st.integers(1, 6), st.integers(0, 2**32), few=15, many=200)
def test_mixtures_looked_up_together_equal_single_lookups(sources: int, mixtures: int, seed: int) -> None:
    """Draw shares that swap the lighter child, and any number of sources."""
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

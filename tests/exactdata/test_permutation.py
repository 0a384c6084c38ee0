"""The keyed permutation: a bijection at every size, and as random as a shuffle by standard tests."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exactdata.order.hashing import derive, mix64, stream_key
from exactdata.order.permutation import MAX_SIZE, Domain, grid, permute, round_pairs


def permuted(n: int, key: int | np.ndarray, indices: np.ndarray, inverse: bool = False) -> np.ndarray:
    """Return the indices in [0, n), permuted under one key, or under one key each."""
    a, b = grid(n)
    domain = Domain(np.uint64(n), np.uint64(a), np.uint64(b))
    keys = np.uint64(key) if isinstance(key, int) else key
    return permute(indices.astype(np.uint64), domain, keys, round_pairs(b), inverse=inverse).astype(np.int64)


def many(n: int, keys: int, seed: int = 0) -> np.ndarray:
    """Return (keys, n), with one permutation per row."""
    row_keys = np.repeat(derive(stream_key("test", seed), np.arange(keys)), n)
    return permuted(n, row_keys, np.tile(np.arange(n), keys)).reshape(keys, n)


def excess(counts: np.ndarray, freedom: int) -> float:
    """Return the chi-square statistic against a uniform distribution, in deviations above its mean."""
    expected = counts.sum() / counts.size
    chi = float(((counts - expected) ** 2 / expected).sum())
    return (chi - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("sizes", [range(1, 130), (255, 256, 257, 1000, 4097), (65536, 100_003)])
def test_every_small_size_is_a_bijection_with_an_inverse(sizes: range | tuple[int, ...]) -> None:
    for n in sizes:
        values = permuted(n, n * 7919, np.arange(n))
        assert np.array_equal(np.sort(values), np.arange(n))
        assert np.array_equal(permuted(n, n * 7919, values, inverse=True), np.arange(n))


@given(st.integers(1, MAX_SIZE), st.integers(0, 2**64 - 1), st.integers(0, 2**32))
def test_large_sizes_have_an_inverse(n: int, key: int, seed: int) -> None:
    indices = np.random.default_rng(seed).integers(0, n, 50)
    values = permuted(n, key, indices)
    assert ((values >= 0) & (values < n)).all()
    assert np.array_equal(permuted(n, key, values, inverse=True), indices)
    assert len(np.unique(values)) == len(np.unique(indices))


@given(st.integers(3, MAX_SIZE))
def test_the_grid_is_near_square_with_few_surplus_cells(n: int) -> None:
    a, b = grid(n)
    assert a * b >= n > a * b - b
    assert max(2, math.isqrt(n) // 2) <= b <= max(2, math.isqrt(n))


def test_a_call_with_many_sizes_and_keys_equals_single_calls() -> None:
    sizes = np.array([300, 500, 999, 450, 63_000] * 4)
    grids = np.array([grid(int(n)) for n in sizes], np.uint64)
    keys = np.arange(20, dtype=np.uint64)
    indices = np.arange(20, dtype=np.uint64) * np.uint64(14)
    domain = Domain(sizes.astype(np.uint64), grids[:, 0].copy(), grids[:, 1].copy())
    pairs = np.array([round_pairs(int(b)) for b in grids[:, 1]])
    for number in np.unique(pairs).tolist():
        chosen = np.flatnonzero(pairs == number)
        together = permute(indices[chosen], domain.select(chosen), keys[chosen], number)
        single = [permuted(int(sizes[i]), int(keys[i]), indices[i : i + 1]).tolist() for i in chosen]
        assert [[value] for value in together.tolist()] == single


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
def test_all_orders_of_a_few_items_are_equally_likely(n: int) -> None:
    codes = (many(n, 40_000) * n ** np.arange(n)).sum(axis=1)
    orders, counts = np.unique(codes, return_counts=True)
    assert len(orders) == math.factorial(n)
    assert excess(counts, len(orders) - 1) < 5


@pytest.mark.parametrize("n", [7, 10, 17, 64, 100, 128])
def test_every_item_is_equally_likely_at_every_place(n: int) -> None:
    rows = many(n, 400_000 // n)
    counts = np.stack([np.bincount(rows[:, i], minlength=n) for i in range(n)])
    assert excess(counts.reshape(-1), n * (n - 1)) < 5


@pytest.mark.parametrize("n", [8, 16, 50, 100, 257, 1000, 20_000])
def test_neighbors_are_independent(n: int) -> None:
    """Differences of items 1, 2 and one grid row apart are uniform; the serial correlation is -1/(n-1)."""
    rows = many(n, max(20, 400_000 // n))
    for apart in {1, 2, grid(n)[1]}:
        differences = np.bincount(((rows[:, apart:] - rows[:, :-apart]) % n).reshape(-1), minlength=n)[1:]
        assert excess(differences, n - 2) < 5
    centred = rows - (n - 1) / 2
    correlation = (centred[:, 1:] * centred[:, :-1]).mean(axis=1) / (centred**2).mean(axis=1)
    error = float(correlation.std()) / math.sqrt(len(rows))
    assert abs(float(correlation.mean()) + 1 / (n - 1)) < 5 * error


@pytest.mark.parametrize("n", [5, 30, 300, 3000])
def test_fixed_points_are_one_on_average_with_variance_one(n: int) -> None:
    fixed = (many(n, 600_000 // n) == np.arange(n)).sum(axis=1)
    error = 5 / math.sqrt(len(fixed))
    assert abs(fixed.mean() - 1) < error
    assert abs(fixed.var() - 1) < 3 * error


def test_golden_values() -> None:
    """The data order depends on these numbers; they must never change."""
    assert mix64(np.array([0, 1, 2**64 - 1], np.uint64)).tolist() == [0, 6238072747940578789, 13029008266876403067]
    assert stream_key(42, "source", "code") == 17380702669895051261
    pairs = {1: 12, 2: 12, 3: 9, 4: 7, 7: 7, 8: 5, 15: 5, 16: 4, 255: 4, 256: 3, 2**31: 3}
    assert {width: round_pairs(width) for width in pairs} == pairs
    assert [int(permuted(n, 1, np.array([n // 2]))[0]) for n in (1, 2, 3, 10, 1000, 10**9, 2**62)] == [
        0,
        1,
        1,
        9,
        667,
        237774063,
        948022396511987907,
    ]

"""The points of a search: within their ranges, none twice, and the same for the same seed."""

from __future__ import annotations

import math
from itertools import islice, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.search.points import Dimension, Space

LR = Dimension("optimizer.lr", low=1e-4, high=1e-2, log=True)
WIDTH = Dimension("model.width", ("64", "128", "256"))
LAYERS = Dimension("model.layers", low=1, high=4, whole=True)


def test_points_are_within_their_ranges_and_unique() -> None:
    points = list(islice(Space((LR, WIDTH, LAYERS)).random(3), 500))
    assert len({tuple(point.items()) for point in points}) == 500
    assert all(1e-4 <= float(point["optimizer.lr"]) <= 1e-2 for point in points)
    assert {point["model.width"] for point in points} == {"64", "128", "256"}
    assert {point["model.layers"] for point in points} == {"1", "2", "3", "4"}


def test_a_logarithm_is_drawn_uniformly() -> None:
    drawn = [float(point["optimizer.lr"]) for point in islice(Space((LR,)).random(0), 2000)]
    below = sum(number < 1e-3 for number in drawn) / len(drawn)
    assert 0.46 < below < 0.54
    wide = Dimension("n", low=1, high=1000, log=True, whole=True)
    whole = [int(wide.at(share / 1000)) for share in range(1000)]
    assert min(whole) == 1
    assert 990 <= max(whole) <= 1000
    assert 0.3 < sum(number <= 10 for number in whole) / 1000 < 0.45


def test_the_seed_decides_and_more_points_keep_the_first_ones() -> None:
    space = Space((LR, WIDTH))
    assert list(islice(space.random(1), 5)) == list(islice(space.random(1), 9))[:5]
    assert list(islice(space.random(1), 5)) != list(islice(space.random(2), 5))


def test_a_finite_space_is_drawn_to_its_last_point() -> None:
    space = Space((WIDTH, LAYERS))
    points = list(space.random(7))
    assert len(points) == space.size == 12
    assert sorted(map(str, points)) == sorted(map(str, space.grid()))


def test_an_interval_with_few_numbers_ends() -> None:
    points = list(Space((Dimension("lr", low=1.0, high=1.0001),)).random(0))
    assert 1 <= len(points) <= 3


def test_a_grid_is_every_combination_with_the_last_key_fastest() -> None:
    points = [tuple(point.values()) for point in Space((WIDTH, LAYERS)).grid()]
    assert points == list(product(WIDTH.values, "1234"))


@given(low=st.floats(1e-12, 1e12), factor=st.floats(1.001, 1e6), share=st.floats(0, 1, exclude_max=True))
def test_a_drawn_number_is_within_its_ends_and_has_few_digits(low: float, factor: float, share: float) -> None:
    for log in (False, True):
        dimension = Dimension("x", low=low, high=low * factor, log=log)
        text = dimension.at(share)
        assert dimension.low <= float(text) <= dimension.high
        assert float(text) in (low, low * factor) or float(f"{float(text):.4g}") == float(text)


def test_a_dimension_is_read_back_from_json() -> None:
    for each in (LR, WIDTH, LAYERS):
        assert Dimension.from_json(each.to_json()) == each
    assert math.isinf(Space((LR,)).size)
    with pytest.raises(TypeError):
        Dimension.from_json({"key": "x", "unknown": 1})

"""`collate_samples` is torch's `default_collate`: the same batches, of the same types, and the same errors."""

from __future__ import annotations

import warnings
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import default_collate
from torch.utils.data._utils import collate as torchs

from runner.data.loading.default_collation import collate_samples


class Point(NamedTuple):
    x: Any
    y: Any


Wide = namedtuple("Wide", ["x", "y", "z"])


class Named(str):
    pass


class Tagged(torch.Tensor):
    pass


class Array(np.ndarray):
    pass


def outcome(collate: Any, samples: Any) -> Any:
    """What it returns, or the type and the words of its error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return collate(samples)
        except Exception as error:  # noqa: BLE001 (of any kind: that is compared)
            return type(error), str(error)


def assert_equal(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape, found.layout) == (expected.dtype, expected.shape, expected.layout)
        assert found.requires_grad == expected.requires_grad
        assert found.is_sparse or found.is_contiguous() == expected.is_contiguous()
        assert torch.equal(found.to_dense().nan_to_num(7), expected.to_dense().nan_to_num(7))
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_equal(found[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    elif isinstance(expected, np.ndarray):
        np.testing.assert_array_equal(found, expected)
    else:
        assert found == expected


def assert_same(samples: Any) -> None:
    assert_equal(outcome(collate_samples, samples), outcome(default_collate, samples))


DTYPES = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64", "uint16"]
shapes = st.sampled_from([(), (0,), (1,), (3,), (2, 3), (3, 0), (2, 1, 2)])


def array(dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 100, shape).astype(dtype)


@st.composite
def kinds(draw: Any) -> Any:
    """A function of a number that makes a value of one kind, each with other content."""
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(shapes)
    makes = [
        lambda n: array(dtype, shape, n),
        lambda n: np.asfortranarray(array(dtype, shape, n)),
        lambda n: array(dtype, (4, *shape), n)[::2],
        lambda n: torch.as_tensor(array(dtype, shape, n)),
        lambda n: np.dtype(dtype).type(n % 2),
        lambda n: n,
        lambda n: n / 7,
        lambda n: n % 2 == 0,
        lambda n: f"text {n}",
        lambda n: b"bytes",
        lambda n: 2**62 * (n + 1),
        lambda n: None,
        lambda n: np.array("x"),
        lambda n: np.array([1], ">i4"),
        lambda n: array(dtype, shape, n).view(Array),
        lambda n: Named(f"name {n}"),
        lambda n: torch.ones(2).as_subclass(Tagged),
        lambda n: torch.ones(2, requires_grad=True),
        lambda n: torch.eye(2).to_sparse(),
        lambda n: range(3),
        lambda n: object,
    ]
    return draw(st.sampled_from(makes))


nested = st.recursive(
    kinds(),
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from(["a", "b", 3]), inner, max_size=3).map(
            lambda parts: lambda n: {key: make(n) for key, make in parts.items()}
        ),
        st.lists(inner, max_size=3).map(lambda parts: lambda n: [make(n) for make in parts]),
        st.lists(inner, max_size=3).map(lambda parts: lambda n: tuple(make(n) for make in parts)),
        st.tuples(inner, inner).map(lambda parts: lambda n: Point(parts[0](n), parts[1](n))),
        inner.map(lambda make: lambda n: OrderedDict(a=make(n))),
    ),
    max_leaves=5,
)


@given(make=nested, count=st.integers(0, 4))
def test_samples_of_one_kind_give_the_same_batch(make: Any, count: int) -> None:
    assert_same([make(n) for n in range(count)])


@given(one=nested, other=nested, at=st.integers(0, 2))
def test_samples_that_do_not_agree_give_the_same_batch_or_error(one: Any, other: Any, at: int) -> None:
    assert_same([(other if n == at else one)(n) for n in range(3)])


@pytest.mark.parametrize(
    "samples",
    [
        [np.zeros(3), np.zeros(5)],
        [np.zeros((2, 3)), np.zeros((3, 2))],
        [np.zeros(3, "f4"), np.zeros(3, "f8")],
        [np.zeros(3, "i4"), np.zeros(3, "f4")],
        [np.zeros(()), np.zeros(())],
        [np.zeros(3), np.zeros(())],
        [np.zeros(()), np.zeros(3)],
        [torch.zeros(3), torch.zeros(4)],
        [torch.zeros(3), np.zeros(3)],
        [{"a": 1, "b": 2}, {"a": 3, "c": 4}],
        [{"a": 1}, {"a": 3, "c": 4}],
        [(1, 2), (3, 4, 5)],
        [[1, 2], (3, 4)],
        [(1, 2), 3],
        [Point(1, 2), (3, 4)],
        [Point(1, 2), Wide(1, 2, 3)],
        [1, 2.5],
        [2.5, 1],
        [1, True],
        [2**63, 1],
        [-(2**63), 2**63 - 1],
        [float("nan"), float("inf")],
        [1, None],
        [np.int64(1), np.float32(2)],
        ["a", 1],
    ],
)
def test_disagreements_one_by_one(samples: Any) -> None:
    assert_same(samples)
    assert_same([{"deep": (sample,)} for sample in samples])


def test_rows_of_a_memory_map_and_arrays_that_cannot_be_written_to(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.arange(12).reshape(4, 3))
    rows = np.load(tmp_path / "rows.npy", mmap_mode="r")
    assert_same([rows[0], rows[2]])
    merged = collate_samples([rows[0], rows[2]])
    merged += 1
    assert merged.tolist() == [[1, 2, 3], [7, 8, 9]]


def test_arrays_that_run_backwards_are_copied_like_others() -> None:
    """torch refuses negative strides, such as those of a flipped image."""
    assert collate_samples([np.arange(3)[::-1], np.arange(3)]).tolist() == [[2, 1, 0], [0, 1, 2]]


def test_a_batch_shares_no_memory_with_its_samples() -> None:
    samples = [np.zeros(2)]
    collate_samples(samples)[0, 0] = 1
    assert samples[0][0] == 0


def test_types_that_somebody_adds_to_torchs_registry_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch documents that its registry may be changed in place."""
    monkeypatch.setitem(torchs.default_collate_fn_map, int, lambda batch, collate_fn_map: sum(batch) + 1)
    assert collate_samples([{"a": 2}, {"a": 3}]) == {"a": 6}

"""Check that a stateful object resumes exactly."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import torch


class Stateful(Protocol):
    """An iterable with a saveable position."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> None: ...


def _take(thing: Any, count: int) -> list[Any]:
    return list(itertools.islice(iter(thing), count))


def assert_resumes_exactly(
    make: Callable[[], Any],
    cuts: Sequence[int],
    *,
    total: int | None = None,
    take: Callable[[Any, int], list[Any]] = _take,
    save: Callable[[Any, int], Any] = lambda thing, taken: thing.state_dict(),
    load: Callable[[Any, Any], None] = lambda thing, state: thing.load_state_dict(state),
) -> list[Any]:
    """Check that interruptions at `cuts` do not change the sequence.

    Each cut is the number of items that one object yields before it is saved and discarded. 0 saves again right after
    loading. After the last cut the rest is taken.

    Args:
        make: creates a new object, as a restarted program would.
        cuts: items taken from each object but the last.
        total: how many items are compared; None: all items of `make()`, which must be finite.
        take: (object, count) -> the next `count` items, fewer at the end. It may span several epochs; the default
            iterates once.
        save: (object, items it has yielded) -> state. The state is copied the way a checkpoint stores it (torch.save,
            weights_only).
        load: (object, state).

    Returns:
        The sequence.
    """
    whole = take(make(), 10**9 if total is None else total)
    resumed: list[Any] = []
    thing = make()
    for cut in cuts:
        taken = take(thing, min(cut, len(whole) - len(resumed)))
        resumed += taken
        state = through_a_file(save(thing, len(taken)))
        thing = make()
        load(thing, state)
    resumed += take(thing, len(whole) - len(resumed))
    assert_same(resumed, whole)
    if total is None:
        assert take(thing, 0) == []
    return whole


def through_a_file(state: Any) -> Any:
    """Return the state as a checkpoint restores it. Loading it must not run code."""
    import io

    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def assert_same(found: Iterable[Any], expected: Iterable[Any]) -> None:
    """Check that sequences are equal bit for bit, including tensors and arrays inside dictionaries and sequences."""
    found, expected = list(found), list(expected)
    assert len(found) == len(expected), f"{len(found)} items, expected {len(expected)}"
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert _equal(one, other), f"item {i}: {one!r} is not {other!r}"


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)

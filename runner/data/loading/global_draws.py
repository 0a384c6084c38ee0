"""Draws of a dataset from the global generators of Python, numpy and torch, which most libraries of transforms use.

What such a draw returns depends on all draws before it in the same process. `seed` before each sample, and `put_back`
after the batch, make it depend on the sample alone, and keep the generators of the training where they were. Watching
for draws costs as much as seeding three samples, and a batch in which one is found would have to be fetched again.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch

logger = logging.getLogger(__name__)

GlobalState = tuple[Any, Any, Any]
T = TypeVar("T")

# Why samples depend on more than themselves, and what to do instead.
OF_A_STREAM = (
    "its samples will differ if the number of workers changes; draw from a generator that its state_dict holds"
)
OF_A_STREAM_IN_WORKERS = OF_A_STREAM.replace(";", " or the run is resumed;")
OF_A_BATCH = (
    "its samples will differ if the batch size or the number of ranks changes; draw from runner.data.sample_rng(at)"
)
UNANNOUNCED = "its samples will differ if the run is resumed; remove draws_nothing or prefetch from the dataset"


def draws_nothing(thing: Any) -> bool:
    """Whether a dataset or a collate function says that it draws from none of the global generators.

    A dataset that a thread may read says so by that: the thread would draw from the generators of the training.
    """
    return bool(getattr(thing, "draws_nothing", False)) or getattr(thing, "prefetch", None) == "thread"


def global_state() -> GlobalState:
    """The states of the three global generators."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def put_back(state: GlobalState) -> None:
    """Undo every draw since `state` was taken."""
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])


def seed(key: int) -> None:
    """Seed the global generators from the 64-bit key of a sample.

    numpy's and torch's are the same generator, which begins with 32 bits: each has other ones.
    """
    random.seed(key)
    np.random.seed(key >> 32)
    torch.default_generator.manual_seed(key & 0xFFFFFFFF)


class Generators:
    """Global generators of a thing's own: those of this process are exchanged for them while it draws."""

    def __init__(self, key: int) -> None:
        self._key = key
        self._state: GlobalState | None = None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Until the block ends; the next block continues where it did."""
        outside = global_state()
        if self._state is None:
            seed(self._key)
        else:
            put_back(self._state)
        try:
            yield
        finally:
            self._state = global_state()
            put_back(outside)


def drawn_from(before: GlobalState) -> str:
    """The names of the generators that have moved since `before`; empty if none has."""
    after = global_state()
    moved = {
        "random": before[0] != after[0],
        "numpy.random": before[1][2:] != after[1][2:] or not np.array_equal(before[1][1], after[1][1]),
        "torch": not torch.equal(before[2], after[2]),
    }
    return ", ".join(name for name, has_moved in moved.items() if has_moved)


def watched(fetch: Callable[[], T]) -> tuple[T, str]:
    """What `fetch` returns, and what it has drawn from."""
    before = global_state()
    return fetch(), drawn_from(before)


_warned: set[tuple[type, str]] = set()


def warn(dataset: Any, generators: str, consequence: str) -> None:
    """Say once, if there are any `generators`, that what a dataset draws from them depends on more than the sample."""
    if not generators or (type(dataset), generators) in _warned:
        return
    _warned.add((type(dataset), generators))
    logger.warning("%s draws from the global generator of %s: %s", type(dataset).__name__, generators, consequence)

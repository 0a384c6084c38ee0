"""Draws of a dataset from the global generators of Python, numpy and torch.

What such a draw returns depends on all draws before it in the same process, so on the workers, and on where a run was
resumed. `SeededSamples` makes it depend on the sample alone. Where that cannot be done, `warn` says so.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch

from runner.data.loading.randomness import current

logger = logging.getLogger(__name__)

GlobalState = tuple[Any, Any, Any]
T = TypeVar("T")


def global_state() -> GlobalState:
    """The states of the three global generators."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def drawn_from(before: GlobalState) -> str:
    """The names of the generators that have moved since `before`; empty if none has."""
    after = global_state()
    moved = {
        "random": before[0] != after[0],
        "numpy.random": before[1][2:] != after[1][2:] or not np.array_equal(before[1][1], after[1][1]),
        "torch": not torch.equal(before[2], after[2]),
    }
    return ", ".join(name for name, has_moved in moved.items() if has_moved)


def seed_sample() -> None:
    """Seed the global generators from the key of the sample that is being fetched."""
    keys = current.keys
    if callable(keys):
        keys = current.keys = keys()
    assert keys is not None
    key = int(keys[current.at])
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key)


class SeededSamples:
    """Fetches in a worker process such that draws from the global generators depend on the sample alone.

    A dataset that has never drawn is only watched. The batch in which it first draws is fetched again, and from then on
    the generators are seeded before each sample.
    """

    def __init__(self) -> None:
        self.draws = False

    def fetch(self, fetch: Callable[[Callable[[], None] | None], Any]) -> Any:
        """What `fetch(before_sample)` returns."""
        if not self.draws:
            before = global_state()
            batch = fetch(None)
            if not drawn_from(before):
                return batch
            self.draws = True
        return fetch(seed_sample)


def watched(fetch: Callable[[], T]) -> tuple[T, str]:
    """What `fetch` returns, and what it has drawn from."""
    before = global_state()
    return fetch(), drawn_from(before)


_warned: set[tuple[type, str]] = set()


def warn(dataset: Any, generators: str, workers: bool) -> None:
    """Say once, if there are any `generators`, that what a dataset draws from them depends on more than the sample."""
    if not generators or (type(dataset), generators) in _warned:
        return
    _warned.add((type(dataset), generators))
    logger.warning(
        "%s draws from the global generator of %s: its samples will differ if the number of workers changes%s; draw "
        "from runner.data.sample_rng() in a map-style dataset, in a stream from a generator that its state_dict holds",
        type(dataset).__name__, generators, " or the run is resumed" if workers else "",
    )  # fmt: skip

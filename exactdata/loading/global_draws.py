"""Draws of a dataset from the global generators of Python, numpy and torch, which most libraries of transforms use.

What such a draw returns depends on all draws before it in the same process. `generators.seed` before each sample, and
`put_back` after the batch, make it depend on the sample alone, and keep the generators of the training where they were.
Watching for draws costs as much as seeding three samples, and a batch in which one is found would have to be fetched
again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from exactdata.generators import drawn_from, states

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Why samples depend on more than themselves, and what to do instead.
OF_A_STREAM = (
    "its samples will differ if the number of workers changes; draw from a generator that its state_dict holds"
)
OF_A_STREAM_IN_WORKERS = OF_A_STREAM.replace(";", " or the run is resumed;")
OF_A_BATCH = (
    "its samples will differ if the batch size or the number of ranks changes; draw from exactdata.sample_rng(at)"
)
UNANNOUNCED = "its samples will differ if the run is resumed; remove draws_nothing or prefetch from the dataset"


def draws_nothing(thing: Any) -> bool:
    """Whether a dataset or a collate function says that it draws from none of the global generators.

    A dataset that a thread may read says so by that: the thread would draw from the generators of the training.
    """
    return bool(getattr(thing, "draws_nothing", False)) or getattr(thing, "prefetch", None) == "thread"


def watched(fetch: Callable[[], T]) -> tuple[T, str]:
    """What `fetch` returns, and what it has drawn from."""
    before = states()
    return fetch(), drawn_from(before)


_warned: set[tuple[type, str]] = set()


def warn(dataset: Any, generators: str, consequence: str) -> None:
    """Say once, if there are any `generators`, that what a dataset draws from them depends on more than the sample."""
    if not generators or (type(dataset), generators) in _warned:
        return
    _warned.add((type(dataset), generators))
    logger.warning("%s draws from the global generator of %s: %s", type(dataset).__name__, generators, consequence)

"""Handle draws of a dataset from the global generators of Python, numpy and torch, which most transform libraries use.

Such a draw depends on all earlier draws in the same process. `generators.seed` before each sample and `put_back` after
the batch make it depend on the sample alone, and leave the generators of the training unchanged. Watching for draws
costs as much as seeding three samples, and a batch in which a draw is found would have to be fetched again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from exactdata.generators import drawn_from, states

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Why samples depend on more than the sample, and the remedy.
OF_A_STREAM = (
    "its samples will differ if the number of workers changes; draw from a generator that its state_dict holds"
)
OF_A_STREAM_IN_WORKERS = OF_A_STREAM.replace(";", " or the run is resumed;")
OF_A_BATCH = (
    "its samples will differ if the batch size or the number of ranks changes; draw from exactdata.sample_rng(at)"
)
UNANNOUNCED = "its samples will differ if the run is resumed; remove draws_nothing or prefetch from the dataset"


def draws_nothing(thing: Any) -> bool:
    """Check whether a dataset or a collate function promises not to draw from the global generators.

    `prefetch = "thread"` implies the promise, because a thread would draw from the generators of the training.
    """
    return bool(getattr(thing, "draws_nothing", False)) or getattr(thing, "prefetch", None) == "thread"


def watched(fetch: Callable[[], T]) -> tuple[T, str]:
    """Return the result of `fetch`, and the names of the generators that it has drawn from."""
    before = states()
    return fetch(), drawn_from(before)


_warned: set[tuple[type, str]] = set()


def warn(dataset: Any, generators: str, consequence: str) -> None:
    """Warn once, if there are any `generators`, that a dataset's draws from them depend on more than the sample."""
    if not generators or (type(dataset), generators) in _warned:
        return
    _warned.add((type(dataset), generators))
    logger.warning("%s draws from the global generator of %s: %s", type(dataset).__name__, generators, consequence)

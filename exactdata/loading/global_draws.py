"""Handle datasets that draw from the global generators of Python, numpy and torch, as most transform libraries do.

Such a draw depends on all earlier draws in the same process. Calling `generators.seed` before each sample, and
`put_back` after the batch, makes it depend only on the sample, and leaves the generators of the training unchanged.
Detecting draws instead would cost as much as seeding three samples, and a batch with a draw would have to be fetched
again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from exactdata.generators import drawn_from, states

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Reason why samples depend on more than the sample index, and the remedy.
OF_A_STREAM = (
    "its samples will differ if the number of workers changes; draw from a generator that its state_dict holds"
)
OF_A_STREAM_IN_WORKERS = OF_A_STREAM.replace(";", " or the run is resumed;")
OF_A_BATCH = (
    "its samples will differ if the batch size or the number of ranks changes; draw from exactdata.sample_rng(at)"
)
UNANNOUNCED = "its samples will differ if the run is resumed; remove draws_nothing or prefetch from the dataset"


def draws_nothing(thing: Any) -> bool:
    """Return whether a dataset or a collate function promises not to draw from the global generators.

    `prefetch = "thread"` implies the promise, because a thread would draw from the generators that the training uses.
    """
    return bool(getattr(thing, "draws_nothing", False)) or getattr(thing, "prefetch", None) == "thread"


def watched(fetch: Callable[[], T]) -> tuple[T, str]:
    """Return the result of `fetch`, and the names of the generators that it has used."""
    before = states()
    return fetch(), drawn_from(before)


_warned: set[tuple[type, str]] = set()


def warn(dataset: Any, generators: str, consequence: str) -> None:
    """Warn once, if `generators` is not empty, that a dataset's draws from them depend on more than the sample."""
    if not generators or (type(dataset), generators) in _warned:
        return
    _warned.add((type(dataset), generators))
    logger.warning("%s draws from the global generator of %s: %s", type(dataset).__name__, generators, consequence)

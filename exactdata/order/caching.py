"""Cache a few values, and drop the oldest. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def cached(cache: dict[K, V], key: K, most: int, make: Callable[[], V]) -> V:
    """Return the value of a key; make it if it is missing, and drop the oldest values beyond `most`.

    A thread that prefetches may look up samples at the same time. Both may then make the value, which must be the same.
    """
    found = cache.get(key)
    if found is None:
        found = make()
        for oldest in list(cache)[: max(0, len(cache) + 1 - most)]:
            cache.pop(oldest, None)
        cache[key] = found
    return found

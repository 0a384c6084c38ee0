"""Cache a limited number of values, and drop the oldest. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def cached(cache: dict[K, V], key: K, most: int, make: Callable[[], V]) -> V:
    """Return the value of a key. If it is missing, create it, and drop the oldest values beyond `most`.

    A prefetching thread may look up samples at the same time. Both threads may then create the value, which must be the
    same.
    """
    found = cache.get(key)
    if found is None:
        found = make()
        for oldest in list(cache)[: max(0, len(cache) + 1 - most)]:
            cache.pop(oldest, None)
        cache[key] = found
    return found

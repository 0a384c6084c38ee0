"""Time functions, for all benchmarks."""

from __future__ import annotations

import time
from collections.abc import Callable


def seconds(action: Callable[[], object]) -> float:
    """Return the seconds that `action` takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start

"""Access the clock. Call these functions through the module (`clock.sleep(1)`), so that a test can replace the clock.

Durations come from `monotonic`. Wall time is for display, because clocks of different machines are never compared.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

monotonic = time.monotonic
"""Seconds from an arbitrary start; never goes back. For deadlines and intervals."""

perf_counter = time.perf_counter
"""Like `monotonic`, with the finest resolution available. For measurements."""

wall = time.time
"""Seconds since 1970, according to this machine."""

sleep = time.sleep
"""Wait for a number of seconds."""


def call_later(seconds: float, function: Callable[[], None]) -> threading.Timer:
    """Call `function` after a number of seconds, in a separate daemon thread."""
    timer = threading.Timer(seconds, function)
    timer.daemon = True
    timer.start()
    return timer

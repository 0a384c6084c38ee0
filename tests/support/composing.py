"""Compose configs for tests with one composer per process, in a quarter of the time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from runner.config.composition import Composed, Composer


@cache
def _composer() -> Composer:
    return Composer()


def compose(overrides: Sequence[str]) -> Composed:
    """Compose as `runner.config.composition.compose` does."""
    return _composer().compose(overrides)

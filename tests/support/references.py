"""Undisturbed runs for comparison. Each is trained once per session, if a test asks for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from runs import Run

Reference = Callable[..., Run]
"""`reference(overrides, ranks=1, **environment)`: the complete run of this config."""


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Return a function that trains uninterrupted runs on demand. Tests do not change its results."""
    made: dict[object, Run] = {}

    def reference(overrides: Sequence[str], ranks: int = 1, **environment: str) -> Run:
        key = (*overrides, ranks, *environment.items())
        if key not in made:
            run = Run(tmp_path_factory.mktemp("reference") / "run", [*overrides], environment, ranks=ranks)
            run.finish()
            made[key] = run
        return made[key]

    return reference

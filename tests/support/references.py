"""Runs that nothing disturbs, to compare with: each is made once per session, and only if a test asks for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from runs import Run

Reference = Callable[..., Run]
"""`reference(overrides, ranks=1, **environment)`: the run of this config from its beginning to its end."""


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Make uninterrupted runs on demand; nobody changes what it returns."""
    made: dict[object, Run] = {}

    def reference(overrides: Sequence[str], ranks: int = 1, **environment: str) -> Run:
        key = (*overrides, ranks, *environment.items())
        if key not in made:
            run = Run(tmp_path_factory.mktemp("reference") / "run", [*overrides], environment, ranks=ranks)
            run.finish()
            made[key] = run
        return made[key]

    return reference

"""Train states of older format versions, brought up to the present one.

Version 1: one `rng` (that of rank 0) for the whole run, no `rng_by_rank`; a manifest without a checksum
of itself. Version 2: `rng_by_rank`, a list with the generators of every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from runner.checkpoint.manifest import READABLE, VERSION
from runner.errors import CheckpointError


def _from_1(state: dict[str, Any]) -> dict[str, Any]:
    """Rank 0 keeps the generators that were saved; other ranks derive theirs, as new ranks do."""
    by_rank = [state["rng"]] if "rng" in state else []
    return {**state, **({"rng_by_rank": by_rank} if by_rank else {}), "version": 2}


MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {1: _from_1}
"""From each older version, the step to the next one."""


def migrate(state: dict[str, Any]) -> dict[str, Any]:
    """A train state of any readable version as one of the present version.

    Raises:
        CheckpointError: its version is unknown.
    """
    version = state.get("version", 1)
    while version != VERSION:
        if version not in MIGRATIONS:
            raise CheckpointError(
                f"train state of format version {version!r} is unknown: this code reads {READABLE[0]} to "
                f"{READABLE[-1]}; use the version of the runner that wrote it"
            )
        state = MIGRATIONS[version](state)
        version = state["version"]
    return state

"""The description of a fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Fault:
    """A fault that the simulation must find.

    Attributes:
        name: a short name in words joined by hyphens.
        scenario: the scenario that must find it.
        what: the wrong behaviour, as a clause for a table.
        told_in: the place that describes the right behaviour: a docstring (`Guard`), a page, a test.
        apply: brings the fault back with `patch.setattr(module, name, value)` or similar, undone afterwards.
    """

    name: str
    scenario: str
    what: str
    told_in: str
    apply: Callable[[pytest.MonkeyPatch], None]

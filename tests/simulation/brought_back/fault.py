"""What a fault is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        name: short, in words joined by hyphens.
        scenario: the one that is to find it.
        what: what is wrong, as a clause for a table.
        told_in: where the right behaviour is described: a docstring (`Guard`), a page, a test.
        apply: brings it back, by `patch.setattr(module, name, value)` and the like, which is undone afterwards.
    """

    name: str
    scenario: str
    what: str
    told_in: str
    apply: Callable[[pytest.MonkeyPatch], None]

"""Faults that this project once had, or nearly had, brought back one at a time, to see that the simulation finds them.

A scenario's faults are the `FAULTS` of the module here with the scenario's name. `python -m brought_back` plays them:
see `__main__`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

import pytest

SCENARIOS = ("lease", "training", "jobs", "custody")


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


def faults(*scenarios: str) -> dict[str, Fault]:
    """The faults of some scenarios, or of all, by name."""
    found: dict[str, Fault] = {}
    for scenario in scenarios or SCENARIOS:
        name = f"{__name__}.{scenario}"
        if find_spec(name) is not None:
            found |= {fault.name: fault for fault in import_module(name).FAULTS}
    return found

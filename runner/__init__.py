"""runner: a Hydra-configured experiment runner for training that may be killed at any moment."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from runner.errors import unchained

if TYPE_CHECKING:
    from runner.api import Run as Run
    from runner.api import compose as compose
    from runner.api import runs as runs
    from runner.api import train as train
    from runner.training.load import Loaded

__version__ = "0.1.0"

# Modules log; who uses them decides where that is shown. Training shows and records warnings.
for _name in (__name__, "exactdata"):
    logging.getLogger(_name).addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    """Import `Run`, `runs`, `compose` and `train` when they are used first."""
    if name in ("Run", "runs", "compose", "train"):
        from runner import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load(run: Any, step: int | str | None = None, device: Any = "cpu", *, raw: bool = False) -> Loaded:
    """The model of a run as a checkpoint has it: `.model`, `.config`, `.step`; see `runner.training.load.load`."""
    from runner.training.load import load as loaded  # not before it is used: torch takes seconds

    with unchained():
        return loaded(run, step, device, raw=raw)

"""Decide whether a run is finished under its current config: all steps are done, or it ended early and still would."""

from __future__ import annotations

import hashlib
from typing import Any

from runner.config.early_stopping import stopped
from runner.config.identity import canonical
from runner.config.schema import Config
from runner.rundir.attempt_log import Finish
from runner.rundir.evaluations import recorded
from runner.rundir.paths import RunDir


def has_finished(run: RunDir, config: Config, finish: Finish | None = None) -> bool:
    """Return whether the run has nothing left to train.

    A run that ended early stays finished as long as its current config would still end it there. Either early stopping
    must still apply to the recorded evaluations, or the callback that stopped the run must have unchanged options.

    Args:
        run: the run directory.
        config: the current config of the run.
        finish: the completion mark of the run. If None, it is read from the run directory.

    Raises:
        OSError: the run's records cannot be read.
    """
    finish = Finish.of(run) if finish is None else finish
    if finish.covers(config.known_steps, config.train.epochs):
        return True
    if finish.early is None:
        return False
    if (name := finish.early.get("callback")) is not None:
        return options_of(config.callbacks.get(name)) == finish.early.get("options")
    return stopped(config.early_stopping, recorded(run)) is not None


def options_of(node: Any) -> str | None:
    """Return a digest of a callback's config node, or None if it does not exist."""
    if not isinstance(node, dict):
        return None
    return hashlib.sha256(canonical(node).encode()).hexdigest()[:16]

"""Decide whether a run has finished by its current config: all steps are done, or an earlier end still holds."""

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
    """Return whether nothing is left to train.

    An end before the last step holds as long as the config still causes it: early stopping by the recorded evaluations,
    or the callback that asked for it, with unchanged options.

    Args:
        run: the run directory.
        config: the current config of the run.
        finish: its completion mark; None: read it.

    Raises:
        OSError: the records cannot be read.
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
    """Return a digest of a callback's node in the config; None if there is none."""
    if not isinstance(node, dict):
        return None
    return hashlib.sha256(canonical(node).encode()).hexdigest()[:16]

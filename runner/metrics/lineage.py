"""Facts about a run that loggers show in addition to metrics: settings, fork, attempts and how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from runner.rundir.evaluations import EVALUATION, results
from runner.rundir.paths import RunDir
from runner.system import files

FINISHED, STOPPED, FAILED = "finished", "stopped", "failed"
"""How an attempt ended: at the last step; by a signal, after a save; by an error."""


@dataclass(frozen=True)
class Fork:
    """The step at which a branch left its trunk.

    Attributes:
        trunk: run directory of the trunk. It may no longer exist.
        step: last step that the branch shares with the trunk.
        digest: the identity of the trunk.
    """

    trunk: RunDir
    step: int
    digest: str

    def logged_as(self, logger: str) -> str | None:
        """Return the id of the trunk in W&B or MLflow, or None if it is unknown."""
        try:
            found = files.read_object(self.trunk.loggers).get(logger)
        except OSError:
            return None
        return found if isinstance(found, str) else None


@dataclass(frozen=True)
class Lineage:
    """Facts about a run at the start of an attempt.

    Attributes:
        settings: the frozen config.
        attempt: number of the attempt, from 1.
        fork: where the run was forked; None if it is not a branch.
        best: `min` or `max` for each metric that decides the best checkpoint.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    attempt: int = 1
    fork: Fork | None = None
    best: Mapping[str, str] = field(default_factory=dict)


class Summary:
    """The last and the best value of each metric in the evaluations so far."""

    def __init__(self, run: RunDir, step: int, best: Mapping[str, str]) -> None:
        self._run, self._best = run, best
        self._last: dict[str, float] = {}
        self._extremes: dict[str, float] = {}
        for record in files.read_lines(run.metrics, having=EVALUATION) if step else ():
            if isinstance(record, dict) and isinstance(record.get("step"), int) and record["step"] <= step:
                self.add(record)

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a record of metrics.jsonl. Records that are not of evaluations are ignored."""
        if "loss" in record:
            return
        for name, value in record.items():
            if isinstance(value, float):
                self._last[name] = value
                how = self._best.get(name, "min" if name.endswith("loss") else "")
                if how:
                    pick = max if how == "max" else min
                    self._extremes[name] = pick(self._extremes.get(name, value), value)

    def values(self) -> dict[str, float]:
        """Return `last/NAME` and `best/NAME`, and `evaluated/NAME` for the highest step of `runner evaluate`."""
        evaluated: dict[str, float] = {}
        with suppress(OSError):
            for record in results(self._run)[-1:]:
                evaluated = {name: value for name, value in record.items() if isinstance(value, float)}
        parts = (("last", self._last), ("best", self._extremes), ("evaluated", evaluated))
        return {f"{kind}/{name}": value for kind, values in parts for name, value in values.items()}

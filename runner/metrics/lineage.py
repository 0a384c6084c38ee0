"""What loggers show of a run beside its numbers: its settings, where it was forked from, its attempts, how it ended."""

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
    """Where a branch left its trunk.

    Attributes:
        trunk: the run directory of the trunk, which may be gone.
        step: the step up to which the branch is the trunk.
        digest: the identity of the trunk.
    """

    trunk: RunDir
    step: int
    digest: str

    def logged_as(self, logger: str) -> str | None:
        """The id of the trunk in W&B or MLflow; None if it is not known."""
        try:
            found = files.read_object(self.trunk.loggers).get(logger)
        except OSError:
            return None
        return found if isinstance(found, str) else None


@dataclass(frozen=True)
class Lineage:
    """What is known of a run at the start of an attempt.

    Attributes:
        settings: the frozen config.
        attempt: number of the attempt, from 1.
        fork: None if the run is no branch.
        best: for metrics that a checkpoint is judged by: `min` or `max`.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    attempt: int = 1
    fork: Fork | None = None
    best: Mapping[str, str] = field(default_factory=dict)


class Summary:
    """The last and the best value of each metric of the evaluations so far."""

    def __init__(self, run: RunDir, step: int, best: Mapping[str, str]) -> None:
        self._run, self._best = run, best
        self._last: dict[str, float] = {}
        self._extremes: dict[str, float] = {}
        for record in files.read_lines(run.metrics, having=EVALUATION) if step else ():
            if isinstance(record, dict) and isinstance(record.get("step"), int) and record["step"] <= step:
                self.add(record)

    def add(self, record: Mapping[str, Any]) -> None:
        """Take a record of metrics.jsonl into account; only those of evaluations count."""
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
        """`last/NAME`, `best/NAME`, and `evaluated/NAME` of the highest step that `runner evaluate` has evaluated."""
        evaluated: dict[str, float] = {}
        with suppress(OSError):
            for record in results(self._run)[-1:]:
                evaluated = {name: value for name, value in record.items() if isinstance(value, float)}
        parts = (("last", self._last), ("best", self._extremes), ("evaluated", evaluated))
        return {f"{kind}/{name}": value for kind, values in parts for name, value in values.items()}

"""Every path of a run; nobody else joins path strings."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunDir:
    """The directory of one run. All truth about a run is in here."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved config, frozen when the run was made; what a later attempt reads."""
        return self.path / "config.yaml"

    @property
    def code(self) -> Path:
        """Commit, diff, package versions and overrides at submission."""
        return self.path / "code.json"

    @property
    def attempt(self) -> Path:
        """The attempt that is under way (or that was killed before it could say how it ended)."""
        return self.path / "attempt.json"

    @property
    def attempts(self) -> Path:
        """One line per ended attempt."""
        return self.path / "attempts.jsonl"

    @property
    def metrics(self) -> Path:
        """One object a step and one an evaluation: only what the run determines, no clock."""
        return self.path / "metrics.jsonl"

    @property
    def timings(self) -> Path:
        """What the machine determines: tokens/s, the cost of saves. Never compared between runs."""
        return self.path / "timings.jsonl"

    @property
    def status(self) -> Path:
        """State, step, last loss, last cause: what `runner.status` shows."""
        return self.path / "status.json"

    @property
    def finished(self) -> Path:
        """The completion mark, written last: the steps the run was finished at."""
        return self.path / "finished.json"

    @property
    def job(self) -> Path:
        """What the launcher knows of the submitted job (id, array task), written by the launcher."""
        return self.path / "job.json"

    @property
    def lease(self) -> Path:
        """Directory of fencing numbers; the highest is the holder."""
        return self.path / "lease"

    @property
    def submission(self) -> Path:
        """The same for the command that submits the run: two shells must not submit it twice."""
        return self.path / "submission"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def checkpoint_steps(self) -> list[int]:
        """The steps of the committed checkpoints, by their names alone, in ascending order."""
        if not self.checkpoints.is_dir():
            return []
        names = (re.fullmatch(r"step_(\d+)", entry.name) for entry in self.checkpoints.iterdir())
        return sorted(int(name[1]) for name in names if name)

    def newest_checkpoint(self) -> tuple[int, float] | None:
        """Step of the newest committed checkpoint, and when it was written (seconds since 1970)."""
        for step in reversed(self.checkpoint_steps()):
            with suppress(OSError):  # it made room for a newer one just now
                return step, (self.checkpoints / f"step_{step:08d}").stat().st_mtime
        return None

    @property
    def order(self) -> Path:
        """What the data order is made from; `runner.inspect` reads it."""
        return self.path / "order.json"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def logs(self) -> Path:
        """Standard output and error of submitted jobs."""
        return self.path / "logs"

    @property
    def loggers(self) -> Path:
        """The ids by which W&B and MLflow know this run."""
        return self.path / "loggers.json"

    @property
    def csv(self) -> Path:
        return self.path / "metrics.csv"

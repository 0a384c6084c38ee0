"""Observe a run from outside through its files. This is cheap enough to poll a thousand times a second."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from runner.rundir import lease
from runner.rundir.paths import RunDir
from runner.system import files

_SAVING = re.compile(r"step_\d+\.tmp-\d+-\d+")


class Watch:
    """Observe one run directory."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self._seen: tuple[int, ...] = ()
        self._records: list[dict[str, Any]] = []

    def last_records(self) -> list[dict[str, Any]]:
        """Return the last record of metrics.jsonl, preceded by the last training step's record if they differ."""
        try:
            with open(self.run.metrics, "rb") as file:
                state = os.fstat(file.fileno())
                seen = state.st_ino, state.st_size, state.st_mtime_ns
                if seen != self._seen:
                    self._records, self._seen = _last_records(file.fileno()), seen
        except FileNotFoundError:
            return []
        return self._records

    def step(self) -> int:
        """Return the number of complete steps, according to metrics.jsonl."""
        return max((int(record["step"]) for record in self.last_records()), default=0)

    def evaluating(self, every: int) -> bool:
        """Return whether an evaluation of a complete step is due but not yet recorded."""
        records = self.last_records()
        return bool(records and every and "loss" in records[-1] and records[-1]["step"] % every == 0)

    def holder(self) -> tuple[int, dict[str, Any]]:
        """Return the fencing number and identity of the lease's holder, or (0, {}) if there is none."""
        number, holder = lease.read_holder(self.run.lease) or (0, {})
        return (0, {}) if holder.get("released") else (number, holder)

    def attempt(self) -> dict[str, Any]:
        """Return the record of the attempt in progress, or an empty dictionary if there is none."""
        return files.read_object(self.run.attempt)

    def saves(self) -> list[Path]:
        """Return the temporary directories of checkpoints that are being written."""
        try:
            names = os.listdir(self.run.checkpoints)
        except FileNotFoundError:
            return []
        return [self.run.checkpoints / name for name in names if _SAVING.fullmatch(name)]

    def renames(self) -> list[Path]:
        """Return the temporary directories from `saves` that have all their files and only lack their final name."""
        return [path for path in self.saves() if os.path.exists(path / "manifest.json")]

    def warnings(self) -> list[str]:
        """Return the errors that this attempt has reported and survived."""
        return list(files.read_object(self.run.status).get("warnings") or [])


def _last_records(fd: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for _, line in files.lines_backwards(fd):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        found.insert(0, record)
        if "loss" in record:
            break
    return found

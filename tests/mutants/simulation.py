"""Use the simulation as one more test, with schedules of the scenarios that reach the changed line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from mutants.changes import Change, modules
from mutants.trial import Copy

SCHEDULES = {"lease": 400, "training": 150, "jobs": 100, "custody": 100}
"""Schedules per scenario and change: half a minute each."""
LOOK = 30
"""Schedules played to record the lines that a scenario reaches."""
SLOWER = 5.0
"""A search that takes this many times as long as usual, plus half a minute, counts as endless."""
SETTINGS = """\
[run]
include = {include}
data_file = {folder}/data
parallel = true
concurrency = greenlet
disable_warnings = no-data-collected, module-not-measured
"""
SEARCH = """\
import json, sys
from time import monotonic
from simulation.search import search
name, schedules = sys.argv[1], int(sys.argv[2])
found = search(name, 1, schedules=schedules)
broken = [[failure.seed, failure.broken] for failure in found.failures.values()]
print(json.dumps({"seconds": found.seconds, "broken": broken}))
"""
REPLAY = """\
import json, sys
from simulation.scenario import play
from simulation.scenarios import find, schedule
kind = find(sys.argv[1])
print(json.dumps({"broken": play(kind, schedule(kind, sys.argv[2])).broken}))
"""


class Simulation:
    """The simulation as a test of changes.

    Args:
        copy: the copy of the project.
        say: called with the progress.
    """

    def __init__(self, copy: Copy, say: Callable[[str], None]) -> None:
        self._copy, self._say = copy, say
        self._reached: dict[str, dict[str, set[int]]] = {}
        self._seconds: dict[str, float] = {}

    def noticed(self, change: Change) -> str | None:
        """Return the schedule that breaks a promise with the change, and the promise, or None.

        A schedule that also breaks it without the change does not count.
        """
        for name, schedules in SCHEDULES.items():
            lines = self._lines(name).get(change.file, set())
            if not (lines if change.at_import else lines.intersection(range(change.lines[0], change.lines[1] + 1))):
                continue
            with self._copy.changed(change):
                found = self._run(SEARCH, name, str(schedules), limit=30 + SLOWER * self._seconds[name])
            if found is None:
                return f"simulation: {name} does not come to its end"
            for seed, broken in found["broken"]:
                if self._run(REPLAY, name, seed, limit=300.0) == {"broken": None}:
                    return f"simulation: {name} {seed}: {broken}"
        return None

    def _lines(self, name: str) -> dict[str, set[int]]:
        """Return the lines that a scenario reaches. Record how long its schedules take without a change."""
        if name not in self._reached:
            self._say(f"which lines does the scenario {name} reach?")
            self._reached[name] = self._look(name)
            found = self._run(SEARCH, name, str(SCHEDULES[name]), limit=1200.0)
            if found is None:
                raise RuntimeError(f"{name} does not come to its end without a change")
            self._seconds[name] = found["seconds"]
            self._say(f"{name}: {SCHEDULES[name]} schedules in {found['seconds']:.0f} s, broken: {found['broken']}")
        return self._reached[name]

    def _look(self, name: str) -> dict[str, set[int]]:
        import coverage

        folder = self._copy.path.parent / "simulation"
        folder.mkdir(exist_ok=True)
        include = ",".join(str(self._copy.path / each) for each in modules(self._copy.path))
        (folder / "settings").write_text(SETTINGS.format(folder=folder, include=include))
        self._run(SEARCH, name, str(LOOK), limit=1200.0, COVERAGE_PROCESS_START=str(folder / "settings"))
        found: dict[str, set[int]] = {}
        for part in folder.glob("data.*"):
            data = coverage.CoverageData(str(part))
            data.read()
            for each in data.measured_files():
                file = Path(each).relative_to(self._copy.path).as_posix()
                found.setdefault(file, set()).update(data.lines(each) or ())
            part.unlink()
        return found

    def _run(self, code: str, *arguments: str, limit: float, **environment: str) -> dict[str, Any] | None:
        """Return the printed JSON. Return None if the code failed or took longer than `limit` seconds."""
        words = [sys.executable, "-c", code, *arguments]
        paths = f"{self._copy.path}:{self._copy.path / 'tests'}"
        settings = {"PYTHONPATH": paths, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", **environment}
        process = subprocess.Popen(
            words,
            cwd=self._copy.path,
            env=os.environ | settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        found: dict[str, Any] | None = json.loads(output) if process.returncode == 0 else None
        return found

"""Check that a Ray Train run resumes with any number of workers after kills, with each sample once per pass."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import (
    EXACT,
    EXAMPLES,
    MIXTURE,
    ROOT,
    SAMPLES,
    SAVE_AT,
    STEPS_AFTER,
    Steps,
    compare,
    logged,
    skip_without,
    undisturbed,
)

skip_without("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

TIMEOUT_S = 500  # Ray needs a minute and a half for each start on a quiet machine
KILL_BEFORE = SAVE_AT + STEPS_AFTER + 1


def run(folder: Path, name: str, workers: int, **settings: Any) -> tuple[int, Steps]:
    """Run the example in a new cluster. Return its exit status, and the steps that all workers have logged."""
    logs = folder / name
    logs.mkdir()
    settings = {"folder": str(folder), "log": str(logs / "log"), "ranks": workers, **settings}
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONPATH": str(ROOT), "TMPDIR": "/tmp"}  # paths of sockets must be short
    environment.pop("RAY_ADDRESS", None)
    with (logs / "output").open("wb") as output:
        command = [sys.executable, str(EXAMPLES / "in_ray.py"), json.dumps(settings)]
        driver = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        status = driver.wait(TIMEOUT_S)
    finally:
        try:
            os.killpg(driver.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        driver.wait()
    assert (logs / f"log.{workers - 1}").exists(), (logs / "output").read_text(errors="replace")[-3000:]
    return status, logged(logs, workers)


@pytest.mark.parametrize(
    ("before", "after", "batch", "settings"),
    [(2, 1, 8, MIXTURE), (1, 2, 4, {})],
    ids=["2 to 1, mixture", "1 to 2, half the batch"],
)
def test_killed_workers_resume_with_another_number_of_them(
    before: int, after: int, batch: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    status, first = run(tmp_path, "killed", before, kill_before=KILL_BEFORE, **settings)
    assert status
    steps = SAVE_AT + (SAMPLES - 8 * SAVE_AT) // batch
    status, second = run(tmp_path, "resumed", after, batch=batch, steps=steps, **settings)
    assert status == 0
    assert compare(first[:SAVE_AT] + second, undisturbed(**settings)) == EXACT


def test_ray_starts_killed_workers_again(tmp_path: Path) -> None:
    status, steps = run(tmp_path, "restarted", 2, kill_before=KILL_BEFORE, restarts=1)
    assert (status, len(steps)) == (0, KILL_BEFORE - 1 + SAMPLES // 8 - SAVE_AT)
    assert compare(steps[:SAVE_AT] + steps[KILL_BEFORE - 1 :], undisturbed()) == EXACT

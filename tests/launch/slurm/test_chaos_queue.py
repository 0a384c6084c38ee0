"""Chaos in the queue of a real cluster: jobs are stopped, killed and cancelled, and nothing is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import PATIENCE, Cluster
from jobs import SLURM, environment
from runs import ROOT, TINY

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def test_stopped_killed_and_cancelled_jobs_end_bit_identical(cluster: Cluster, tmp_path: Path) -> None:
    kinds = ["sigterm", "cancel", "sigkill", "twice"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "runner", "chaos", *TINY, *SLURM, "train.loss._target_=paced.loss"),
            *("train.steps=80", "eval.every_steps=30", f"--kills={len(kinds)}", f"--faults={','.join(kinds)}"),
            *("--json", f"--root={tmp_path / 'root'}"),
        ],
        cwd=ROOT,
        env={**cluster.environment, **environment(STEP_SLEEP_S="0.06")},
        capture_output=True,
        text=True,
        timeout=500 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    result = json.loads(done.stdout)
    assert result["verdict"] == "identical"
    assert sorted(fault["kind"] for fault in result["faults"]) == sorted(kinds)
    assert not cluster.run("squeue", "-h")
    # Slurm is asked once, not fifty times, to start a delayed job at once.
    assert done.stderr.count("no longer pending") <= 3

"""A job that returns to a full disk, where it can record nothing: it is requeued, and given up with a reason."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_slurm import RUNNING, FakeSlurm, row, slurm
from runs import ROOT, TINY

from launch import requeue
from launch.slurm import SlurmLauncher
from runner.config.composition import compose
from runner.rundir.attempt_log import Finish, ended_attempts
from runner.rundir.paths import RunDir

__all__ = ["slurm"]

pytestmark = pytest.mark.slow

SRUN = """\
#!/bin/sh
cd {root}
exec {python} -c 'from launch.job import start; start("{run}", "runner.training.attempt:attempt")'
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 8 MiB."""
    directory = tmp_path / "disk"
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m,mode=755", "tmpfs", str(directory)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a tmpfs is not permitted here")
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True)


def start_job(slurm: FakeSlurm, run: RunDir, restarts: int) -> bool:
    """Start job 12 once. Return whether the batch script requeued it."""
    slurm.shows_job(**{**RUNNING, "Restarts": str(restarts)})
    before = len(slurm.calls("scontrol requeue"))
    job = {"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": str(restarts), "RUNNER_JOB_FOLDER": str(run.logs)}
    script = SlurmLauncher().preview([run.path])
    subprocess.run(["bash", "-c", script], env={**os.environ, **job}, capture_output=True, check=False, timeout=300)
    return len(slurm.calls("scontrol requeue")) > before


def test_job_back_on_a_full_disk_is_requeued_until_there_is_room(slurm: FakeSlurm, disk: Path) -> None:
    composed = compose([*TINY, "train.steps=2", "checkpoint.every_steps=1", f"run.dir={disk / 'run'}"])
    run = RunDir(composed.run_dir)
    run.logs.mkdir(parents=True)
    run.config.write_text(composed.text)
    run.job.write_text(json.dumps({"job_id": "12", "folder": str(run.logs)}))
    requeue_starts = requeue.starts_file(run.logs, "12")
    verdict = f"{run.logs}/12.$SLURM_RESTART_COUNT.verdict"
    (slurm.folder / "srun").write_text(f"#!/bin/sh\ntouch {verdict}\nexit 75\n")
    assert not any(start_job(slurm, run, restarts) for restarts in range(5))  # preempted: a rank requeues the job
    (slurm.folder / "srun").write_text(SRUN.format(root=ROOT, python=sys.executable, run=run.path))
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(shutil.disk_usage(disk).free))

    launcher = SlurmLauncher()
    assert [start_job(slurm, run, restarts) for restarts in (5, 6, 7, 8)] == [True, True, True, False]
    slurm.prints("squeue", row("12", "FAILED", restarts=8))
    assert "No space left on device" in str(launcher.jobs([run.path])[run.path].reason)
    assert ended_attempts(run) == []

    ballast.unlink()
    assert not start_job(slurm, run, 9)
    assert Finish.of(run).steps == 2
    assert [line["cause"] for line in ended_attempts(run)] == ["finished"]
    assert not requeue_starts.exists()

"""The command is killed after Slurm has accepted a job and before recording it: one job remains in the end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import PATIENCE, Cluster
from jobs import COMMON, SLURM, Job, environment, runner
from references import Reference
from runs import ROOT, assert_same_run

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

KILLING = """\
#!/bin/sh
{real} "$@"
case "$*" in {call}*) mkdir {once} 2>/dev/null && kill -KILL $PPID ;; esac
"""


def killed_after(call: str, cluster: Cluster, directory: Path, *arguments: str, **env: str) -> None:
    """Run the command, and kill it as soon as this call of a Slurm command has done its work.

    The job inherits the PATH of the command, and is not killed by its own calls.
    """
    name, _, words = call.partition(" ")
    directory.mkdir()
    real = shutil.which(name, path=cluster.environment["PATH"])
    (directory / name).write_text(KILLING.format(real=real, call=f'"{words}"', once=directory / "once"))
    (directory / name).chmod(0o755)
    path = f"{directory}{os.pathsep}{cluster.environment['PATH']}"
    done = subprocess.run(
        [sys.executable, "-m", "runner", *SLURM, *arguments],
        cwd=ROOT,
        env={**cluster.environment, **environment(**env), "PATH": path},
        capture_output=True,
        text=True,
        timeout=120 * PATIENCE,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


def jobs_of(cluster: Cluster, root: Path, *states: str) -> list[str]:
    """Return the live jobs, or those in these states, that were submitted from below `root`."""
    chosen = f"--states={','.join(states)}" if states else "--states=PD,R,S,CG"
    rows = cluster.run("squeue", "--noheader", "--array", chosen, "--format=%i %o").splitlines()
    return sorted(row.split()[0] for row in rows if str(root) in row)


def test_job_submitted_by_a_killed_command_is_replaced(cluster: Cluster, tmp_path: Path, reference: Reference) -> None:
    """The job runs, but the command had not renamed its files yet, so it could not train."""
    job = Job(tmp_path / "run", [*COMMON, "launcher.nodelist=n1"], cluster=cluster)
    killed_after("sbatch", cluster, tmp_path / "bin", *job.overrides, f"run.dir={job.path}")
    (lost,) = jobs_of(cluster, tmp_path)
    cluster.wait(lambda: jobs_of(cluster, tmp_path, "RUNNING"), 60, "the start of the job that nobody recorded")
    assert not (job.path / "job.json").exists()
    done = runner(cluster, *SLURM, *job.overrides, f"run.dir={job.path}")
    assert done.returncode == 0, done.stderr
    assert f"job {lost} was submitted by a command that could not record it: cancelled" in done.stderr
    assert job.job_id != lost
    assert json.loads((job.path / "job.json").read_text())["submit_time"]  # Slurm named the batch script as its command
    cluster.wait(lambda: jobs_of(cluster, tmp_path) in ([], [job.job_id]), 60, "the end of the cancelled job")
    assert job.ends() == "COMPLETED"
    assert jobs_of(cluster, tmp_path, "CANCELLED") == [lost]
    assert_same_run(job, reference(COMMON))


def test_a_job_that_trains_unrecorded_is_left_alone(cluster: Cluster, tmp_path: Path, reference: Reference) -> None:
    """The command was killed right before job.json: the attempt has recorded which job it is."""
    job = Job(tmp_path / "run", [*COMMON, "launcher.nodelist=n1"], cluster=cluster)
    # It asks for the record of the job right after the submission.
    arguments = [*job.overrides, f"run.dir={job.path}"]
    killed_after("scontrol show job", cluster, tmp_path / "bin", *arguments, **job.hold(20))
    (mine,) = jobs_of(cluster, tmp_path)
    job.wait_for_step(20)
    assert not (job.path / "job.json").exists()
    done = runner(cluster, *SLURM, *job.overrides, f"run.dir={job.path}")
    assert done.returncode == 0, done.stderr
    assert f"running, job {mine}" in done.stdout
    assert jobs_of(cluster, tmp_path) == [mine]
    assert job.row()["state"] == "running"
    job.release()
    cluster.wait(lambda: jobs_of(cluster, tmp_path, "COMPLETED") == [mine], 240, "the end of the run")
    assert_same_run(job, reference(COMMON))


def test_unrecorded_tasks_of_an_array_are_replaced(cluster: Cluster, tmp_path: Path) -> None:
    arguments = ["-m", *COMMON, "seed=1,2", f"run.root={tmp_path / 'runs'}", "+launcher.additional.hold=true"]
    killed_after("sbatch", cluster, tmp_path / "bin", *arguments)
    lost = jobs_of(cluster, tmp_path)
    assert [job_id.partition("_")[2] for job_id in lost] == ["0", "1"]
    done = runner(cluster, *SLURM, *arguments)
    assert done.returncode == 0, done.stderr
    left = jobs_of(cluster, tmp_path)
    assert [job_id.partition("_")[2] for job_id in left] == ["0", "1"]
    assert not set(left) & set(lost)
    assert runner(cluster, *SLURM, *arguments).returncode == 0
    assert jobs_of(cluster, tmp_path) == left
    cluster.run("scancel", *left)

"""Actions of sites and other users on a real cluster: drained nodes, reused ids, defaults, epilogs."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from cluster import Cluster
from jobs import COMMON, SLURM, Job, runner, statuses

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

SHORT = [*COMMON, "train.steps=5", "eval.every_steps=0"]


def test_jobs_that_sbatch_queues_are_submitted(cluster: Cluster, tmp_path: Path) -> None:
    """Request two nodes, one of which is drained: the job waits, and the status explains why."""
    job = Job(tmp_path / "run", [*SHORT, "launcher.nodes=2"], cluster=cluster)
    cluster.run("scontrol", "update", "nodename=n2", "state=drain", "reason=test")
    try:
        job.submit()
        cluster.wait(lambda: job.slurm()["Reason"] not in ("None", "Priority"), 60, "the reason")
        assert job.row()["state"] == "pending"
        again = runner(cluster, *SLURM, *job.overrides, f"run.dir={job.path}")
        assert (again.returncode, f"pending, job {job.job_id}" in again.stdout) == (0, True), again.stderr
    finally:
        cluster.run("scontrol", "update", "nodename=n2", "state=resume")
        cluster.run("scancel", job.job_id)


def test_a_job_with_a_reused_id_is_not_ours(cluster: Cluster, tmp_path: Path) -> None:
    job = Job(tmp_path / "run", SHORT, cluster=cluster)
    held = "+launcher.additional.hold=true"
    ours = job.submit(held)
    assert job.row()["state"] == "pending"
    time.sleep(1.1)  # Slurm's times are whole seconds, and no id comes again within one
    theirs = cluster.run("sbatch", "--parsable", "--hold", "--output=/dev/null", "--wrap=true").strip()
    record = job.path / "job.json"
    recorded = {**json.loads(record.read_text()), "name": "renamed", "submit_time": "2000-01-01T00:00:00"}
    record.write_text(json.dumps(recorded))
    assert job.row()["state"] == "pending"  # its batch script tells
    record.write_text(json.dumps({**recorded, "job_id": theirs}))
    try:
        assert job.row()["state"] == "cancelled"
        assert job.submit(held) not in (ours, theirs)
        assert job.row()["state"] == "pending"
    finally:
        cluster.run("scancel", ours, theirs, job.job_id)


def test_jobs_that_start_without_the_environment_of_the_command(cluster: Cluster, tmp_path: Path) -> None:
    """Set this by a variable, as a site does for all users, and by an option."""
    by_variable, by_option = (Job(tmp_path / name, SHORT, cluster=cluster) for name in ("variable", "option"))
    by_variable.submit(SBATCH_EXPORT="NONE")
    by_option.submit("+launcher.additional.export=NONE")
    for job in (by_variable, by_option):
        assert job.ends() == "COMPLETED", job.log()
        assert job.causes() == ["finished"]


def test_finished_run_needs_neither_epilog_nor_controller(cluster: Cluster, tmp_path: Path) -> None:
    job = Job(tmp_path / "run", SHORT, cluster=cluster)
    command = [*SLURM, *job.overrides, f"run.dir={job.path}"]
    cluster.slow_epilog.touch()
    try:
        waited = runner(cluster, *command, "launcher.wait=true")
        assert waited.returncode == 0, waited.stderr
        assert "finished" in waited.stdout
        assert "5/5" in waited.stdout
        job.wait_for_state("COMPLETING")
        assert job.row()["state"] == "finished"
        assert "finished, all 5 steps" in runner(cluster, *command).stdout
        assert job.slurm()["JobState"] == "COMPLETING"
    finally:
        cluster.slow_epilog.unlink()
    job.wait_for_state("COMPLETED")
    cluster.stop_controller()
    try:
        done = runner(cluster, *command)
        assert (done.returncode, "finished, all 5 steps" in done.stdout) == (0, True), done.stderr
        new = runner(cluster, *SLURM, *job.overrides, f"run.dir={tmp_path / 'new'}")
        assert new.returncode == 2
        assert "Slurm does not answer" in new.stderr
        assert not (tmp_path / "new").exists()
    finally:
        cluster.start_controller()


def test_sweep_above_the_array_limit_is_several_arrays(cluster: Cluster, tmp_path: Path) -> None:
    sweep = [*SLURM, "-m", *SHORT, f"run.root={tmp_path}", "+launcher.additional.hold=true"]
    sweep.append("launcher.array_parallelism=2")
    done = runner(cluster, *sweep, "seed=1,2,3,4,5")  # MaxArraySize is 4
    assert done.returncode == 0, done.stderr
    ids = sorted(json.loads(path.read_text())["job_id"] for path in tmp_path.glob("*/job.json"))
    arrays = {each.partition("_")[0] for each in ids}
    for path in tmp_path.glob("*/job.json"):  # their batch scripts tell
        path.write_text(json.dumps({**json.loads(path.read_text()), "submit_time": "2000-01-01T00:00:00"}))
    try:
        assert (len(ids), len(arrays)) == (5, 2)
        rows = statuses(cluster, tmp_path).values()
        assert {(row["state"], row["job_id"]) for row in rows} == {("pending", each) for each in ids}
        more = runner(cluster, *sweep, "seed=1,2,3,4,5,6")
        assert more.returncode == 0, more.stderr
        (added,) = {json.loads(path.read_text())["job_id"] for path in tmp_path.glob("*/job.json")} - set(ids)
        arrays.add(added)
        dependency = cluster.run("scontrol", "show", "job", added).partition(" Dependency=")[2].split()[0]
        assert dependency.count("afterany:") == 5, dependency  # the limit holds over all submissions
    finally:
        cluster.run("scancel", *arrays)


def test_a_job_that_is_requeued_while_it_is_suspended(cluster: Cluster, tmp_path: Path) -> None:
    job = Job(
        tmp_path / "run",
        [*COMMON, "train.steps=25", "eval.every_steps=0", "checkpoint.every_steps=10"],
        cluster=cluster,
    )
    job.submit(**job.hold(15))
    job.wait_for_step(15)
    cluster.run("scontrol", "suspend", job.job_id)
    assert job.row()["state"] == "suspended"
    cluster.run("scontrol", "requeue", job.job_id)
    job.wait_for_state("PENDING")
    assert job.slurm()["Reason"] == "JobHeldAdmin"  # Slurm itself holds such a job
    cluster.run("scontrol", "release", job.job_id)
    job.wait_for_requeue()
    assert job.ends() == "COMPLETED"
    assert job.causes() == ["requeued", "finished"]


def test_the_status_of_a_held_job_explains_its_release(cluster: Cluster, tmp_path: Path) -> None:
    """The reason has spaces in squeue."""
    job = Job(tmp_path / "run", COMMON, cluster=cluster)
    job.submit()
    job.wait_for_state("RUNNING")
    cluster.run("scontrol", "requeuehold", job.job_id)
    job.wait_for_state("PENDING")
    try:
        assert job.row()["reason"].endswith(f"`scontrol release {job.job_id}`")
    finally:
        cluster.run("scancel", job.job_id)


def test_a_setup_that_reaches_the_time_limit_is_not_repeated(cluster: Cluster, tmp_path: Path) -> None:
    job = Job(tmp_path / "run", [*COMMON, "launcher.setup=['sleep 1000']"], cluster=cluster)
    job.submit()
    job.wait_for_state("RUNNING")
    job.ends_in(2)
    job.wait_for_state("TIMEOUT")
    row = job.row()
    assert (row["state"], "increase launcher.time" in row["reason"]) == ("failed", True)

"""Jobs of several tasks, sweeps and lost nodes on a real cluster."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from cluster import PATIENCE, Cluster
from jobs import (
    COMMON,
    SLURM,
    STEPS,
    Job,
    environment,
    preempt,
    runner,
    statuses,
)
from runs import ROOT, Run, assert_same_run

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def test_two_nodes_preempted_twice_no_step_is_lost(cluster: Cluster, tmp_path: Path, reference_of_two: Run) -> None:
    job = Job(tmp_path / "run", [*COMMON, "launcher.nodes=2"], cluster=cluster)
    job.submit(**job.hold(30))
    for step in (30, 60):
        job.wait_for_step(step)
        preempt(cluster, "n1", "n2")
        job.wait_for_requeue()
    assert job.ends() == "COMPLETED"
    assert job.causes() == ["preempted", "preempted", "finished"]
    assert job.steps_lost() == 0
    assert job.row()["state"] == "finished"
    assert_same_run(job, reference_of_two)


def test_preempted_while_one_of_two_nodes_is_slow_to_answer(
    cluster: Cluster, tmp_path: Path, reference_of_two: Run
) -> None:
    """Until every node has acknowledged the signal, the state is SIGNALING, not RUNNING: yet it is preempted."""
    job = Job(tmp_path / "run", [*COMMON, "launcher.nodes=2"], cluster=cluster)
    job.submit(**job.hold(30))
    job.wait_for_step(30)
    cluster.stop_node("n2", signal.SIGSTOP)
    try:
        preemption = threading.Thread(target=preempt, args=(cluster, "n1", "n2"))
        preemption.start()
        cluster.wait(lambda: job.slurm()["JobState"] == "SIGNALING", 30, "the signal")
        cluster.wait(lambda: "cause" in job.under_way(), 30, "the cause")
    finally:
        cluster.stop_node("n2", signal.SIGCONT)
    preemption.join()
    job.wait_for_requeue()
    assert job.ends() == "COMPLETED"
    assert job.causes() == ["preempted", "finished"]
    assert job.steps_lost() == 0
    assert_same_run(job, reference_of_two)


def test_a_rank_that_is_killed_ends_the_job_and_it_is_requeued(
    cluster: Cluster, tmp_path: Path, reference_of_two: Run
) -> None:
    overrides = [*COMMON, "launcher.tasks_per_node=2", "checkpoint.every_steps=10"]
    job = Job(tmp_path / "run", overrides, cluster=cluster)
    job.submit(**job.hold(35))
    job.wait_for_step(35)
    for process in job.processes(rank=1):
        process.kill()
    job.wait_for_state("PENDING", timeout_s=60)
    assert job.row()["state"] == "requeued"
    job.wait_for_requeue()
    assert job.ends() == "COMPLETED"
    first, last = job.causes()
    assert first in ("killed", "crash")
    assert last == "finished"
    assert job.steps_lost() <= 20
    assert_same_run(job, reference_of_two)


def test_a_lost_node_is_replaced_and_the_superseded_attempt_writes_nothing_more(
    cluster: Cluster, tmp_path: Path, reference: Run
) -> None:
    overrides = [*COMMON, "checkpoint.every_steps=10", "launcher.nodelist=null"]
    job = Job(tmp_path / "run", overrides, cluster=cluster)
    # So slow that the superseded attempt cannot finish before Slurm notices that the node is lost.
    job.submit(STEP_SLEEP_S="1.0", RESTARTED_SLEEP_S="0.05")
    job.wait_for_step(12)
    node = job.slurm()["NodeList"]
    superseded = job.processes()
    assert superseded
    try:
        cluster.stop_node(node)  # its tasks keep running, as on a node that lost its network
        job.wait_for_requeue(timeout_s=90)
        assert job.slurm()["NodeList"] != node
        assert job.ends() == "COMPLETED"
    finally:
        cluster.start_node(node)
    assert job.causes() == ["node failure", "finished"]
    assert_same_run(job, reference)
    cluster.wait(lambda: not any(process.is_running() for process in superseded), 30, "the superseded attempt")
    cluster.wait(lambda: set(cluster.run("sinfo", "-h", "-p", "low", "-o", "%T").split()) == {"idle"}, 60, "the node")


def test_preempted_in_the_middle_of_a_save(cluster: Cluster, tmp_path: Path, reference: Run) -> None:
    overrides = [*COMMON, "checkpoint.every_steps=8", "checkpoint.mode=sync", "launcher.nodelist=n1"]
    job = Job(tmp_path / "run", overrides, cluster=cluster)
    # Saves take nearly all of the time.
    job.submit(FSYNC_SLEEP_S="0.3", **job.hold(STEPS))
    for step in (10, 30):
        job.wait_for_step(step)
        cluster.wait(lambda: any(tmp_path.glob("run/checkpoints/*tmp-*")), 30, "a save under way")
        preempt(cluster, "n1")
        job.wait_for_requeue()
    assert job.ends() == "COMPLETED"
    assert job.causes() == ["preempted", "preempted", "finished"]
    assert job.steps_lost() == 0
    assert_same_run(job, reference)


def test_a_sweep_of_which_some_runs_are_preempted_and_whose_command_is_rerun(cluster: Cluster, tmp_path: Path) -> None:
    root = tmp_path / "outputs"
    sweep = ["-m", *COMMON, "seed=1,2,3", f"run.root={root}"]
    submit = [*SLURM, *sweep, "checkpoint.every_steps=10"]
    whole = Run(tmp_path / "sweep", [])
    done = runner(cluster, *submit, **whole.hold(15))  # and none of them ends before it is released
    assert done.returncode == 0, done.stderr
    jobs = [Job(path.parent, [], cluster=cluster) for path in sorted(root.glob("*/config.yaml"))]
    assert len({job.job_id.partition("_")[0] for job in jobs}) == 1
    assert all(job.job_id in done.stdout for job in jobs)
    # Rerun while the jobs are live: left alone.
    before = [job.job_id for job in jobs]
    done = runner(cluster, *submit)
    assert done.returncode == 0, done.stderr
    assert [job.job_id for job in jobs] == before
    for job in jobs:
        job.wait_for_step(15)
    # The last task's job id is also that of the array, and must not stand for all of its tasks.
    node = max(jobs, key=lambda job: job.job_id).slurm()["NodeList"]
    preempted = [job for job in jobs if job.slurm()["NodeList"] == node]
    assert 0 < len(preempted) < len(jobs)
    preempt(cluster, node)
    for job in preempted:
        job.wait_for_requeue()
    whole.release()
    assert {job.ends() for job in jobs} == {"COMPLETED"}
    for job in jobs:
        assert job.causes() == (["preempted", "finished"] if job in preempted else ["finished"])
        assert job.steps_lost() == 0
    assert {row["state"] for row in statuses(cluster, root).values()} == {"finished"}
    # Rerun after they finished: nothing to do.
    done = runner(cluster, *submit)
    assert done.returncode == 0, done.stderr
    assert [job.job_id for job in jobs] == before
    _compare_with_a_local_sweep(jobs, tmp_path / "local")


def _compare_with_a_local_sweep(jobs: list[Job], root: Path) -> None:
    sweep = ["-m", *COMMON, "seed=1,2,3", f"run.root={root}", "launcher.slots=2"]
    done = subprocess.run(
        [sys.executable, "-m", "runner", *sweep],
        cwd=ROOT,
        env={**environment(), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for job in jobs:
        assert_same_run(job, Run(root / job.path.name, []))


def test_a_failed_run_of_a_sweep_is_named_and_resubmitted_if_asked(cluster: Cluster, tmp_path: Path) -> None:
    root, fault = tmp_path / "outputs", tmp_path / "fault"
    fault.write_text("fail")
    submit = [*SLURM, "-m", *COMMON, "train.steps=20", "eval.every_steps=0", "+train.loss.fail_at=0,5"]
    submit.append(f"run.root={root}")
    assert runner(cluster, *submit, FAIL_FILE=str(fault)).returncode == 0
    jobs = [Job(path.parent, [], cluster=cluster) for path in sorted(root.glob("*/config.yaml"))]
    array = jobs[0].job_id.partition("_")[0]
    assert sorted(job.ends() for job in jobs) == ["COMPLETED", "FAILED"]
    rows = statuses(cluster, root)
    assert sorted(row["state"] for row in rows.values()) == ["failed", "finished"]
    (failed,) = [name for name, row in rows.items() if row["state"] == "failed"]
    assert "failed on purpose" in rows[failed]["reason"]
    done = runner(cluster, *submit)
    assert done.returncode == 1
    assert failed in done.stdout
    assert "launcher.retry_failed=true" in done.stdout
    assert {job.job_id.partition("_")[0] for job in jobs} == {array}
    fault.unlink()
    assert runner(cluster, *submit, "launcher.retry_failed=true").returncode == 0
    (again,) = [job for job in jobs if job.path.name == failed]
    assert again.ends() == "COMPLETED"
    assert {row["state"] for row in statuses(cluster, root).values()} == {"finished"}


def test_wait_shows_the_run_until_it_is_finished(cluster: Cluster, tmp_path: Path) -> None:
    submit = [
        *SLURM,
        *COMMON,
        "train.steps=10",
        "eval.every_steps=0",
        "launcher.wait=true",
        f"run.dir={tmp_path / 'run'}",
    ]
    done = runner(cluster, *submit)
    assert done.returncode == 0, done.stderr
    assert "finished" in done.stdout
    assert "10/10" in done.stdout


def test_the_doctor_reports_on_the_cluster(cluster: Cluster, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "runner", "doctor", *SLURM, *COMMON, f"run.root={tmp_path}"]
    options = {"cwd": ROOT, "env": {**cluster.environment, **environment()}, "timeout": 120 * PATIENCE}
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    for words in (
        "partition low",
        "preemption: REQUEUE",
        "rename and fsync work",
        "the grace time of a preemption",
        "a checkpoint has",
    ):
        assert words in done.stdout
    assert list(tmp_path.iterdir()) == []

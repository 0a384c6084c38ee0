"""Jobs of several tasks, sweeps and lost nodes on a real cluster."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path

import pytest
from cluster import Cluster
from jobs import (
    COMMON,
    SLURM,
    STEPS,
    Job,
    preempt,
    runner,
    statuses,
)
from references import Reference
from runs import Run, assert_same_run

from runner.config import frozen

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def test_two_nodes_preempted_twice_no_step_is_lost(cluster: Cluster, tmp_path: Path, reference: Reference) -> None:
    """Preempt in the middle of a save, and while one of the nodes is slow to answer.

    Until every node has acknowledged the signal, the state is SIGNALING, not RUNNING: yet the job is preempted.
    """
    overrides = [*COMMON, "launcher.nodes=2", "checkpoint.every_steps=16", "checkpoint.mode=sync"]
    job = Job(tmp_path / "run", overrides, cluster=cluster)
    job.submit(FSYNC_SLEEP_S="0.15", **job.hold(STEPS))  # saves take nearly all of the time
    cluster.wait(lambda: any(job.path.glob("checkpoints/step_00000016.tmp-*")), 180, "a save under way")
    preempt(cluster, "n1", "n2")
    job.hold(2)
    job.wait_for_requeue()
    cluster.wait(job.idles, 180, "the second attempt")
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
    assert job.causes() == ["preempted", "preempted", "finished"]
    assert job.steps_lost() == 0
    assert job.row()["state"] == "finished"
    assert_same_run(job, reference(COMMON, ranks=2))


def test_lost_node_is_replaced_and_the_old_attempt_is_fenced(
    cluster: Cluster, tmp_path: Path, reference: Reference
) -> None:
    overrides = [*COMMON, "checkpoint.every_steps=10", "launcher.nodelist=null"]
    job = Job(tmp_path / "run", overrides, cluster=cluster)
    job.submit(**job.hold(12))
    job.wait_for_step(12)
    node = job.slurm()["NodeList"]
    superseded = job.processes()
    assert superseded
    try:
        cluster.stop_node(node)  # its tasks keep running, as on a node that lost its network
        # Slurm does this once the node has not answered for SlurmdTimeout.
        cluster.run("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")
        job.wait_for_requeue()
        assert job.slurm()["NodeList"] != node
        assert job.ends() == "COMPLETED"
    finally:
        cluster.start_node(node)  # ReturnToService: it is up as soon as it has registered
    assert job.causes() == ["node failure", "finished"]
    assert_same_run(job, reference(COMMON))
    cluster.wait(lambda: not any(process.is_running() for process in superseded), 30, "the superseded attempt")
    cluster.wait(lambda: set(cluster.run("sinfo", "-h", "-p", "low", "-o", "%T").split()) == {"idle"}, 60, "the node")


def test_preempted_sweep_whose_command_is_rerun_finishes(
    cluster: Cluster, tmp_path: Path, reference: Reference
) -> None:
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
    # The last task's job id is also the array's id, and must not mean all of its tasks.
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
    for job in jobs:
        assert_same_run(job, reference([*COMMON, f"seed={frozen.load(job.path).seed}"]))


def test_failed_run_of_a_sweep_is_resubmitted_if_asked(cluster: Cluster, tmp_path: Path) -> None:
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


def test_the_doctor_reports_on_the_cluster(cluster: Cluster, tmp_path: Path) -> None:
    """A range beyond the existing nodes is no error: Slurm assigns the nodes that exist."""
    sizes = ["sampler=elastic", "train.batch_size=2", "train.global_batch_size=16"]
    options = ["launcher.nodes=1-3", "launcher.tasks_per_node=2", f"run.root={tmp_path}", "--json"]
    done = runner(cluster, "doctor", *SLURM, *COMMON, *sizes, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    found = "\n".join(finding["text"] for finding in answer["findings"])
    for words in (
        "partition low",
        "preemption: REQUEUE",
        "rename and fsync work",
        "the grace time of a preemption",
        "a checkpoint has",
        "Slurm would accept this job",
    ):
        assert words in found
    shown = [(row["nodes"], row["ranks"], row["micro_batches"]) for row in answer["sizes"]]
    assert shown == [(1, 2, 4), (2, 4, 2), (3, 6, 2)]
    assert all(row["memory"] > 0 for row in answer["sizes"])
    assert list(tmp_path.iterdir()) == []

"""How long a job of a real cluster waits in the queue or is held back, compared with the test's clock.

Slurm's times are in whole seconds. It decides when a job starts, so a wait is bounded from below by the test's
actions and from above by its observations.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from cluster import Cluster
from jobs import COMMON, Job, preempt

from runner.report.runs import read_run
from runner.rundir.paths import RunDir

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
ROUNDING_S = 1.0  # each of the two Slurm times is at most a second too early


def waited(job: Job, attempt: int = 0) -> tuple[float, float]:
    """Return the seconds in the queue and held back, as an attempt has recorded them."""
    record = job.attempts()[attempt]
    return record["queue_s"], record["hold_s"]


def test_waiting_for_nodes_differs_from_being_held_back(cluster: Cluster, tmp_path: Path) -> None:
    """One job is behind another, one is held by its user, and one may not start before a time."""
    whole_node = ["--nodelist=n1", "--exclusive", "--output=/dev/null", "--wrap=sleep 600"]
    other = cluster.run("sbatch", "--parsable", "--partition=low", *whole_node).strip()
    began, submitted, seen, jobs = {}, {}, {}, {}
    for name, node, *option in (
        ("behind", "n1"),
        ("held", "n2", "+launcher.additional.hold=true"),
        ("begins", "n2", "+launcher.additional.begin=now+6"),
    ):
        short = [*COMMON, "train.steps=5", "eval.every_steps=0", f"launcher.nodelist={node}"]
        jobs[name] = Job(tmp_path / name, short, cluster=cluster)
        began[name] = time.time()
        jobs[name].submit(*option)
        submitted[name] = time.time()
    time.sleep(5)
    assert jobs["behind"].row()["state"] == "pending"
    released = time.time()
    cluster.run("scancel", other)
    cluster.run("scontrol", "release", jobs["held"].job_id)
    for name, job in jobs.items():
        job.wait_for_step(1)
        seen[name] = time.time()
    assert {job.ends() for job in jobs.values()} == {"COMPLETED"}
    for name, job in jobs.items():
        assert sum(waited(job)) <= seen[name] - began[name] + ROUNDING_S
    queue_s, hold_s = waited(jobs["behind"])
    assert queue_s >= released - submitted["behind"] - ROUNDING_S
    assert hold_s <= ROUNDING_S
    assert waited(jobs["held"])[1] >= released - submitted["held"] - ROUNDING_S
    assert waited(jobs["begins"])[1] >= 6.0 - ROUNDING_S


def test_every_restart_has_its_own_wait(cluster: Cluster, tmp_path: Path) -> None:
    """The two minutes after a requeue are held back, and no second of an earlier start is counted again."""
    job = Job(tmp_path / "run", [*COMMON, "launcher.nodelist=n1"], cluster=cluster)
    began = time.time()
    script = job.path.with_name("began")
    job.submit(f"launcher.setup=['date +%s >> {script}','sleep 2']", **job.hold(20))
    job.wait_for_step(20)
    before = time.time()
    preempt(cluster, "n1")
    job.wait_for_state("PENDING")
    time.sleep(3)
    job.wait_for_requeue()
    restarted = time.time()
    assert job.ends() == "COMPLETED"
    ended = time.time()
    first, second = job.attempts()
    assert first["queue_s"] + first["hold_s"] <= before - began + ROUNDING_S
    assert 3 - ROUNDING_S <= second["queue_s"] + second["hold_s"] <= restarted - before + ROUNDING_S
    for attempt, batch_began in zip((first, second), script.read_text().split(), strict=True):
        assert attempt["seconds"]["start"] >= attempt["started"] - float(batch_began) - ROUNDING_S
    whole = read_run(RunDir(job.path), job.path.parent, 100).seconds
    # Only the time before the batch script and after the record of the end is in no bucket.
    assert 4 < sum(whole.values()) <= ended - began + 4 * ROUNDING_S

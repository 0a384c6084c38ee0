"""How long a job waits in the queue of a real cluster, and is held back: compared with the test's own clock.

Slurm's times are in whole seconds. It decides when a job starts, so a wait is bounded from below by what the test did
and from above by what the test saw.
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
ROUNDING_S = 1.0  # each of two times of Slurm's is a second too early at most


@pytest.fixture
def job(cluster: Cluster, tmp_path: Path) -> Job:
    return Job(tmp_path / "run", [*COMMON, "launcher.nodelist=n1"], cluster=cluster)


def waited(job: Job, attempt: int = 0) -> tuple[float, float]:
    """Seconds in the queue, and held back, as an attempt has recorded them."""
    record = job.attempts()[attempt]
    return record["queue_s"], record["hold_s"]


def test_behind_another_job_it_waits_in_the_queue(job: Job, cluster: Cluster) -> None:
    whole_node = ["--nodelist=n1", "--exclusive", "--output=/dev/null", "--wrap=sleep 600"]
    other = cluster.run("sbatch", "--parsable", "--partition=low", *whole_node).strip()
    began = time.time()
    job.submit()
    submitted = time.time()
    time.sleep(5)
    assert job.row()["state"] == "pending"
    freed = time.time()
    cluster.run("scancel", other)
    job.wait_for_step(1)
    seen = time.time()
    assert job.ends() == "COMPLETED"
    queue_s, hold_s = waited(job)
    assert freed - submitted - ROUNDING_S <= queue_s <= seen - began + ROUNDING_S
    assert hold_s <= ROUNDING_S


@pytest.mark.parametrize("option", ["hold=true", "begin=now+6"])
def test_until_it_may_start_it_is_held_back(job: Job, cluster: Cluster, option: str) -> None:
    began = time.time()
    job.submit(f"+launcher.additional.{option}")
    submitted = time.time()
    time.sleep(6)
    released = time.time()
    if option == "hold=true":
        cluster.run("scontrol", "release", job.job_id)
    job.wait_for_step(1)
    seen = time.time()
    assert job.ends() == "COMPLETED"
    queue_s, hold_s = waited(job)
    assert min(released - submitted, 6.0) - ROUNDING_S <= hold_s
    assert queue_s + hold_s <= seen - began + ROUNDING_S


def test_every_restart_has_its_own_wait_and_its_time_begins_with_the_batch_script(job: Job, cluster: Cluster) -> None:
    """The two minutes after a requeue are held back, and no second of an earlier start is counted again."""
    began = time.time()
    script = job.path.with_name("began")
    job.submit(f"launcher.setup=['date +%s >> {script}','sleep 3']", **job.hold(20))
    job.wait_for_step(20)
    before = time.time()
    preempt(cluster, "n1")
    job.wait_for_state("PENDING")
    time.sleep(5)
    job.wait_for_requeue()
    restarted = time.time()
    assert job.ends() == "COMPLETED"
    ended = time.time()
    first, second = job.attempts()
    assert first["queue_s"] + first["hold_s"] <= before - began + ROUNDING_S
    assert 5 - ROUNDING_S <= second["queue_s"] + second["hold_s"] <= restarted - before + ROUNDING_S
    for attempt, batch_began in zip((first, second), script.read_text().split(), strict=True):
        assert attempt["seconds"]["start"] >= attempt["started"] - float(batch_began) - ROUNDING_S
    whole = read_run(RunDir(job.path), job.path.parent, 100).seconds
    # Only what lies before the batch script and after the record of the end is in no bucket.
    assert 5 < sum(whole.values()) <= ended - began + 4 * ROUNDING_S

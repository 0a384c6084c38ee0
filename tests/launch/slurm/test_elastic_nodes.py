"""A job that takes the nodes that are free (`launcher.nodes=1-2`), on a real cluster."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster import PATIENCE, Cluster
from jobs import COMMON, Job
from references import Reference
from runs import ROOT, Run, assert_same_run

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

GLOBAL_BATCH, MICRO_BATCH = 16, 2
OVERRIDES = [
    *COMMON,
    "sampler=elastic",
    "train.steps=60",
    f"train.batch_size={MICRO_BATCH}",
    f"train.global_batch_size={GLOBAL_BATCH}",
]
CALLS = 60  # of the loss, after which an attempt idles: in each of those below some steps before the last


@contextmanager
def occupied(cluster: Cluster, node: str) -> Iterator[None]:
    """Occupy the node with a job of high priority for the duration of the block."""
    options = [f"--nodelist={node}", "--exclusive", "--output=/dev/null", "--wrap=sleep 100000"]
    other = cluster.run("sbatch", "--parsable", "--partition=high", *options).strip()
    try:
        yield
    finally:
        cluster.run("scancel", other)
        idle = lambda: cluster.run("sinfo", "-h", "-p", "low", "-n", node, "-o", "%T").strip() == "idle"  # noqa: E731
        cluster.wait(idle, 60, f"the end of the job of high priority on {node}")


def test_each_start_takes_the_nodes_that_are_free(cluster: Cluster, tmp_path: Path, reference: Reference) -> None:
    """Go from two nodes to one, as a job of higher priority takes the other, and back: the same run, bit for bit.

    Slurm must neither limit the job to one node, nor remember at a requeue how many it had. The first requeue is due to
    a preemption, the second to a killed rank, which ends the others.
    """
    overrides = [*OVERRIDES, "checkpoint.every_steps=5", "launcher.nodes=1-2", "launcher.tasks_per_node=2"]
    job = Job(tmp_path / "run", overrides, cluster=cluster)
    job.submit(**job.hold(CALLS))
    job.wait_for_step(5)
    assert job.slurm()["NumNodes"] == "2"
    with occupied(cluster, "n2"):
        job.wait_for_requeue()
        assert job.slurm()["NodeList"] == "n1"
        job.wait_for_step(job.attempts()[-1]["end_step"] + 2)
    for process in job.processes(rank=1):
        process.kill()
    job.wait_for_state("PENDING")
    assert job.row()["state"] == "requeued"
    job.wait_for_requeue()
    assert job.slurm()["NumNodes"] == "2"
    assert job.ends() == "COMPLETED"
    first, second, third = job.causes()
    assert (first, third) == ("preempted", "finished")
    assert second in ("killed", "crash")
    assert [attempt["nodes"] for attempt in job.attempts()] == [2, 1, 2]
    assert [attempt["ranks"] for attempt in job.attempts()] == [4, 2, 4]
    assert job.attempts()[0]["steps_lost"] == 0
    assert job.steps_lost() <= 20
    # The global batch stays.
    seen = {record["step"]: record["samples_seen"] for record in job.records() if "loss" in record}
    assert seen == {step: step * GLOBAL_BATCH for step in range(1, 61)}
    # Every sample once, in the same order, with the same result: metrics.jsonl holds the digest of all positions. These
    # two rest on rank-invariant training (train.rank_invariant).
    on_one_rank = reference(OVERRIDES)
    assert_same_run(job, on_one_rank)
    assert_no_difference(job, on_one_rank)


def assert_no_difference(one: Run, other: Run) -> None:
    """Check that `runner checkpoints --diff` of the last checkpoints names only how ranks shared the work."""
    command = [sys.executable, "-m", "runner", "checkpoints", "--json", "--diff"]
    paths = [str(run.checkpoints()[-1]) for run in (one, other)]
    done = subprocess.run(
        [*command, *paths], cwd=ROOT, capture_output=True, text=True, timeout=60 * PATIENCE, check=False
    )
    names = {re.split(r"[.\[]", difference["name"])[1] for difference in json.loads(done.stdout)["differences"]}
    assert names <= {"dataloader", "dataloader_by_rank", "rng_by_rank", "batch_shapes"}, done.stdout

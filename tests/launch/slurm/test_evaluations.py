"""An evaluation as a job of a real cluster: it is preempted, and nothing is lost or repeated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cluster import Cluster
from jobs import COMMON, Job, preempt, runner
from runs import Run

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def results(run: Run) -> dict[int, float]:
    """Return the loss by step."""
    found = [json.loads(file.read_text()) for file in (run.path / "evaluations").glob("step_*.json")]
    return {each["step"]: each["eval_loss"] for each in found}


def test_preempted_evaluation_loses_nothing(cluster: Cluster, tmp_path: Path) -> None:
    words = [*COMMON, "train.steps=60", "checkpoint.every_steps=20", "checkpoint.keep_last=10", "eval.every_steps=20"]
    job = Job(tmp_path / "run", [*words, "launcher.nodelist=n1"], cluster=cluster)
    job.submit()
    assert job.ends() == "COMPLETED"
    before = {path: path.read_bytes() for path in job.path.rglob("*") if path.is_file() and "lease" not in str(path)}
    place = ["launcher.nodelist=n2", "launcher.partition=low", "launcher.cpus_per_task=1", "launcher.signal_delay_s=20"]
    command = ["evaluate", str(job.path), "--step", "all", "launcher=slurm", *place]
    batches = Run(job.path.with_name("held"), []).hold(2)  # all of one checkpoint
    for _ in range(2):  # the second finds the job of the first
        done = runner(cluster, *command, **batches, HELD_IN="evaluation", HELD_S="12")
        assert done.returncode == 0, done.stdout + done.stderr
    assert "job" in done.stdout
    (directory,) = (job.path / "evaluations").glob("evaluate-*")
    evaluation = Job(directory, [], cluster=cluster)
    cluster.wait(lambda: len(results(job)) >= 1, 180, f"the first result: {evaluation.log()}")
    preempt(cluster, "n2")
    evaluation.wait_for_requeue()
    Run(job.path.with_name("held"), []).release()
    assert evaluation.ends() == "COMPLETED", evaluation.log()
    assert "preempted: requeued job" in evaluation.log()
    assert results(job) == {each["step"]: each["eval_loss"] for each in job.records() if "eval_loss" in each}
    assert set(results(job)) == {20, 40, 60}
    assert {path: path.read_bytes() for path in before} == before
    done = runner(cluster, "status", str(tmp_path), "--json")
    assert {row["run"] for row in json.loads(done.stdout)} == {"run"}

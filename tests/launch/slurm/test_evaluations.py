"""An evaluation as a job of a real cluster beside the one that trains: both are preempted, and nothing is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from jobs import COMMON, Job, preempt, runner
from references import Reference
from runs import Run, assert_same_run

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def results(run: Run) -> list[dict[str, Any]]:
    path = run.path / "evaluations.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_training_and_evaluation_are_preempted_and_nothing_is_lost_or_done_twice(
    cluster: Cluster, tmp_path: Path, reference: Reference
) -> None:
    """Also where the run keeps one checkpoint only."""
    words = [*COMMON, "checkpoint.every_steps=20", "checkpoint.keep_last=1", "eval.every_steps=20"]
    job = Job(tmp_path / "run", [*words, "launcher.nodelist=n1"], cluster=cluster)
    job.submit(**job.hold(30))
    job.wait_for_step(30)
    place = ["launcher.nodelist=n2", "launcher.partition=low", "launcher.cpus_per_task=1", "launcher.signal_delay_s=20"]
    command = ["evaluate", str(job.path), "--step", "all", "--follow", "launcher=slurm", *place]
    for _ in range(2):  # the second finds the job of the first
        done = runner(cluster, *command)
        assert done.returncode == 0, done.stdout + done.stderr
    (directory,) = (job.path / "evaluations").glob("evaluate-*")
    evaluation = Job(directory, [], cluster=cluster)
    cluster.wait(lambda: len(results(job)) >= 1, 180, f"the first result: {evaluation.log()}")
    preempt(cluster, "n1", "n2")
    evaluation.wait_for_requeue()
    job.wait_for_requeue()
    assert job.ends() == "COMPLETED"
    assert evaluation.ends() == "COMPLETED", evaluation.log()
    assert "preempted: requeued job" in evaluation.log()
    assert_same_run(job, reference(words))
    own = {each["step"]: each["eval_loss"] for each in job.records() if "eval_loss" in each}
    assert set(own) == set(range(20, 121, 20))
    # Besides the checkpoints of every 20th step there is the one of the preemption.
    found = [(each["step"], each["eval_loss"]) for each in results(job)]
    assert len({step for step, _ in found}) == len(found)
    assert {step: loss for step, loss in found if step in own} == own
    assert not list((job.path / "checkpoints").glob("*.awaits"))
    assert len(job.checkpoints()) >= 1
    done = runner(cluster, "status", str(tmp_path), "--json")
    assert {row["run"] for row in json.loads(done.stdout)} == {"run"}

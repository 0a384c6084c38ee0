"""Branches of a trunk that is still in the queue: they wait by a dependency, on a real cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cluster import Cluster
from jobs import COMMON, Job, runner

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

STEPS = 12
WORDS = [
    *(word for word in COMMON if not word.startswith(("train.steps", "checkpoint.", "eval."))),
    "eval.every_steps=0",
    "checkpoint.every_steps=4",
    "checkpoint.keep_last=1",
    f"train.steps={STEPS}",
]


@pytest.fixture
def trunk(cluster: Cluster, tmp_path: Path) -> Job:
    return Job(tmp_path / "trunk", [*WORDS, "launcher.nodelist=n1"], cluster=cluster)


def forked(trunk: Job, cluster: Cluster, *more: str) -> Job:
    """The command, and the branch that it submits."""
    path = trunk.path.with_name("branch")
    done = runner(cluster, "fork", str(trunk.path), "--step", "4", f"run.dir={path}", *more)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "which it waits for" in done.stdout
    return Job(path, trunk.overrides, cluster=cluster)


def test_a_branch_waits_for_its_trunk_and_begins_at_the_step(trunk: Job, cluster: Cluster) -> None:
    """Held and released while it waits, it still does. The trunk keeps its last checkpoint, and the awaited one."""
    trunk.submit(HELD_S="600", **trunk.hold(2))
    branch = forked(trunk, cluster, "seed=1")
    assert branch.slurm()["Dependency"].startswith(f"afterok:{trunk.job_id}")
    row = branch.row()
    assert row["state"] == "pending"
    assert "Dependency" in json.dumps(row)
    cluster.run("scontrol", "requeue", branch.job_id, check=False)  # refused by Slurm, or harmless
    cluster.run("scontrol", "hold", branch.job_id)
    cluster.run("scontrol", "release", branch.job_id)
    assert branch.slurm()["JobState"] == "PENDING"
    assert not branch.lines()
    assert trunk.ends() == "COMPLETED"
    assert branch.ends() == "COMPLETED"
    assert [path.name for path in trunk.checkpoints()] == ["step_00000004", "step_00000012"]
    assert branch.attempts()[0]["start_step"] == 4
    ours, theirs = branch.records(), trunk.records()
    assert [record["step"] for record in ours] == list(range(1, STEPS + 1))
    assert ours[:4] == theirs[:4]
    assert [record["digest"] for record in ours] == [record["digest"] for record in theirs]
    assert ours[5] != theirs[5]


def test_the_branch_of_a_trunk_that_fails_says_so_and_is_forked_again(trunk: Job, cluster: Cluster) -> None:
    fault = trunk.path.with_name("fault")
    fault.write_text("raise")
    trunk.submit("+train.loss.fail_at=6", FAIL_FILE=str(fault), HELD_S="600", **trunk.hold(2))
    branch = forked(trunk, cluster)
    first = branch.job_id
    assert trunk.ends() == "FAILED"
    cluster.wait(lambda: branch.slurm()["Reason"] == "DependencyNeverSatisfied", 60, "the reason of the branch")
    assert "DependencyNeverSatisfied" in json.dumps(branch.row())
    cluster.run("scancel", first)
    branch.wait_for_state("CANCELLED")
    # The trunk has saved step 4 before it failed, so the branch need not wait any more.
    done = runner(cluster, "fork", str(trunk.path), "--step", "4", f"run.dir={branch.path}")
    assert done.returncode == 0, done.stdout + done.stderr
    fault.unlink()
    assert branch.job_id != first
    assert branch.ends() == "COMPLETED"
    assert branch.attempts()[0]["start_step"] == 4

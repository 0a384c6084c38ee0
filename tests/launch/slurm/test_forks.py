"""A branch of a trunk that has not reached the step yet: another job forks it later, on a real cluster."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from cluster import Cluster
from jobs import COMMON, Job, environment, runner
from runs import ROOT

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

STEPS = 12
WORDS = [
    *(word for word in COMMON if not word.startswith(("train.steps", "checkpoint.", "eval."))),
    "eval.every_steps=0",
    "checkpoint.every_steps=4",
    "checkpoint.keep_last=1",
    "checkpoint.keep_every_steps=4",
    f"train.steps={STEPS}",
]


@pytest.fixture
def trunk(cluster: Cluster, tmp_path: Path) -> Job:
    return Job(tmp_path / "trunk", [*WORDS, "launcher.nodelist=n1"], cluster=cluster)


def test_a_job_can_fork_a_trunk_once_it_has_finished(trunk: Job, cluster: Cluster) -> None:
    """The refusal before suggests this command. The branch is submitted from within a job."""
    trunk.submit(HELD_S="600", **trunk.hold(2))
    branch = Job(trunk.path.with_name("branch"), trunk.overrides, cluster=cluster)
    words = ["fork", str(trunk.path), "--step", "4", f"run.dir={branch.path}", "seed=1"]
    done = runner(cluster, *words)
    assert done.returncode == 2
    assert "and saves every 4 steps and at its end: rerun this command once step 4 is saved" in done.stderr
    dependency = f"--dependency=afterok:{trunk.job_id}"
    assert f"let a job wait for it: sbatch {dependency} --wrap='THIS COMMAND'\n" in done.stderr
    command = shlex.join([sys.executable, "-m", "runner", *words])
    variables = " ".join(f"{key}={shlex.quote(value)}" for key, value in environment().items())
    log = trunk.path.with_name("fork.out")
    options = ["--partition=low", f"--chdir={ROOT}", f"--output={log}"]
    cluster.run("sbatch", dependency, *options, f"--wrap={variables} {command}")
    assert not branch.path.exists()
    assert trunk.ends() == "COMPLETED"
    cluster.wait((branch.path / "job.json").exists, 180, f"the branch: {log.exists() and log.read_text()}")
    assert branch.ends() == "COMPLETED"
    assert branch.attempts()[0]["start_step"] == 4
    ours, theirs = branch.records(), trunk.records()
    assert [record["step"] for record in ours] == list(range(1, STEPS + 1))
    assert ours[:4] == theirs[:4]
    assert [record["digest"] for record in ours] == [record["digest"] for record in theirs]
    assert ours[5] != theirs[5]

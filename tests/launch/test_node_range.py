"""Jobs of several sizes (`launcher.nodes=1-4`), with Slurm's commands faked on PATH (slurm/ has real ones)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fake_slurm import FakeSlurm, runs, slurm
from runs import TINY

from launch.slurm import SlurmLauncher
from runner.cli.start.start import start
from runner.errors import UserError

__all__ = ["runs", "slurm"]


def variables(slurm: FakeSlurm, launcher: SlurmLauncher, run: Path, **given: str) -> dict[str, str]:
    """Return the variables that srun gets from the batch script of a start, with Slurm's variables `given`."""
    (slurm.folder / "srun").write_text("#!/bin/sh\nenv\n")
    (run / "logs").mkdir(exist_ok=True)
    env = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "12", "MASTER_PORT": "1", **given}
    script = launcher.preview([run])
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, check=True)
    return dict(line.split("=", 1) for line in done.stdout.splitlines() if line.startswith("SLURM_"))


@pytest.mark.parametrize("nodes", [1, 3])
def test_srun_starts_tasks_on_all_nodes_of_this_start(slurm: FakeSlurm, runs: list[Path], nodes: int) -> None:
    """The number is not known before: Slurm sets a job's number of nodes anew at each start."""
    launcher = SlurmLauncher(nodes="1-4", tasks_per_node=2)
    found = variables(slurm, launcher, runs[0], SLURM_JOB_NUM_NODES=str(nodes), SLURM_NTASKS="1")
    assert found["SLURM_NTASKS"] == str(2 * nodes)
    assert found["SLURM_NTASKS_PER_NODE"] == "2"


def test_job_of_several_sizes_is_submitted_without_a_task_count(slurm: FakeSlurm, runs: list[Path]) -> None:
    """Slurm would read a count as a limit of the nodes, and remember that of the last start at a requeue."""
    script = SlurmLauncher(nodes="1-4", tasks_per_node=2, cpus_per_task=3, gpus_per_task=1).preview(runs[:1])
    for option in ("nodes=1-4", "mincpus=6", "gpus-per-node=2", "cpus-per-task=3"):
        assert f"#SBATCH --{option}\n" in script, option
    assert "#SBATCH --gpus-per-task" not in script
    assert "export SLURM_GPUS_PER_TASK=1\n" in script
    assert "ntasks" not in "".join(line for line in script.splitlines() if line.startswith("#SBATCH"))


def test_a_job_of_one_size_is_submitted_with_its_task_count(slurm: FakeSlurm, runs: list[Path]) -> None:
    for nodes in (2, "2", "2-2"):
        script = SlurmLauncher(nodes=nodes, tasks_per_node=2, gpus_per_task=1).preview(runs[:1])
        for option in ("nodes=2", "ntasks-per-node=2", "gpus-per-task=1"):
            assert f"#SBATCH --{option}\n" in script, option
        assert "mincpus" not in script
        assert "SLURM_NTASKS" not in script


def test_there_are_logs_and_a_port_for_the_largest_size(slurm: FakeSlurm, runs: list[Path]) -> None:
    assert SlurmLauncher(nodes="1-3", tasks_per_node=2).launch(runs, "somewhere:attempt") == 0
    assert len(list((runs[0] / "logs").iterdir())) == 6
    assert "export MASTER_PORT" in SlurmLauncher(nodes="1-2").preview(runs[:1])
    assert "export MASTER_PORT" not in SlurmLauncher(nodes="1-1").preview(runs[:1])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nodes": "4-1"}, ("launcher.nodes=4-1", "1-4")),
        ({"nodes": "1-many"}, ("launcher.nodes=1-many", "1-4")),
        ({"nodes": "3-7"}, ("launcher.nodes=3-7", "the 2 nodes of partition 'low'")),
        ({"nodes": "1-2", "tasks_per_node": "1-2"}, ("launcher.tasks_per_node='1-2'", "1 or more")),
        ({"nodes": "1-2", "additional": {"ntasks-per-node": 2}}, ("launcher.additional.ntasks-per-node", "remove it")),
        ({"nodes": "1-2", "additional": {"ntasks": 2}}, ("launcher.additional.ntasks", "remove it")),
    ],
)
def test_a_size_that_slurm_cannot_give_is_an_error(
    slurm: FakeSlurm, runs: list[Path], options: dict[str, Any], words: tuple[str, ...]
) -> None:
    (error,) = SlurmLauncher(**{"partition": "low", **options}).check(runs)
    assert "\n" not in error
    assert all(word in error for word in words), error


def test_a_range_may_exceed_the_existing_nodes(slurm: FakeSlurm, runs: list[Path]) -> None:
    """Slurm assigns such a job the nodes that exist."""
    assert SlurmLauncher(partition="low", nodes="1-7").check(runs) == []


def test_without_a_global_batch_nothing_is_submitted(slurm: FakeSlurm, tmp_path: Path) -> None:
    """The batch, and with it the result, would depend on the number of nodes."""
    words = ["launcher=slurm", "launcher.nodes=1-2", *TINY, "sampler=elastic", f"run.root={tmp_path / 'outputs'}"]
    with pytest.raises(UserError) as raised:
        start(words)
    (line,) = str(raised.value).splitlines()
    assert line.startswith("launcher.nodes=1-2: ")
    assert "set train.global_batch_size=N" in line
    assert not slurm.calls("sbatch")
    assert not (tmp_path / "outputs").exists()


def test_the_numbers_of_ranks_follow_from_those_of_nodes() -> None:
    counts = SlurmLauncher(nodes="2-4", tasks_per_node=3).rank_counts()
    assert list(counts.counts) == [6, 9, 12]
    assert counts.per_node == 3
    assert counts.vary
    assert not SlurmLauncher(nodes=4).rank_counts().vary
    for wrong in ({"nodes": "x"}, {"tasks_per_node": 0}, {"tasks_per_node": "1-2"}):
        with pytest.raises(UserError, match=f"launcher.{next(iter(wrong))}="):
            SlurmLauncher(**wrong).rank_counts()

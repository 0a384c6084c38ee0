"""`runner cancel`, `logs` and `status` with jobs of a real cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster import Cluster
from jobs import COMMON, SLURM, runner, statuses

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


@pytest.mark.promise("a cancelled sweep on a cluster is saved, left alone by a rerun, and resumed on request")
def test_a_sweep_is_withdrawn_run_by_run_and_as_a_whole(cluster: Cluster, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.write_text("20")
    words = ["-m", *SLURM, *COMMON, f"run.root={tmp_path}", "seed=1,2,3", "launcher.array_parallelism=2"]
    done = runner(cluster, *words, HOLD_FILE=str(hold))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()[-3:]
    assert [line.split()[0] for line in lines] == ["status:", "logs:", "cancel:"]

    def states() -> list[str]:
        return [row["state"] for _, row in sorted(statuses(cluster, tmp_path).items())]

    cluster.wait(lambda: states() == ["running", "running", "pending"], 180, "two of three jobs")
    cluster.wait(lambda: all(row["step"] or 0 for row in list(statuses(cluster, tmp_path).values())[:2]), 180, "a step")
    job = next(iter(statuses(cluster, tmp_path).values()))["job_id"].partition("_")[0]
    assert "-sweep-of-3" in cluster.run("squeue", "--noheader", f"--jobs={job}", "--Format=Name:200")
    waits = statuses(cluster, tmp_path)
    assert [row["waited_s"] is not None for _, row in sorted(waits.items())] == [False, False, True]
    first = sorted(path for path in tmp_path.iterdir() if (path / "job.json").exists())[0]
    log = runner(cluster, "logs", str(first))
    assert log.stdout.startswith("attempt 1 on n"), log.stderr
    assert "starting at step 0" in log.stdout
    done = runner(cluster, "cancel", str(first))
    assert "withdrawn: cancelled job" in done.stdout, done.stderr
    cluster.wait(lambda: states()[0] == "withdrawn", 180, "the first job's end")
    followed = runner(cluster, "logs", "-f", str(first))
    assert "cancelled (SIGTERM): saved at step" in followed.stdout
    assert runner(cluster, *lines[2].split()[4:]).returncode == 0  # as it was printed
    cluster.wait(lambda: states() == ["withdrawn"] * 3, 180, "the end of all jobs")
    cluster.wait(lambda: job not in cluster.run("squeue", "--noheader", "--Format=ArrayJobID"), 180, "an empty queue")
    hold.unlink()
    again = runner(cluster, *words)
    assert again.stdout.count("withdrawn by cancel") == 3, again.stdout
    resumed = runner(cluster, "resume", str(first), "launcher.wait=true")
    assert "resuming at step" in resumed.stdout
    assert states() == ["finished", "withdrawn", "withdrawn"]

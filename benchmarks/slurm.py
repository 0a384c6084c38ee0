"""Measure the dead time of a preemption on a real Slurm: signal to end of the save, restart to a new step."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent / "tests" / each) for each in ("support", "launch/slurm")]

from cluster import INSTALL, Cluster, missing, running  # noqa: E402  # the tests' own modules
from jobs import COMMON, Job  # noqa: E402

from benchmarks.results import table  # noqa: E402

ROUNDS = 5


def import_torch() -> float:
    """Return the seconds that a new Python takes to import torch, start and end included."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - started


def wait_for_step(job: Job, step: int) -> float:
    """Return the time at which the metrics have that step."""
    end = time.monotonic() + 120
    while job.step() < step:
        if time.monotonic() > end:
            raise TimeoutError(job.log())
        time.sleep(0.005)
    return time.time()


def one_round(job: Job) -> tuple[float, float, float]:
    """Return the seconds from signal to end of the save, from there to the requeue, from restart to a new step."""
    signalled = time.time()
    job.cluster.run("scancel", "--signal=USR2", job.job_id)
    job.wait_for_state("PENDING")
    saved = max(each.stat().st_mtime for each in job.checkpoints())
    left = job.attempts()[-1]["ended"]
    before = job.step()
    job.wait_for_requeue()
    restarted = time.time()
    return saved - signalled, left - saved, wait_for_step(job, before + 1) - restarted


def measure(cluster: Cluster, folder: Path) -> list[tuple[float, float, float]]:
    job = Job(folder / "run", [*COMMON, "train.steps=1000000", "scheduler.total_steps=1000"], cluster=cluster)
    job.submit(STEP_SLEEP_S="0.02")
    wait_for_step(job, 5)
    rounds = [one_round(job) for _ in range(ROUNDS)]
    cluster.run("scancel", job.job_id)
    return rounds


def main() -> None:
    """Add the medians, and the last one as a ratio to the import of torch."""
    if lacking := missing():
        print(f"slurm: {', '.join(lacking)} is missing: {INSTALL}")
        return
    with tempfile.TemporaryDirectory() as name, running(Path(name) / "cluster") as cluster:
        rounds = measure(cluster, Path(name))
    save, requeue, restart = (statistics.median(each) for each in zip(*rounds, strict=True))
    torch_s = statistics.median(import_torch() for _ in range(3))
    found = table("slurm")
    found.add("signal to the end of the save", "time", save, "s")
    found.add("end of the save to the job in the queue again", "time", requeue, "s")
    found.add("restart to the first new step", "time", restart, "s")
    found.add("restart to the first new step", "of `import torch`", restart / torch_s)


if __name__ == "__main__":
    main()

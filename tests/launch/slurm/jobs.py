"""Runs as jobs of the real cluster: submit, watch, disturb, wait, compare."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from cluster import INSTALL, PATIENCE, Cluster, missing, running
from runs import ROOT, TINY, Run

SUPPORT = ROOT / "tests" / "support"
STEPS = 120
COMMON = [
    *TINY,
    "train.loss._target_=paced.loss",
    f"train.steps={STEPS}",
    "eval.every_steps=50",
    "model.dropout=0.1",
    # Unless a test sets it, only a signal or the end saves, so a missing save shows.
    "checkpoint.every_steps=10000",
]
SLURM = ["launcher=slurm", "launcher.partition=low", "launcher.cpus_per_task=1", "launcher.signal_delay_s=20"]


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Yield one cluster per pytest worker."""
    if lacking := missing():
        reason = f"{', '.join(lacking)} is missing, and this test starts a real Slurm: {INSTALL}"
        if "RUNNER_REQUIRE_SLURM" in os.environ:  # CI installs Slurm and skips nothing
            pytest.fail(reason)
        pytest.skip(reason)
    with running(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def environment(**more: str) -> dict[str, str]:
    given = [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
    path = os.pathsep.join([str(ROOT), str(SUPPORT), *given])
    return {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **more}


def runner(cluster: Cluster, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m runner` as a user of the cluster does."""
    return subprocess.run(
        [sys.executable, "-m", "runner", *arguments],
        cwd=ROOT,
        env={**cluster.environment, **environment(**env)},
        capture_output=True,
        text=True,
        timeout=120 * PATIENCE,
        check=False,
    )


def statuses(cluster: Cluster, root: Path) -> dict[str, dict[str, Any]]:
    """Return the report of `python -m runner status` about each run below `root`, by name."""
    done = subprocess.run(
        [sys.executable, "-m", "runner", "status", str(root), "--json"],
        cwd=ROOT,
        env={**cluster.environment, **environment()},
        capture_output=True,
        text=True,
        timeout=60 * PATIENCE,
        check=True,
    )
    return {row["run"]: row for row in json.loads(done.stdout)}


@dataclass
class Job(Run):
    """A run whose command submits it."""

    cluster: Cluster = field(kw_only=True)
    restarts: int = 0

    def submit(self, *more: str, **env: str) -> str:
        """Run the command and return the job's id."""
        done = runner(self.cluster, *SLURM, *self.overrides, *more, f"run.dir={self.path}", **env)
        assert done.returncode == 0, done.stdout + done.stderr
        self.restarts = 0
        return self.job_id

    @property
    def job_id(self) -> str:
        return str(json.loads((self.path / "job.json").read_text())["job_id"])

    def row(self) -> dict[str, Any]:
        """Return the row of this run in `runner status`."""
        return statuses(self.cluster, self.path)[self.path.name]

    def slurm(self) -> dict[str, str]:
        """Return the job's record in Slurm."""
        words = self.cluster.run("scontrol", "show", "job", "-o", self.job_id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def step(self) -> int:
        return sum('"loss"' in line for line in self.lines())

    def wait_for_step(self, step: int, timeout_s: float = 180) -> None:
        self.cluster.wait(lambda: self.step() >= step, timeout_s, f"step {step} of {self.log()}")

    def wait_for_state(self, *states: str, timeout_s: float = 180) -> None:
        what = f"{'/'.join(states)} of {self.path.name}"
        self.cluster.wait(lambda: self.slurm()["JobState"] in states, timeout_s, what)

    def wait_for_requeue(self, timeout_s: float = 180) -> None:
        """Wait until the job is requeued, and let it start soon instead of in two minutes."""
        self.cluster.wait(self._is_queued_again, timeout_s, f"the requeue of {self.path.name}")
        self.restarts += 1
        self.cluster.wait(self._started_soon, 180, f"the restart of {self.path.name}")

    def _is_queued_again(self) -> bool:
        record = self.slurm()
        return record["JobState"] == "PENDING" and int(record["Restarts"]) > self.restarts

    def _started_soon(self) -> bool:
        """Return whether it runs. Ask again: Slurm may reset the start time once the job has ended completely."""
        record = self.slurm()
        start = record.get("StartTime", "Unknown")
        far = start[0].isdigit() and datetime.fromisoformat(start) - datetime.now() > timedelta(seconds=4)
        if record["JobState"] == "PENDING" and far:
            # slurmd refuses a job that starts in the very second in which it was killed.
            time.sleep(1.01 - time.time() % 1)
            options = ["starttime=now", "timelimit=60"]  # of `ends_in` no more than once
            self.cluster.run("scontrol", "update", f"jobid={self.job_id}", *options, check=False)
        return record["JobState"] == "RUNNING"

    def ends_in(self, seconds: int) -> None:
        """Set the time limit to end this soon. Slurm looks every 30 s, and signals up to a minute early."""
        self.cluster.run("scontrol", "update", f"jobid={self.job_id}", f"endtime=now+{seconds}")

    def ends(self, timeout_s: float = 240) -> str:
        """Let the job continue, wait until it is over, and return its last state."""
        self.release()
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
        self.wait_for_state(*over, timeout_s=timeout_s)
        return self.slurm()["JobState"]

    def causes(self) -> list[str]:
        return [line["cause"] for line in self.attempts()]

    def under_way(self) -> dict[str, Any]:
        """Return the record of the attempt that has not ended yet."""
        try:
            record: dict[str, Any] = json.loads((self.path / "attempt.json").read_text())
        except FileNotFoundError:  # it has just ended
            return self.attempts()[-1]
        return record

    def steps_lost(self) -> int:
        return sum(line["steps_lost"] for line in self.attempts())

    def processes(self, rank: int = 0) -> list[psutil.Process]:
        """Return the Python processes of a rank of this job."""
        job = self.slurm()["JobId"]
        found = []
        for process in psutil.process_iter():
            try:
                own = process.environ()
            except (psutil.Error, OSError):
                continue
            mine = own.get("SLURM_JOB_ID") == job and own.get("SLURM_PROCID") == str(rank)
            if mine and "python" in process.name() and own.get("SLURM_CONF") == self.cluster.environment["SLURM_CONF"]:
                found.append(process)
        return found

    def log(self) -> str:
        """Return the end of the job's output, for messages."""
        logs = self.path / "logs"
        # A link to the log of an array is there before its task has started.
        return "\n".join(log.read_text()[-3000:] for log in sorted(logs.glob("*.out")) if log.exists())


def preempt(cluster: Cluster, *nodes: str) -> None:
    """Run a job of high priority on whole nodes, until it is over."""
    options = [
        f"--nodes={len(nodes)}",
        f"--nodelist={','.join(nodes)}",
        "--exclusive",
        "--time=5",
        "--output=/dev/null",
    ]
    output = cluster.run("sbatch", "--parsable", "--partition=high", *options, "--wrap=true")
    job = output.strip()
    cluster.wait(lambda: f"JobId={job} " not in _unfinished(cluster, job), 180, "the job of high priority")


def _unfinished(cluster: Cluster, job: str) -> str:
    shown = cluster.run("scontrol", "show", "job", "-o", job)
    return "" if " JobState=COMPLETED " in shown else shown

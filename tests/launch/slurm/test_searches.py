"""A search on a real cluster: its slots are preempted, killed and cancelled."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from cluster import Cluster
from jobs import SLURM, environment, preempt, runner
from runs import PATIENCE_S, ROOT, TINY

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
SEARCH = ["search=asha", "optimizer.lr=log(1e-4,1e-2)", "search.rungs=[2,4]", "eval.batches=1", "eval.every_steps=2"]


def begin(cluster: Cluster, root: Path, trials: int, *more: str) -> Path:
    given = [*TINY, *SEARCH, f"search.trials={trials}", f"run.root={root}", "checkpoint.every_steps=1", *more]
    done = runner(cluster, "-m", *SLURM, "launcher.array_parallelism=2", "launcher.time=20", *given)
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = root.glob("*/search.json")
    return record.parent


def table(search: Path, *flags: str) -> Any:
    words = [sys.executable, "-m", "runner", "search", str(search), *(flags or ("--json",))]
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True)
    return done.stdout if flags else json.loads(done.stdout)


def entries(search: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (search / "journal.jsonl").read_text().splitlines())
    return [entry for entry in lines if entry["entry"] == kind]


def wait_for(cluster: Cluster, search: Path, kind: str, count: int = 1) -> None:
    cluster.wait(lambda: len(entries(search, kind)) >= count, PATIENCE_S, f"{count} entries {kind}")


def start_now(cluster: Cluster) -> None:
    """Start a requeued job without its wait of two minutes."""
    for job in cluster.run("squeue", "-h", "-t", "PD", "-o", "%i").split():
        cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now")


def finish(cluster: Cluster, search: Path, *command: Any) -> None:
    """Wait until the search has ended. Rerun its command where no slot is left."""
    deadline = time.monotonic() + 2 * PATIENCE_S
    while not entries(search, "done"):
        assert time.monotonic() < deadline, table(search, "--replay")
        start_now(cluster)
        if not cluster.run("squeue", "-h").strip():
            begin(cluster, *command)
        time.sleep(2)


def test_slots_that_are_preempted_and_killed_lose_no_trial(cluster: Cluster, tmp_path: Path) -> None:
    search = begin(cluster, tmp_path, 5)
    again = begin(cluster, tmp_path, 5)
    assert again == search
    wait_for(cluster, search, "result")
    preempt(cluster, "n1", "n2")
    start_now(cluster)
    wait_for(cluster, search, "result", 3)
    trains = [
        process
        for process in psutil.process_iter(["cmdline"])
        if "runner.training.attempt" in " ".join(process.info["cmdline"] or ()) and str(tmp_path) in str(process.info)
    ]
    for process in trains[:1]:
        process.send_signal(signal.SIGKILL)
    finish(cluster, search, tmp_path, 5)
    assert " 0 decisions come out differently" in table(search, "--replay")
    found = table(search)
    assert [trial["state"] for trial in found["trials"]].count("finished") >= 1
    assert {trial["state"] for trial in found["trials"]} == {"finished", "paused"}
    results = [(entry["trial"], entry["rung"]) for entry in entries(search, "result")]
    assert len({*results}) == len(results)
    best = found["best"]
    point = [f"{key}={value}" for key, value in best["values"].items()]
    plain = [*TINY, *point, "train.steps=4", "eval.batches=1", "eval.every_steps=2", f"run.dir={tmp_path}/plain"]
    subprocess.run([sys.executable, "-m", "runner", *plain], cwd=ROOT, env=environment(), check=True)
    assert (tmp_path / "plain" / "metrics.jsonl").read_bytes() == (Path(best["run"]) / "metrics.jsonl").read_bytes()


def test_scancel_of_a_slot_withdraws_the_trial_that_it_trains(cluster: Cluster, tmp_path: Path) -> None:
    long = ("train.steps=4000", "search.rungs=[2000,4000]", "scheduler.total_steps=4000", "checkpoint.every_steps=50")
    given = [text for text in long if not text.startswith("search.rungs")]
    search = begin(cluster, tmp_path, 2, *given, "search.rungs=[2000,4000]", "eval.every_steps=1000")
    wait_for(cluster, search, "run", 2)
    first = entries(search, "start")[0]
    job = json.loads((search / "slots" / f"slot-{first['slot']}" / "job.json").read_text())["job_id"]
    cluster.run("scancel", job)
    wait_for(cluster, search, "withdrawn")
    assert entries(search, "withdrawn")[0]["trial"] == first["trial"]
    done = runner(cluster, "cancel", str(search))
    assert done.returncode == 0, done.stderr
    wait_for(cluster, search, "withdrawn", 2)
    assert [trial["state"] for trial in table(search)["trials"]] == ["withdrawn", "withdrawn"]

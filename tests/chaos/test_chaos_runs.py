"""Run real drills: correct runs are bit-identical under every fault, incorrect ones are found and explained."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from runs import PACED, PATIENCE_S, ROOT, TINY

from runner.chaos.faults import KINDS

# Many runs in sequence take long on a busy machine.
pytestmark = pytest.mark.timeout(1800)

# The dataset's generator starts afresh in every attempt and is in no checkpoint.
DATASET = """
import random

import numpy as np


class Noise:
    def __init__(self, sequence_length, **options):
        self.length = sequence_length
        self.random = random.Random({seed})

    def __len__(self):
        return 512

    def __getitem__(self, index):
        tokens = np.array([self.random.randrange(256) for _ in range(self.length + 1)], dtype=np.int64)
        return {{"input_ids": tokens[:-1], "labels": tokens[1:]}}
"""


def start(*arguments: str, cwd: Path = ROOT, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "runner", "chaos", *TINY, *arguments, "--json"],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support'}:{cwd}", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def drill(*arguments: str, cwd: Path = ROOT, **env: str) -> tuple[int, dict[str, Any], str]:
    """Run a drill. Return its exit status, result and output."""
    process = start(*arguments, cwd=cwd, **env)
    output, shown = process.communicate(timeout=1500)
    return process.returncode, json.loads(output) if output else {}, shown


@pytest.mark.promise("chaos injects every kind of fault: all survived, bit for bit the same")
def test_every_kind_of_fault_is_survived(tmp_path: Path) -> None:
    """Inject all kinds of faults and check that the run survives them bit-identical."""
    status, result, shown = drill(
        "data=mixture",
        "sampler=elastic",
        "train.batch_size=4",
        "train.global_batch_size=16",
        "model.dropout=0.1",
        "train.steps=60",
        "eval.every_steps=15",
        f"--root={tmp_path / 'root'}",
        f"--report={tmp_path / 'report.html'}",
    )
    assert status == 0, shown
    assert result["verdict"] == "identical"
    kinds = {kind for kind, fault in KINDS.items() if fault.on_this_machine}
    assert {fault["kind"] for fault in result["faults"]} == kinds
    assert all(fault["answered"] for fault in result["faults"])
    assert all(found["tensors"] and found["records"] == 64 for found in result["comparisons"].values())
    assert "data:image/png" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_run_with_changing_ranks_stays_bit_identical(tmp_path: Path) -> None:
    """Change the number of ranks between attempts. Every fault strikes all ranks of an attempt."""
    ranks, faults = 2, "shape,sigkill,sigterm,sigkill-save,flip,frozen,disk-full,twice"
    status, result, shown = drill(
        "data=mixture",
        "sampler=elastic",
        "train.batch_size=2",
        "train.global_batch_size=16",
        "train.device=cpu",
        "model.dropout=0.1",
        "train.steps=60",
        "eval.every_steps=15",
        f"launcher.ranks={ranks}",
        f"--faults={faults}",
        "--kills=9",
        f"--root={tmp_path / 'root'}",
        CUDA_VISIBLE_DEVICES="",
    )
    assert status == 0, shown
    assert result["verdict"] == "identical"
    assert {fault["kind"] for fault in result["faults"]} == set(faults.split(","))
    attempts = [
        json.loads(line) for run in result["killed"] for line in (Path(run) / "attempts.jsonl").read_text().splitlines()
    ]
    used = {attempt["ranks"] for attempt in attempts}
    assert used > {ranks}
    assert {count for found in result["comparisons"].values() for count in found["ranks"]} == used
    assert result["lines"][0].startswith(f"bit-identical on {', '.join(map(str, sorted(used)))} ranks: ")
    reference = (tmp_path / "root" / "reference" / "metrics.jsonl").read_bytes()
    assert all((Path(run) / "metrics.jsonl").read_bytes() == reference for run in result["killed"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "explanation"),
    [("0", "the difference comes from resuming after a fault"), ("", "the configuration itself is not reproducible")],
    ids=["own generator", "unseeded"],
)
def test_a_run_that_is_not_reproducible_is_caught(tmp_path: Path, seed: str, explanation: str) -> None:
    """Check that the first step that differs is named, with the reason: the dataset's unsaved generator."""
    (tmp_path / "noise.py").write_text(DATASET.format(seed=seed))
    status, result, shown = drill(
        "data.sources.code._target_=noise.Noise",
        "eval.every_steps=0",
        "train.steps=30",
        "--kills=1",
        "--faults=sigterm",
        "--seed=3",
        f"--root={tmp_path / 'root'}",
        cwd=tmp_path,
    )
    assert status == 1, shown
    assert result["verdict"] == "not identical"
    assert all(fault["answered"] for fault in result["faults"])
    differences = [found["differences"] for found in result["comparisons"].values()]
    first = next(found[0] for found in differences if found)  # in the first run the fault may have come too late
    assert first["step"] >= 1
    assert first["key"] == "loss"
    assert any(explanation in line for line in result["lines"]), result["lines"]


@pytest.mark.slow
def test_interrupted_drill_stops_its_runs_and_can_continue(tmp_path: Path) -> None:
    """Press Ctrl-C. Check that nothing is left running, and that a rerun of the command injects no fault twice."""
    root = tmp_path / "root"
    arguments = [PACED, "train.steps=40", "--kills=2", "--faults=sigkill,sigterm", f"--root={root}"]
    journal = root / "faults.jsonl"
    process = start(*arguments, HOLD_FILE=str(journal))  # no run can finish after the first fault
    deadline = time.monotonic() + PATIENCE_S
    while not journal.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, shown = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 75, shown
    assert "rerun the command to continue the drill" in shown
    before = journal.read_text()
    assert not subprocess.run(
        ["pgrep", "-f", f"run.dir={tmp_path}"], capture_output=True, text=True, check=False
    ).stdout
    status, result, shown = drill(*arguments)
    assert status == 0, shown
    assert journal.read_text().startswith(before)
    assert [fault["number"] for fault in result["faults"]] in ([1, 2], [2, 1])


@pytest.mark.slow
def test_run_that_fails_without_faults_is_reported(tmp_path: Path) -> None:
    process = start("optimizer.lr=1e15", "train.clip_norm=null", "train.steps=20", f"--root={tmp_path / 'root'}")
    _, shown = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2
    assert "error: the run does not work without faults" in shown

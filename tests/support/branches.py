"""Run commands on trunks and branches in forks of this process, and compare the results."""

from __future__ import annotations

import hashlib
import json
import random
import signal
from pathlib import Path
from typing import Any

from random_configs import fork_run, preload

TINY = [
    "scheduler.total_steps=40",  # so that a run can be made longer
    "experiment=smoke",
    "data=mixture",
    "model.width=8",
    "model.layers=1",
    "data.sequence_length=8",
    "run.threads=1",
    "logger=none",
    "train.steps=10",
    "checkpoint.every_steps=2",
    "checkpoint.keep_last=10",
    "eval.every_steps=5",
    "eval.batches=1",
]
STEPS = 10


def run(where: Path, *words: str, status: int | None = 0) -> str:
    """Run `python -m runner WORDS` in `where` and return its output.

    Check that it ends with `status`, if that is given.
    """
    preload()
    outcome = fork_run(list(words), where)
    assert status is None or outcome.status == status, (
        f"{' '.join(words)} ended with {outcome.status}: {outcome.output}"
    )
    assert "Traceback" not in outcome.output, outcome.output
    return outcome.output


def killed(where: Path, *words: str, rng: random.Random, times: int = 2, latest: int = 60) -> None:
    """Run the command and send SIGKILL at random changes of files. The command may finish first."""
    preload()
    for _ in range(times):
        outcome = fork_run(list(words), where, rng.randint(1, latest))
        assert outcome.status in (0, -signal.SIGKILL), outcome.output


def made(root: Path, mark: str = "-at") -> Path:
    """Return the only branch in a directory of runs."""
    (found,) = [path for path in root.iterdir() if mark in path.name and not path.name.startswith(".")]
    return found


def records(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def of_steps(run_dir: Path, key: str) -> dict[int, Any]:
    """Return a value of each training step, by step."""
    return {record["step"]: record[key] for record in records(run_dir) if "loss" in record}


def hashes(run_dir: Path) -> dict[str, str]:
    """Return the digest of every file of a run except pins, by its path."""
    files = (path for path in run_dir.rglob("*") if path.is_file() and path.suffix != ".pinned")
    return {str(path.relative_to(run_dir)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def assert_same(one: Path, other: Path) -> None:
    """Check that metrics are the same bytes, and the newest checkpoints the same tensors and train state."""
    assert (one / "metrics.jsonl").read_bytes() == (other / "metrics.jsonl").read_bytes()
    newest = [str(max((path / "checkpoints").glob("step_????????"))) for path in (one, other)]
    run(one, "checkpoints", "--diff", *newest)

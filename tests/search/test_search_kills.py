"""A real search whose processes are killed: the same table, decisions and bytes as without kills."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
from new_seeds import new_seed
from runs import PATIENCE_S, ROOT, TINY

SEARCH = ["search=asha", "optimizer.lr=log(1e-4,1e-2)", "search.trials=4", "search.rungs=[2,4]", "eval.batches=1"]
KILLS = 6


def command(root: Path, *words: str) -> list[str]:
    given = [*TINY, *SEARCH, f"run.root={root}", "checkpoint.every_steps=1", "eval.every_steps=2", *words]
    return [sys.executable, "-m", "runner", "-m", *given]


def outcome(root: Path) -> tuple[dict[str, Any], list[Any], dict[str, bytes]]:
    """Return the table without paths, the decisions, and the records of every run."""
    (record,) = root.glob("*/search.json")
    words = [sys.executable, "-m", "runner", "search", str(record.parent)]
    table = json.loads(subprocess.run([*words, "--json"], capture_output=True, check=True, cwd=ROOT).stdout)
    subprocess.run([*words, "--replay"], check=True, cwd=ROOT)
    journal = map(json.loads, (record.parent / "journal.jsonl").read_text().splitlines())
    decided = [
        (entry["entry"], entry["trial"], entry.get("rung"), entry.get("values"))
        for entry in journal
        if entry["entry"] in ("start", "promote")
    ]
    metrics = {path.parent.name: path.read_bytes() for path in sorted(root.glob("*/metrics.jsonl"))}
    return json.loads(json.dumps(table).replace(str(root), "")), decided, metrics


def kill_one(command: psutil.Popen, random: Random) -> None:
    try:
        random.choice([command, *command.children(recursive=True)]).send_signal(signal.SIGKILL)
    except psutil.NoSuchProcess:
        pass


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_search_that_is_killed_is_the_one_that_was_left_alone(tmp_path: Path) -> None:
    """Kill the command, a slot or its trial at any moment. A promoted run equals one that was never paused."""
    random, deadline = Random(f"search {new_seed()}"), time.monotonic() + PATIENCE_S
    subprocess.run(command(tmp_path / "alone"), cwd=ROOT, check=True, capture_output=True)
    for left in reversed(range(KILLS + 1)):
        process = psutil.Popen(command(tmp_path / "killed"), cwd=ROOT, stdout=subprocess.DEVNULL)
        if left:
            time.sleep(random.uniform(0.5, 8.0))
            kill_one(process, random)
        status = process.wait(PATIENCE_S)
        assert time.monotonic() < deadline
    assert status == 0
    alone, killed = outcome(tmp_path / "alone"), outcome(tmp_path / "killed")
    assert killed == alone
    assert len(alone[2]) == 4
    best = Path(str(tmp_path / "alone") + alone[0]["best"]["run"])
    point = [f"{key}={value}" for key, value in alone[0]["best"]["values"].items()]
    plain = [sys.executable, "-m", "runner", *TINY, *point, "train.steps=4", "eval.batches=1", "eval.every_steps=2"]
    subprocess.run([*plain, f"run.dir={tmp_path}/plain"], cwd=ROOT, check=True, capture_output=True)
    assert (tmp_path / "plain" / "metrics.jsonl").read_bytes() == (best / "metrics.jsonl").read_bytes()

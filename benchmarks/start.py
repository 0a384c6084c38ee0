"""Time a command until it starts its work, against the imports alone.

Every pair is taken one after the other, in turns, so that other work on the machine slows both.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import Table, table

TURNS = 7
EMPTY_APP = """\
import hydra

@hydra.main(config_path=None, version_base="1.3")
def main(config):
    pass

main()
"""


def seconds(*command: str, cwd: Path) -> float:
    """Return the duration of a command from its start to its end."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *command], cwd=cwd, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def first_step(cwd: Path) -> float:
    """Return the seconds from the start of a new run to its first line in metrics.jsonl, with data prepared."""
    run = cwd / f"run-{time.monotonic_ns()}"
    metrics = run / "metrics.jsonl"
    overrides = ["experiment=smoke", "eval.every_steps=0", f"run.dir={run}"]
    start = time.perf_counter()
    command = [sys.executable, "-m", "runner", *overrides]
    process = subprocess.Popen(command, cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (metrics.exists() and metrics.stat().st_size) and process.poll() is None:
        time.sleep(0.002)
    duration = time.perf_counter() - start
    if process.wait() != 0:
        raise RuntimeError(f"the run in {run} failed")
    return duration


def compare(found: Table, what: str, ours: Callable[[], float], theirs: Callable[[], float], goal: float) -> None:
    """Add the medians of both sides and of their ratio."""
    ours(), theirs()  # files into the page cache
    add_pairs(found, what, [(ours(), theirs()) for _ in range(TURNS)], at_most=goal)


def add_pairs(found: Table, what: str, pairs: Sequence[tuple[float, float]], **goal: Any) -> None:
    """Add the medians of pairs of seconds, ours and the peer's, and of their ratios."""
    for column, values in zip(("ours", "peer"), zip(*pairs, strict=True), strict=True):
        found.add(what, column, statistics.median(values), "s")
    found.add(what, "ratio", statistics.median(own / peer for own, peer in pairs), **goal)


def main() -> None:
    """Measure the ratios."""
    found = table("start")
    with tempfile.TemporaryDirectory() as folder:
        cwd = Path(folder)
        (cwd / "empty.py").write_text(EMPTY_APP)

        def empty_help() -> float:
            return seconds("empty.py", "--help", cwd=cwd)

        def imports() -> float:
            return seconds("-c", "import torch, hydra", cwd=cwd)

        def run(*arguments: str) -> Callable[[], float]:
            return lambda: seconds("-m", "runner", *arguments, cwd=cwd)

        show, peer = run("data=mixture", "--cfg", "job"), "an empty Hydra app's `--help`"
        compare(found, f"`--help` / {peer}", run("--help"), empty_help, 1.2)
        compare(found, f"`--cfg job` / {peer}", show, empty_help, 1.2)
        first = "start to the first line of metrics / `import torch, hydra`"
        compare(found, first, lambda: first_step(cwd), imports, 1.3)


if __name__ == "__main__":
    main()

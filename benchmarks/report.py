"""Time a report of 1,000 runs of 1,000 steps, and of one run of 1,000,000, against orjson over the same files.

The files are as a mixture of two sources writes them. The whole command is timed, from the start of Python to the page,
in turns with a process that only parses every line of the same files.
"""

from __future__ import annotations

import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.results import Table, table
from benchmarks.timing import seconds
from runner.config.composition import compose

TURNS = 3
PARSE = """\
import pathlib, sys, orjson
for path in pathlib.Path(sys.argv[1]).rglob("*.jsonl"):
    with path.open("rb") as file:
        for line in file:
            orjson.loads(line)
"""


def records(steps: int, seed: int) -> Iterator[str]:
    """Yield the lines of a metrics.jsonl."""
    draw = random.Random(seed)
    for step in range(1, steps + 1):
        loss = 5 / (1 + step / 300) + draw.random() / 10
        record: dict[str, Any] = {
            "step": step,
            "loss": loss,
            "lr": 1e-3 * min(1, step / 100),
            "samples_seen": step * 32,
        }
        record |= {"tokens_seen": step * 16384, "grad_norm": draw.random(), "digest": f"{step:032x}"}
        sources = {"code": {"samples": step * 20, "tokens": step * 10240, "epochs": step / 100}}
        sources["prose"] = {"samples": step * 12, "tokens": step * 6144, "epochs": step / 200}
        by_source = {"code": loss * 1.1, "prose": loss * 0.9}
        yield json.dumps({**record, "sources": sources, "loss_by_source": by_source})
        if step % 50 == 0:
            yield json.dumps({"step": step, "eval_loss": loss, "eval_loss_by_source": by_source})


def write_run(path: Path, config: str, steps: int, seed: int) -> None:
    """Write a finished run, with its timings."""
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(config.replace("seed: 0\n", f"seed: {seed % 4}\n"))
    (path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in records(steps, seed)))
    timing = {"samples_per_s": 300.0, "tokens_per_s": 1.5e5, "step_s": 0.1, "compute_s": 0.09, "data_wait_s": 0.01}
    timings = [json.dumps({"step": step, "time": 1e9 + step / 10, **timing}) for step in range(10, steps + 1, 10)]
    (path / "timings.jsonl").write_text("".join(f"{line}\n" for line in timings))
    (path / "status.json").write_text(json.dumps({"state": "finished", "step": steps, "total": steps}))
    (path / "finished.json").write_text(json.dumps({"steps": steps}))
    attempt: dict[str, Any] = {
        "attempt": 1,
        "start_step": 0,
        "end_step": steps,
        "checkpoint_step": steps,
        "steps_lost": 0,
    }
    attempt |= {"cause": "finished", "started": 1e9, "ended": 1e9 + steps / 10, "kept_s": steps / 10}
    (path / "attempts.jsonl").write_text(json.dumps({**attempt, "seconds": {"steps": steps / 10}}) + "\n")


def measure(found: Table, root: Path, runs: int, steps: int, limit_s: float) -> None:
    """Add medians, their ratio, and the size of the page."""
    temperatures = [compose(["data=mixture", f"sampler.temperature={t}", "seed=0"]).text for t in (1, 2, 3)]
    for number in range(runs):
        write_run(root / f"run{number:04d}", temperatures[number // 4 % 3], steps, number)

    pairs = [
        (cost("-m", "runner", "report", str(root)), cost("-c", PARSE, str(root)))  # in turns
        for _ in range(TURNS)
    ]
    megabytes = (root / "report.html").stat().st_size / 1e6
    ours, parsing = (
        [statistics.median(column) for column in zip(*each, strict=True)] for each in zip(*pairs, strict=True)
    )
    ratio = statistics.median(own[1] / other[1] for own, other in pairs)
    row = f"{runs:,} x {steps:,} steps"
    found.add(row, "CPU", ours[1], "s", at_most=limit_s)
    found.add(row, "parsing every line with orjson, CPU", parsing[1], "s")
    found.add(row, "ratio", ratio)
    found.add(row, "page", megabytes, "MB", at_most=20)


def cost(*words: str) -> tuple[float, float]:
    """Return the seconds that a Python process takes, and its CPU seconds, which other work changes less."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    wall = seconds(lambda: subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure all figures."""
    found = table("report")
    with tempfile.TemporaryDirectory() as folder:
        measure(found, Path(folder) / "many", 1000, 1000, 10)
        measure(found, Path(folder) / "long", 1, 1_000_000, 5)


if __name__ == "__main__":
    main()

"""Measure many runs: composing and checking 1,000 jobs, skipping 1,000 finished ones, `status` over 1,000 runs.

CPU seconds of whole commands, the start of Python included: the plan of a sweep (`-n`) of which no run exists yet; the
same when all its runs have finished, and when all are in the middle; `runner status` over them. The peer is plain
Hydra, which composes one job of them in a process that has imported it, in turns with the commands.
"""

from __future__ import annotations

import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import hydra

from benchmarks.results import table
from runner.config.composition import Composed, Composer
from runner.config.search_path import conf_dir

RUNS, TURNS = 1000, 3
SETTINGS = ("experiment=smoke", "data=mixture")
SEEDS = f"seed=range({RUNS})"
RECORDS = ("attempts.jsonl", "metrics.jsonl", "timings.jsonl", "attempt.json", "order.json", "code.json")
CASES = {  # command, where it is run, goal in seconds
    f"{RUNS:,} jobs composed and checked": (("-m", "-n", *SETTINGS, SEEDS), "none", 5.0),
    f"{RUNS:,} jobs of 8 models and lengths": (
        ("-m", "-n", *SETTINGS, "model=gpt,gpt_tiny", "data.sequence_length=8,16,32,64", f"seed=range({RUNS // 8})"),
        "none",
        5.0,
    ),
    f"{RUNS:,} finished runs given again": (("-m", *SETTINGS, SEEDS), "finished", 8.0),
    f"{RUNS:,} unfinished runs planned": (("-m", "-n", *SETTINGS, SEEDS), "unfinished", None),
    f"status over {RUNS:,} runs": (("status", "outputs"), "finished", 0.5),
}


def cpu_of(arguments: tuple[str, ...], where: Path) -> float:
    """Return the CPU seconds of a command and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "runner", *arguments], cwd=where, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def plain_hydra() -> float:
    """Return the CPU seconds in which Hydra composes one job."""
    before = time.process_time()
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        hydra.compose("config", [*SETTINGS, "seed=1"], return_hydra_config=True)
    return time.process_time() - before


def fill(where: Path, trained: Path, finished: bool) -> None:
    """Create directories for the runs of the sweep: copies of `trained`, without weights, at step 20 or 10 of 20."""
    for job in Composer().jobs([*SETTINGS, SEEDS, f"run.root={where / 'outputs'}"]):
        copy_run(trained, job, finished)


def copy_run(trained: Path, job: Composed, finished: bool) -> None:
    """Create the directory of one run."""
    for step in (10, 20) if finished else (10,):
        name = f"checkpoints/step_{step:08d}"
        (job.run_dir / name).mkdir(parents=True)
        shutil.copy(trained / name / "manifest.json", job.run_dir / name)
    for folder in ("lease", "submission"):
        shutil.copytree(trained / folder, job.run_dir / folder)
    for name in RECORDS:
        shutil.copy(trained / name, job.run_dir)
    (job.run_dir / "config.yaml").write_text(job.text)
    status = json.loads((trained / "status.json").read_text())
    if finished:
        shutil.copy(trained / "finished.json", job.run_dir)
    else:
        status |= {"state": "interrupted", "cause": "interrupted", "step": 10}
    (job.run_dir / "status.json").write_text(json.dumps(status))


def main() -> None:
    """Measure each of `CASES`."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder)
        (made / "none").mkdir()
        command = [sys.executable, "-m", "runner", *SETTINGS, "run.dir=trained"]
        subprocess.run(command, cwd=made, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for state in ("finished", "unfinished"):
            fill(made / state, made / "trained", state == "finished")
        plain_hydra()
        found = table("sweep", "command")
        for what, (arguments, state, goal) in CASES.items():
            turns = [(cpu_of(arguments, made / state), plain_hydra()) for _ in range(TURNS)]
            ours, peer = (statistics.median(column) for column in zip(*turns, strict=True))
            ratio = statistics.median(own / other for own, other in turns)
            found.add(what, "CPU", ours, "s", at_most=goal)
            found.add(what, "Hydra composes one job", 1000 * peer, "ms")
            found.add(what, "a run / that", ratio / RUNS)


if __name__ == "__main__":
    main()

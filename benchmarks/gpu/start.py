"""Time a process from its start to its first step after a kill, against a script that resumes by hand."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.gpu import sizes
from benchmarks.gpu.report import Report
from benchmarks.gpu.runs import ROOT, SAVE, Run, held_words, kill
from benchmarks.gpu.saving import Training
from benchmarks.results import table
from benchmarks.start import add_pairs

SIZE = sizes.SIZE
TURNS = 2
BY_HAND = [sys.executable, "-m", "benchmarks.gpu.by_hand"]


def write_by_hand(folder: Path) -> Path:
    """Save the same model and optimizer with torch.save, after a step; return the file."""
    training, file = Training(folder / "by_hand", rows=SIZE.small_batch), folder / "by_hand.pt"
    training.step()
    content = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
    torch.save({**content, "options": SIZE.options, "tokens": training.batch["input_ids"]}, file)
    return file


def by_hand(path: Path) -> float:
    """Time the script until it has made a step, in seconds."""
    began = time.perf_counter()
    with subprocess.Popen([*BY_HAND, path], cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        took = time.perf_counter() - began
    if process.returncode or not line:
        raise RuntimeError(f"the script ended with status {process.returncode}")
    return took


def resumed(run: Run) -> float:
    """Time an attempt that resumes until it has made a step, in seconds."""
    began = time.perf_counter()
    process = run.start(SAVE + 1)
    try:
        run.wait_until_held(process)
        return time.perf_counter() - began
    finally:
        kill(process)


def first_step(folder: Path) -> None:
    run = Run(folder / "start", [*held_words(folder, SIZE), "train.steps=1000"])
    run.kill_at(SAVE + 1)
    file = write_by_hand(folder)
    pairs = [(resumed(run), by_hand(file)) for _ in range(TURNS)]
    if any(step != SAVE for step in run.resumed_at()[1:]):
        raise RuntimeError(f"the attempts began at steps {run.resumed_at()}")
    size = f"{file.stat().st_size / 1e6:,.0f} MB"
    add_pairs(table("gpu-start"), f"resume from {size} to the first step / a script by hand", pairs)


def main(report: Report, folder: Path) -> None:
    report.step("first step after a kill", lambda: first_step(folder))

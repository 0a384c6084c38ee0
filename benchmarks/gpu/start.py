"""The time from the start of a process to its first step after a kill, beside a script that resumes by hand."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.gpu import sizes
from benchmarks.gpu.report import Report
from benchmarks.gpu.runs import HELD, ROOT, Run, kill
from benchmarks.results import table
from runner.models.loss import next_token_loss

SIZE = sizes.SIZE
SAVED = 10
TURNS = 2
BY_HAND = [sys.executable, "-m", "benchmarks.gpu.by_hand"]


def write_by_hand(path: Path) -> None:
    """Save the same model and optimizer with torch.save, after a step."""
    shape = {name: getattr(SIZE, name) for name in ("layers", "heads", "width")}
    options = {"vocab_size": SIZE.vocabulary, "sequence_length": SIZE.length, **shape}
    model = SIZE.model().to(sizes.DEVICE)
    optimizer = sizes.fused_adamw(model)
    batch = sizes.batch(SIZE.small_batch)
    with sizes.autocast():
        loss = next_token_loss(model, batch).mean()
    torch.autograd.backward(loss)
    optimizer.step()
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**content, "options": options, "tokens": batch["input_ids"]}, path)


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
    process = run.start(SAVED + 1)
    try:
        run.wait_until_held(process)
        return time.perf_counter() - began
    finally:
        kill(process)


def first_step(folder: Path) -> None:
    run = Run(
        folder / "start",
        [
            *sizes.data(folder, SIZE),
            "checkpoint.keep_last=1",
            *("train.steps=1000", f"checkpoint.every_steps={SAVED}", "scheduler.warmup_steps=0", *HELD),
            *(f"train.batch_size={SIZE.small_batch}", "train.precision=bfloat16", "+optimizer.fused=true"),
        ],
    )
    run.kill_at(SAVED + 1)
    file = folder / "by_hand.pt"
    write_by_hand(file)
    pairs = [(resumed(run), by_hand(file)) for _ in range(TURNS)]
    if any(step != SAVED for step in run.resumed_at()[1:]):
        raise RuntimeError(f"the attempts began at steps {run.resumed_at()}")
    found, row = table("gpu-start"), f"a state of {file.stat().st_size / 1e6:,.0f} MB"
    for column, values in zip(("ours", "by hand"), zip(*pairs, strict=True), strict=True):
        found.add(row, column, statistics.median(values), "s")
    found.add(row, "ratio", statistics.median(ours / peer for ours, peer in pairs))


def main(report: Report, folder: Path) -> None:
    report.step("first step after a kill", lambda: first_step(folder))

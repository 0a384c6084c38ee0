"""Measure tokens per second of the runner's loop against a hand-written loop, data wait, and rank-invariant steps."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import loop
from benchmarks.gpu import sizes
from benchmarks.gpu.report import Report
from benchmarks.ranks import sides
from benchmarks.results import table
from benchmarks.timing import seconds
from runner.config.composition import compose
from runner.config.schema import Config
from runner.rundir.paths import RunDir
from runner.system.distributed import World

SIZE = sizes.SIZE
WORKERS = (0, 4)
MICRO_BATCHES = (1, 4)
TRAINING = [
    *("train.steps=1000000", "scheduler=constant"),
    *(f"train.batch_size={SIZE.batch}", "eval.every_steps=0", "logger=none"),
]


def config_of(*words: str) -> Config:
    return compose([*TRAINING, *words]).config


def rate(step: Callable[[], object], steps: int) -> float:
    """Time `steps` steps until the device is idle, in seconds."""

    def turn() -> None:
        for _ in range(steps):
            step()
        sizes.synchronize()

    return seconds(turn)


def matrix_rate() -> float:
    """Measure the operations per second of a large matrix product in bfloat16."""
    one, two = (torch.randn(SIZE.matrix, SIZE.matrix, device=sizes.DEVICE, dtype=torch.bfloat16) for _ in range(2))
    times = [rate(lambda: one @ two, 10) for _ in range(4)]
    return 10 * 2 * SIZE.matrix**3 / min(times[1:])


def against_by_hand(folder: Path) -> None:
    """Measure tokens per second and MFU by hand, by the runner, and with saves, each against the one before."""
    config = config_of(*sizes.data(folder, SIZE))
    plain, session = loop.ours(config, RunDir(folder / "plain"))
    saving, saving_session = loop.ours(config, RunDir(folder / "saving"), save_every=SIZE.steps)
    loops = {"by hand": loop.by_hand(config, sizes.DEVICE, fused=True), "runner": plain, "saving": saving}
    turns: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(SIZE.turns + 1):
        for name, step in loops.items():
            took = rate(step, SIZE.steps)
            if name == "saving":
                saving_session.trainer.manager.wait()  # the disk is not what is measured, nor may it slow the others
            if turn:  # the first compiles, allocates and begins to save
                turns[name].append(took)
    for opened in (session, saving_session):
        opened.close()
    found, tokens = table("gpu-speed"), SIZE.steps * SIZE.batch * SIZE.length
    peak, measured = sizes.peak(), matrix_rate()
    rows: loop.Rows = {
        "by hand": ("by hand", {}),
        "runner": ("runner, with metrics, digest and status; ratio to by hand", sizes.goal(at_least=0.98)),
        "saving": (f"with a save every {SIZE.steps} steps; ratio to none", sizes.goal(at_least=0.99)),
    }
    loop.add_speeds(found, turns, tokens, rows)
    for name, (row, _) in rows.items():
        operations = SIZE.operations * tokens / statistics.median(turns[name])
        found.add(row, "of a matrix product's speed", 100 * operations / measured, "%")
        if peak:
            found.add(row, "MFU", 100 * operations / peak, "%")
    found.add("a matrix product in bfloat16", "TFLOP/s", measured / 1e12, "TFLOP/s")


def data_wait(folder: Path) -> None:
    """Measure how long a step waits for samples that take a millisecond each."""
    found = table("gpu-data-wait", "samples of a millisecond")
    options = f"_target_: benchmarks.gpu.models.Zipped, length: {SIZE.length}, vocabulary: {SIZE.vocabulary}"
    for workers in WORKERS:
        sizes.free()
        config = config_of(
            *("data=own", f"+data.sources.zipped={{{options}}}", f"data.num_workers={workers}"),
            *(*SIZE.overrides, *sizes.PRECISION),
        )
        step, session = loop.ours(config, RunDir(folder / f"workers-{workers}"))
        rate(step, 5)
        session.trainer.meter.take()
        rate(step, SIZE.steps)
        times = session.trainer.meter.take()
        session.close()
        row = f"{workers} workers, batch of {SIZE.batch}"
        found.add(row, "wait in a step", 1000 * times["data_wait_s"], "ms")
        found.add(row, "of the step", 100 * times["data_wait_s"] / times["step_s"], "%")


def invariant() -> None:
    """Compare a rank-invariant step with plain accumulation over the same micro-batches."""
    found = table("gpu-invariant", "a rank-invariant step")
    for micro_batches in MICRO_BATCHES:
        sizes.free()
        sequences = max(SIZE.batch // micro_batches, 1)
        steps = SIZE.steps // 5
        turns = sides(World(), SIZE.model, sizes.batch(sequences), micro_batches, steps, sizes.DEVICE, sizes.autocast)
        times = [{name: rate(turn, 1) for name, turn in turns.items()} for _ in range(SIZE.turns + 1)][1:]
        row = f"{micro_batches} micro-batches of {sequences}"
        found.add(row, "usual step", 1000 * statistics.median(each["usual"] for each in times) / steps, "ms")
        ratio = statistics.median(each["invariant"] / each["usual"] for each in times)
        found.add(row, "ratio", ratio, **sizes.goal(at_most=1.02))


def main(report: Report, folder: Path) -> None:
    """Measure one table after the other."""
    report.step("tokens a second", lambda: against_by_hand(folder))
    report.step("rank-invariant steps", invariant)
    report.step("data wait", lambda: data_wait(folder))

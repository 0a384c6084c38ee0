"""How far the share of useful time that `runner doctor` predicts is from a measured one: a run killed again and again.

Every attempt is a process that is killed by SIGKILL. Its start takes START_S seconds and a step at least STEP_S, by
pauses, so that other work on the machine hardly matters. The kill times are exponential, one from each of KILLS equal
parts of the distribution in random order: a few then say as much as many independent ones. Useful time is what
the report finds, divided by the time that the processes lived.
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.results import table
from runner.checkpoint.prediction import KilledRun
from runner.cli.kills import recorded
from runner.models.loss import next_token_loss
from runner.report import goodput
from runner.report.runs import read_run
from runner.rundir.paths import RunDir

ROOT = Path(__file__).resolve().parents[1]
KILLS, MEAN_S = 20, 20.0
START_S, STEP_S, EVERY_STEPS = 8.0, 0.1, 20
GOAL = 5.0  # points
BEGAN = "BENCHMARK_BEGAN"  # when the process of an attempt was started, on the monotonic clock
RUN = ["experiment=smoke", "train.steps=100000", "eval.every_steps=100000", f"checkpoint.every_steps={EVERY_STEPS}"]


class LongStart:
    """A callback that lets a start take START_S seconds."""

    def on_start(self, _context: Any) -> None:
        """Wait for what is left of them."""
        time.sleep(max(float(os.environ[BEGAN]) + START_S - time.monotonic(), 0.0))


def slow_loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The usual loss, STEP_S seconds later."""
    time.sleep(STEP_S)
    return next_token_loss(model, batch)


def kill_times(numbers: random.Random) -> list[float]:
    """Seconds from the start of each process to its kill."""
    drawn = [-MEAN_S * math.log1p(-(part + numbers.random()) / KILLS) for part in range(KILLS)]
    numbers.shuffle(drawn)
    return drawn


def attempt(folder: Path, lives_s: float | None) -> float:
    """Make an attempt that is killed after so many seconds, or once it has saved anew; how long it lived."""
    run, began = RunDir(folder / "run"), time.monotonic()
    environment = {**os.environ, BEGAN: str(began), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    own = ["train.loss._target_=benchmarks.goodput.slow_loss", "+callbacks.start._target_=benchmarks.goodput.LongStart"]
    before = run.newest_step()
    with (folder / "log.txt").open("a") as log:
        words = [*RUN, *own, f"run.dir={run.path}"]
        process = subprocess.Popen([sys.executable, "-m", "runner", *words], env=environment, stdout=log, stderr=log)
        while (run.newest_step() <= before) if lives_s is None else (time.monotonic() < began + lives_s):
            if process.poll() is not None:
                sys.exit(f"an attempt ended by itself:\n{(folder / 'log.txt').read_text()[-2000:]}")
            time.sleep(0.005)
        process.kill()
        process.wait()
    return time.monotonic() - began


def main() -> None:
    """Take both shares."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        attempt(folder, None)  # the first start restores nothing, and does not count
        lived_s = sum(attempt(folder, seconds) for seconds in kill_times(random.Random(1)))
        attempt(folder, None)  # it closes the records of the one before
        run = RunDir(folder / "run")
        seconds = goodput.of_run(read_run(run, folder, 100).attempts[1:])
        times = recorded(run)
    assert times.step_s is not None
    assert times.stall_s is not None
    assert times.start_s is not None
    model = KilledRun(KILLS / lived_s, times.start_s, times.stall_s, times.commit_s, times.steps_share)
    measured = 100 * seconds["useful"] / lived_s
    predicted = 100 * model.useful_share(EVERY_STEPS * times.step_s)
    print(f"   {KILLS} kills in {lived_s:.0f} s; {json.dumps({key: round(value) for key, value in seconds.items()})}")
    print(f"   a start {times.start_s:.2f} s, a step {times.step_s:.3f} s, a save {times.stall_s:.3f} s")
    found, row = table("goodput"), f"a run killed {KILLS} times"
    found.add(row, "measured", measured, "%")
    found.add(row, "predicted", predicted, "%")
    found.add(row, "difference", abs(measured - predicted), "points", at_most=GOAL)


if __name__ == "__main__":
    main()

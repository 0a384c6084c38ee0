"""What a user's own parts cost: random draws of a dataset, a callback, a metric; each against the same without it.

Both sides run in turns in this process, and a figure is the median of the differences of the turns.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import Dataset

from benchmarks.loop import ours
from runner.config.composition import compose
from runner.data import StatefulDataLoader
from runner.rundir.paths import RunDir

TURNS, BATCH, BATCHES, CALLS = 21, 32, 50, 200


class Small(Dataset[Any]):
    """Small tensors, fetched one by one."""

    def __init__(self, draws_nothing: bool) -> None:
        self.draws_nothing = draws_nothing
        self.x = torch.randn(BATCH * BATCHES * (TURNS + 2), 16)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.x[index]


class Hook:
    """A callback that logs one number."""

    def on_step_end(self, context: Any) -> None:
        context.log("number", 1.0)


class Mean:
    """A metric: the mean of the logits."""

    def __init__(self) -> None:
        self.total = 0.0

    def update(self, preds: torch.Tensor) -> None:
        self.total += float(preds[0, 0, 0])

    def compute(self) -> float:
        return self.total


def seconds(action: Callable[[], Any]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def difference(costly: Callable[[], Any], plain: Callable[[], Any]) -> float:
    """The median of the differences in seconds, after one turn to warm up."""
    costly(), plain()
    return statistics.median(seconds(costly) - seconds(plain) for _ in range(TURNS))


def seeding() -> float:
    """Microseconds a sample by which the generators are seeded before it and put back after its batch."""
    loaders = [
        StatefulDataLoader(Small(plain), BATCH, config=SimpleNamespace(num_workers=0)) for plain in (False, True)
    ]
    costly, plain = (iter(loader) for loader in loaders)

    def take(batches: Any) -> Callable[[], Any]:
        return lambda: [next(batches) for _ in range(BATCHES)]

    return 1e6 * difference(take(costly), take(plain)) / (BATCH * BATCHES)


def callback(folder: Path) -> float:
    """Microseconds a step for a callback with `on_step_end`."""
    both = []
    for name, more in (("hook", ["callbacks.hook._target_=benchmarks.extensions.Hook"]), ("none", [])):
        _, session = ours(compose(["eval.every_steps=0", "logger=none", *more]).config, RunDir(folder / name))
        both.append(session)
    calls = [lambda one=one: [one.trainer.callbacks.step_end(1, {"step": 1}) for _ in range(CALLS)] for one in both]
    cost = 1e6 * difference(calls[0], calls[1]) / CALLS
    for session in both:
        session.close()
    return cost


def metric(folder: Path) -> float:
    """Microseconds a batch of an evaluation for a metric with a state."""
    both, batches = [], 8
    for name, more in (("metric", ["eval.metrics.mean._target_=benchmarks.extensions.Mean"]), ("none", [])):
        words = ["experiment=smoke", "eval.every_steps=1", f"eval.batches={batches}", "logger=none", *more]
        _, session = ours(compose(words).config, RunDir(folder / name))
        both.append(session)
    calls = [lambda one=one: one.trainer.evaluation.run(1, lambda: False) for one in both]
    cost = 1e6 * difference(calls[0], calls[1]) / batches
    for session in both:
        session.close()
    return cost


def main() -> None:
    """Print the three costs."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    print(f"random draws of a dataset  {seeding():6.1f} µs a sample (0 with draws_nothing, or prefetch='thread')")
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        print(f"a callback's on_step_end   {callback(Path(first)):6.1f} µs a step")
        print(f"a metric with a state      {metric(Path(second)):6.1f} µs a batch")


if __name__ == "__main__":
    main()

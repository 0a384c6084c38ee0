"""Measure a user's own parts: random draws of a dataset, a callback, a metric, each against the same run without it.

Both sides run in turns in this process, and a figure is the median of the differences of the turns.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import Dataset

from benchmarks.loop import ours
from benchmarks.results import table
from benchmarks.timing import seconds
from exactdata import StatefulDataLoader
from runner.config.composition import compose
from runner.rundir.paths import RunDir
from runner.training.session import Session

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


def difference(costly: Callable[[], Any], plain: Callable[[], Any]) -> float:
    """Return the median of the differences in seconds, after one turn to warm up."""
    costly(), plain()
    return statistics.median(seconds(costly) - seconds(plain) for _ in range(TURNS))


def seeding() -> float:
    """Return the microseconds a sample to seed the generators before it and restore them after its batch."""
    loaders = [
        StatefulDataLoader(Small(plain), BATCH, config=SimpleNamespace(num_workers=0)) for plain in (False, True)
    ]
    costly, plain = (iter(loader) for loader in loaders)

    def take(batches: Any) -> Callable[[], Any]:
        return lambda: [next(batches) for _ in range(BATCHES)]

    return 1e6 * difference(take(costly), take(plain)) / (BATCH * BATCHES)


def cost(folder: Path, words: list[str], part: str, action: Callable[[Session], Any], times: int) -> float:
    """Return the microseconds that the setting `part` adds to `action`, divided by `times`."""
    both = [
        ours(compose([*words, "logger=none", *more]).config, RunDir(folder / name))[1]
        for name, more in (("with", [part]), ("without", []))
    ]
    with_it, without = (partial(action, session) for session in both)
    found = 1e6 * difference(with_it, without) / times
    for session in both:
        session.close()
    return found


def callback(folder: Path) -> float:
    """Return the microseconds a step of a callback with `on_step_end`."""

    def steps(session: Session) -> None:
        for _ in range(CALLS):
            session.trainer.callbacks.step_end(1, {"step": 1})

    return cost(folder, ["eval.every_steps=0"], "callbacks.hook._target_=benchmarks.extensions.Hook", steps, CALLS)


def metric(folder: Path) -> float:
    """Return the microseconds a batch of an evaluation of a metric with a state."""
    batches = 8

    def evaluate(session: Session) -> None:
        assert session.trainer.evaluation is not None
        session.trainer.evaluation.run(1, lambda: False)

    words = ["experiment=smoke", "eval.every_steps=1", f"eval.batches={batches}"]
    return cost(folder, words, "eval.metrics.mean._target_=benchmarks.extensions.Mean", evaluate, batches)


def main() -> None:
    """Measure the three costs."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    found = table("extensions")
    draws = "random draws of a dataset fetched one by one, a sample (0 with `draws_nothing`)"
    found.add(draws, "cost", seeding(), "µs")
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        found.add("a callback with `on_step_end`, a step", "cost", callback(Path(first)), "µs")
        found.add("a metric with a state, a batch of an evaluation", "cost", metric(Path(second)), "µs")


if __name__ == "__main__":
    main()

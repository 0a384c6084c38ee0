"""Define the allowed range of each number in a config, for the config check and for the class that uses it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from runner.errors import UserError

MAX_COUNT = 2**40  # for counts, e.g. of steps: more than any machine can do, and far from overflow
MAX_BATCH = 2**31
MAX_SECONDS = 2**30


@dataclass(frozen=True)
class Bound:
    """The range of numbers from `least` to `most`.

    Both limits are included, unless `above` excludes `least` or `below` excludes `most`. If `most` is infinite, there
    is no upper limit.
    """

    least: float
    most: float
    above: bool = False
    below: bool = False

    def allows(self, value: float) -> bool:
        """Return whether `value` is in the range. Return False for nan and for integers too large for a float."""
        enough = self.least < value if self.above else self.least <= value
        return enough and (value < self.most if self.below else value <= self.most) and value != math.inf

    def __str__(self) -> str:
        """Format the range as `1 to 1024`, `0 or more` or `above 0`."""
        if self.most == math.inf:
            return f"above {self.least:g}" if self.above else f"{self.least:g} or more"
        if self.above:
            return f"above {self.least:g}, {'below ' if self.below else 'at most '}{_written(self.most)}"
        return f"{self.least:g} to {_written(self.most)}"


BOUNDS = {
    "seed": Bound(0, 2**63 - 1),
    "train.steps": Bound(1, MAX_COUNT),
    "train.batch_size": Bound(1, MAX_BATCH),
    "train.grad_accum_steps": Bound(1, MAX_BATCH),
    "train.global_batch_size": Bound(1, MAX_BATCH),
    "train.peer_timeout_s": Bound(1, MAX_SECONDS),
    "train.hang_timeout_s": Bound(1, MAX_SECONDS),
    "eval.every_steps": Bound(0, MAX_COUNT),
    "eval.batches": Bound(1, MAX_COUNT),
    "eval.batch_size": Bound(1, MAX_BATCH),
    "run.threads": Bound(1, 1024),  # torch crashes when it starts more threads
    "run.lease_timeout_s": Bound(1, MAX_SECONDS),
    "data.sequence_length": Bound(1, MAX_COUNT),
    "data.vocab_size": Bound(2, MAX_COUNT),
    "data.num_workers": Bound(0, 1024),
    "data.prefetch_factor": Bound(1, 2**20),
    "checkpoint.every_steps": Bound(1, MAX_COUNT),
    "checkpoint.keep_last": Bound(1, MAX_COUNT),
    "checkpoint.keep_every_steps": Bound(1, MAX_COUNT),
    "checkpoint.keep_best": Bound(0, MAX_COUNT),
    "checkpoint.min_interval_s": Bound(0, MAX_SECONDS),
    "checkpoint.max_interval_s": Bound(0, MAX_SECONDS),
    "train.epochs": Bound(0, MAX_COUNT, above=True),
    "eval.every_epochs": Bound(0, MAX_COUNT, above=True),
    "checkpoint.every_epochs": Bound(0, MAX_COUNT, above=True),
    "train.clip_norm": Bound(0, math.inf, above=True),
    "checkpoint.every_minutes": Bound(0, MAX_SECONDS, above=True),
    "sampler.temperature": Bound(0, math.inf, above=True),
}
WEIGHT = Bound(0, math.inf)
OTHERS = {
    "train.ema_decay": Bound(0, 1, above=True, below=True),
    "eval.sets.NAME.every_steps": Bound(0, MAX_COUNT),
    "eval.sets.NAME.batches": Bound(1, MAX_COUNT),
    "eval.sets.NAME.batch_size": Bound(1, MAX_COUNT),
    "early_stopping.patience": Bound(1, math.inf),
    "early_stopping.min_delta": Bound(0, math.inf),
    "scheduler.warmup_steps": Bound(0, math.inf),
    "scheduler.total_steps": Bound(1, math.inf),
    "scheduler.min_ratio": Bound(0, 1),
    "scheduler.decay_steps": Bound(1, math.inf),
    "phases.NAME.start_step": Bound(0, MAX_COUNT),
    "phases.NAME.temperature": Bound(0, math.inf, above=True),
    "phases.NAME.lr_scale": Bound(0, 1e15),  # so that the product of two factors fits into a float32
    **dict.fromkeys(("sampler.weights", "sampler.max_epochs", "data.weights", "phases.NAME.weights"), WEIGHT),
}
"""Ranges that other modules check, together with other settings. A dictionary's range applies to each value."""
SEARCH = {
    "search.trials": Bound(1, 2**20),
    "search.reduction": Bound(2, 1024),
    "search.seed": Bound(0, 2**63 - 1),
    "search.repeats": Bound(1, 1024),
    "search.keep": Bound(1, 2**20),
}
"""Ranges of search settings. Only commands have these settings. Runs do not."""


def error(key: str, value: float | None) -> str | None:
    """Return an error line if the value of `key` is out of range. The schema checks whether null is allowed."""
    bound = BOUNDS[key]
    if value is None or bound.allows(value):
        return None
    if bound.above:
        limit = "" if bound.most == math.inf else f", {_written(bound.most)} or less"
        return f"{key}={value} must be a finite number above {bound.least:g}{limit}"
    allowed = f"{_written(bound.most)} or less" if value > bound.most else f"{bound.least:g} or more"
    return f"{key}={value} must be {'' if isinstance(value, int) or math.isfinite(value) else 'finite and '}{allowed}"


def check(values: Mapping[str, float | None]) -> None:
    """Check the arguments of a class, passed by config key.

    Raises:
        UserError: at least one value is out of its range.
    """
    for key, value in values.items():
        if line := error(key, value):
            raise UserError(line)


def of_intervals(least_s: float, most_s: float) -> str:
    """Return the error message for a minimum interval between saves that exceeds the maximum interval."""
    return f"checkpoint.max_interval_s={most_s} must be at least checkpoint.min_interval_s={least_s}"


def _written(value: float) -> str:
    """Format an upper limit. Powers of two are written like `2**40`."""
    if value == 2**63 - 1:
        return "2**63 - 1"
    exponent = int(value).bit_length() - 1
    return f"2**{exponent}" if value >= 2**20 and value == 2**exponent else f"{value:g}"

"""Decide whether evaluation results end a run before its last step."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from runner.bounds import OTHERS


class Best(Enum):
    """Whether the lowest or the highest value of a metric is the best."""

    min = "min"
    max = "max"


HIGH = frozenset("accuracy acc f1 auc auroc precision recall iou dice bleu rouge r2 score".split())
LOW = frozenset("loss error perplexity ppl mse mae rmse wer cer".split())
"""Words in a metric's name that suggest that high, or low, values are good."""


def against_its_name(part: str, metric: str | None, mode: Best | None) -> Iterator[str]:
    """Yield a warning if a metric's name suggests that `mode` should be reversed.

    Args:
        part: the config section, such as `search`, that contains `metric` and `mode`.
        metric: the name of the metric.
        mode: whether the lowest or the highest value is treated as the best.
    """
    words = set(re.findall(r"[a-z0-9]+", (metric or "").lower()))
    for wrong, other, named, unnamed in ((Best.min, Best.max, HIGH, LOW), (Best.max, Best.min, LOW, HIGH)):
        if mode is wrong and words & named and not words & unnamed:
            ends = ("lowest", "high") if wrong is Best.min else ("highest", "low")
            yield (
                f"{part}.mode={wrong.value} takes the {ends[0]} {metric} as the best: set {part}.mode={other.value} if "
                f"{ends[1]} values are good"
            )


@dataclass
class EarlyStoppingConfig:
    """Options of early stopping, explained in conf/early_stopping/default.yaml. If all are None, it is disabled."""

    metric: str | None = None
    mode: Best | None = None
    patience: int | None = None
    min_delta: float | None = None
    above: float | None = None

    @property
    def is_set(self) -> bool:
        """Return whether any option is set. If so, all options except `above` are required; see `option_errors`."""
        return any(getattr(self, each.name) is not None for each in fields(self))

    def option_errors(self) -> Iterator[str]:
        """Yield one line for each option that is missing or out of range."""
        missing = [name for name in ("metric", "mode", "patience", "min_delta") if getattr(self, name) is None]
        if missing and self.is_set:
            for each in fields(self):
                if (value := getattr(self, each.name)) is not None:
                    text = value.value if isinstance(value, Best) else value
                    yield (
                        f"early_stopping.{each.name}={text} has no effect without {', '.join(missing)}: choose "
                        "early_stopping=default, which sets them"
                    )
            return
        if self.metric is not None and not (self.metric.strip() and self.metric.isprintable()):
            yield f"early_stopping.metric={self.metric!r} must be a key of an evaluation's record, such as eval_loss"
        if self.patience is not None and not OTHERS["early_stopping.patience"].allows(self.patience):
            yield f"early_stopping.patience={self.patience} must be 1 or more evaluations"
        if self.min_delta is not None and not OTHERS["early_stopping.min_delta"].allows(self.min_delta):
            yield f"early_stopping.min_delta={self.min_delta:g} must be a number of at least 0"
        if self.above is not None and math.isnan(self.above):
            yield f"early_stopping.above={self.above:g} must be a number, or null for no bound"
        if self.above is not None and self.mode is Best.max:
            yield (
                f"early_stopping.above={self.above:g} is a bound for a metric that is to be low, with mode=min: "
                "set early_stopping.above=null"
            )


def stopped(options: EarlyStoppingConfig, evaluations: Iterable[Mapping[str, Any]]) -> str | None:
    """Return why these evaluations end the run, or None if they do not.

    Args:
        options: the criterion for stopping.
        evaluations: the run's evaluation records, in step order. Records without the metric are ignored. An evaluation
            at step 0 never ends a run.
    """
    if not options.is_set:
        return None
    assert options.metric is not None
    assert options.patience is not None
    assert options.min_delta is not None
    sign = -1.0 if options.mode is Best.max else 1.0
    best, best_step, waited = math.inf, 0, 0
    for record in evaluations:
        value, step = record.get(options.metric), record.get("step")
        if not isinstance(value, int | float) or isinstance(value, bool) or not isinstance(step, int):
            continue
        if options.above is not None and not value <= options.above and step > 0:
            return f"{options.metric} is {value:.6g} at step {step}, above {options.above:g}"
        if sign * value < best - options.min_delta:
            best, best_step, waited = sign * value, step, 0
            continue
        waited += 1
        if waited >= options.patience and step > 0:
            since = f"{sign * best:.6g} (step {best_step})" if best < math.inf else "any value"
            more = f" by more than {options.min_delta:g}" if options.min_delta else ""
            return f"{options.metric} has not improved on {since}{more} in {waited} evaluations"
    return None

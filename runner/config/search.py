"""Define the config group `search`: its options, their checks, and ranges in overrides."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from runner import bounds
from runner.config.early_stopping import Best
from runner.search.points import Dimension
from runner.search.rules import Algorithm

SHOWN = "-m search=asha 'optimizer.lr=log(1e-4,1e-2)' search.trials=27 search.rungs=[100,300,900]"
"""An example command for messages."""
RANGES = (
    "a range is log(1e-4,1e-2), interval(0,0.5), int(interval(1,8)) or range(2,10,2), and a list is choice(a,b) or a,b"
)
"""The syntax of ranges, for messages."""
_LOG = re.compile(r"\blog\(([^(),]+,[^(),]+)\)")
_KEY = "search.space."


@dataclass
class SearchConfig:
    """Options of a search, explained in conf/search/asha.yaml. If `kind` is None, there is no search."""

    kind: Algorithm | None = None
    space: dict[str, Any] = field(default_factory=dict)
    trials: int | None = None
    rungs: list[int] | None = None
    reduction: int = 3
    metric: str = "eval_loss"
    mode: Best = Best.min
    seed: int = 0
    repeats: int = 1
    keep: int = 1
    prune: bool = True

    def option_errors(self) -> Iterator[str]:
        """Yield one line for each option that is out of range or has no effect."""
        if self.kind is None:
            usual = SearchConfig()
            for each in fields(self):
                if getattr(self, each.name) != getattr(usual, each.name):
                    value = getattr(self, each.name)
                    text = value.value if isinstance(value, Best) else value
                    yield f"search.{each.name}={text} has no effect without a search: choose one, such as {SHOWN}"
            return
        for key, bound in bounds.SEARCH.items():
            value = getattr(self, key.removeprefix("search."))
            if value is not None and not bound.allows(value):
                yield f"{key}={value} must be {bound}"
        if not self.metric.strip() or not self.metric.isprintable():
            yield f"search.metric={self.metric!r} must be a key of a record in metrics.jsonl, such as eval_loss"
        rungs = self.rungs or []
        if self.rungs is not None and (not rungs or rungs != sorted(set(rungs)) or rungs[0] < 1):
            yield f"search.rungs={rungs} must be steps of 1 or more in ascending order, such as [100,300,900]"
        elif len(rungs) > 1 and not self.kind.pauses:
            yield (
                f"search.rungs={rungs}: search={self.kind.name} trains every trial to its end; choose search=asha, or "
                f"leave all but search.rungs=[{rungs[-1]}] out"
            )
        if self.trials is None and self.kind is not Algorithm.grid:
            yield "search.trials must be given: search.trials=27, for example, begins 27 trials"


def to_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert resolved values, which have enums by name, to arguments of `SearchConfig`."""
    kind, mode = values.get("kind"), values.get("mode")
    named = {"kind": None if kind is None else Algorithm[kind], **({} if mode is None else {"mode": Best[mode]})}
    return {**values, **named}


def rewritten(override: str) -> str:
    """Rewrite `log(a,b)` in Hydra's syntax, and `search.space.KEY=RANGE` as `KEY=RANGE`."""
    key, equals, value = override.partition("=")
    prefix = key[: len(key) - len(key.lstrip("+"))]
    if key.lstrip("+").startswith(_KEY):
        key = prefix + key.lstrip("+").removeprefix(_KEY)
        if value.startswith("[") and value.endswith("]"):  # the form used in an experiment file
            value = f"choice({value[1:-1]})"
    is_text = value.lstrip()[:1] in ("'", '"')
    return key + equals + (value if is_text else _LOG.sub(r"tag(log,interval(\1))", value))


def left_to_space(space: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return the ranges and lists in `search.space` by dotted key, without the keys that the command sets."""
    keys = {text.lstrip("+~").partition("=")[0] for text in overrides}
    return {key: value for key, value in space.items() if value is not None and key.lstrip("+") not in keys}


def dimension_errors(dimension: Dimension) -> Iterator[str]:
    """Yield one line for each error in a range."""
    key, low, high = dimension.key, dimension.low, dimension.high
    if dimension.values:
        if len(set(dimension.values)) < len(dimension.values):
            twice = next(value for value in dimension.values if dimension.values.count(value) > 1)
            yield f"{key} has the value {twice} twice: each may be listed once"
        return
    name = "log" if dimension.log else "interval"
    if not low < high:
        yield f"{key}={name}({low:g},{high:g}): the first number must be below the second"
    elif dimension.log and low <= 0:
        yield f"{key}=log({low:g},{high:g}): both numbers must be above 0; use interval({low:g},{high:g})"

"""Check the options of optimizers: a single `optimizer` or several `optimizers`, and their parameter groups.

Some checks need a model, namely which parameters a pattern matches and which options an optimizer accepts. See
`runner.training.model.parameters` for these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from runner.config.schedule import (
    MAX_FACTOR,
    Phase,
    ScheduleError,
    SchedulerConfig,
    scheduler_errors,
    to_scheduler,
)

SINGLE = "optimizer"
"""The name of the only optimizer if `optimizers` is empty."""

OURS = "runner.training.optim.AdamW"
KNOWN = (OURS, "torch.optim.AdamW", "torch.optim.SGD")
OWN_KEYS = ("match", "groups", "scheduler")
"""Keys in an entry of `optimizers` that are not arguments of its class. A single optimizer has only `groups`."""


def optimizer_nodes(optimizer: dict[str, Any], several: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the config node of each optimizer by name. If `optimizers` is empty, use `optimizer` as `SINGLE`."""
    return dict(several) if several else {SINGLE: optimizer}


def key_of(name: str, several: Mapping[str, Any]) -> str:
    """Return the config key of an optimizer, for error messages."""
    return f"optimizers.{name}" if several else SINGLE


def scheduler_of(key: str, node: Mapping[str, Any], run: SchedulerConfig) -> tuple[str, SchedulerConfig]:
    """Return the config key and options of an optimizer's scheduler: its own, or the run's scheduler if it has none.

    Raises:
        ScheduleError: an option of the optimizer's own scheduler has the wrong type.
    """
    if node.get("scheduler") is None:
        return "scheduler", run
    return f"{key}.scheduler", to_scheduler(f"{key}.scheduler", node["scheduler"])


def optimizer_errors(
    optimizer: dict[str, Any],
    several: Mapping[str, Any],
    steps: int | None,
    phases: Mapping[str, Phase],
) -> Iterator[str]:
    """Yield a line for each error in the optimizers that can be found without the model."""
    if not several and not optimizer.get("_target_"):
        yield "optimizer._target_ is missing: choose an optimizer, for example optimizer=adamw"
    for name, node in optimizer_nodes(optimizer, several).items():
        key = key_of(name, several)
        if not isinstance(node, dict) or (several and not node.get("_target_")):
            yield f"{key} has no _target_: name the class of the optimizer, such as torch.optim.AdamW"
            continue
        if several:
            yield from _own_errors(name, key, node, steps, phases)
        known = node.get("_target_") in KNOWN
        yield from _value_errors(key, node) if known else ()
        yield from _group_errors(f"{key}.groups", node.get("groups"), known)


def _own_errors(
    name: str, key: str, node: dict[str, Any], steps: int | None, phases: Mapping[str, Phase]
) -> Iterator[str]:
    """Yield the errors of the entries that only `optimizers` have: the name, `match` and `scheduler`."""
    if not str(name).isidentifier():
        yield f"{key}: the name of an optimizer must be an identifier, such as that of a submodule"
    if "match" in node:
        yield from _match_errors(f"{key}.match", node["match"])
    own = node.get("scheduler")
    if own is None:
        return
    if not isinstance(own, dict):
        yield f"{key}.scheduler={own} must be a dictionary with the options of scheduler"
        return
    try:
        where, options = scheduler_of(key, node, SchedulerConfig())
    except ScheduleError as error:
        yield from str(error).splitlines()
    else:
        yield from scheduler_errors(where, options, steps, phases)


def _value_errors(key: str, node: Mapping[str, Any]) -> Iterator[str]:
    """Yield the errors of options that torch's optimizers share, as far as `node` has them."""
    for name in ("lr", "weight_decay", "eps", "momentum"):
        if not is_finite(value := node.get(name, 0.0)) or value < 0:
            yield f"{key}.{name}={value} must be a finite number, 0 or more"
        elif value > MAX_FACTOR:
            yield f"{key}.{name}={value} must be {MAX_FACTOR:g} or less"
    betas = node.get("betas", [0.0, 0.0])
    if not isinstance(betas, list) or len(betas) != 2 or not all(is_finite(b) and 0 <= b < 1 for b in betas):
        yield f"{key}.betas={betas} must be a list of two numbers from 0 to below 1"


def _group_errors(key: str, groups: Any, known: bool) -> Iterator[str]:
    if groups is None:
        return
    if not isinstance(groups, list):
        yield f"{key}={groups} must be a list, such as [{{match: head.*, lr: 1e-3}}]"
        return
    for number, group in enumerate(groups):
        where = f"{key}.{number}"
        if not isinstance(group, dict):
            yield f"{where}={group} must be a dictionary, such as {{match: head.*, lr: 1e-3}}"
            continue
        yield from _match_errors(f"{where}.match", group.get("match"))
        options = {name: value for name, value in group.items() if name not in ("match", "freeze")}
        freeze = group.get("freeze", False)
        if not isinstance(freeze, bool):
            yield f"{where}.freeze={freeze} must be true or false"
        elif freeze and options:
            yield f"{where} freezes its parameters, and {', '.join(options)} has no effect on them: remove one"
        elif not freeze and not options:
            yield f"{where} changes nothing: give it an option of the optimizer, such as lr, or freeze: true"
        if "params" in options:
            yield f"{where}.params is for the optimizer itself: name parameters with match"
        # In other classes, eps or betas may have a different meaning.
        yield from _value_errors(where, options if known else {n: options[n] for n in ("lr",) if n in options})


def _match_errors(key: str, match: Any) -> Iterator[str]:
    patterns = match if isinstance(match, list) else [match]
    if not patterns or not all(isinstance(pattern, str) and pattern for pattern in patterns):
        yield f"{key}={match} must be a pattern of parameter names, such as head.*, or a list of them"


def is_finite(value: Any) -> bool:
    """Return whether `value` is a finite number. Booleans are not treated as numbers."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # the integer is too large for a float
        return False

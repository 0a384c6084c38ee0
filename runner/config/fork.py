"""A branch of another run: what its config says of its trunk, and the plan that it trains by.

The frozen config of a branch has the values that the user asked for, and under `fork.was` those of the trunk that they
replace. What is trained is the trunk's plan up to the step of the fork and the branch's from there on: weights,
temperature and learning rate are changed by phases, so that the branch is, bit for bit, the run that had been planned
with these phases from its start.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from runner.config.identity import ABSENT, differences
from runner.config.optimizers import is_finite
from runner.config.schedule import TORCH_SCHEDULERS, Phase
from runner.config.schema import Config, phase_schedule, source_weights

NO_FORK: dict[str, Any] = {"run": None, "step": None, "digest": None, "seed": None, "was": {}, "trunk": {}}
NAME = "fork"
"""Of the phase that begins at the step of the fork, if the branch has none of its own there."""


def replaced_values(trunk: Mapping[str, Any], branch: Mapping[str, Any]) -> dict[str, Any]:
    """For `fork.was`: what the branch changes, as far as it can change the result, as the trunk has it; by dotted key.

    Args:
        trunk, branch: resolved configs.
    """
    old, new = ({key: value for key, value in plain.items() if key != "fork"} for plain in (trunk, branch))
    changed = [change for change in differences(old, new) if change.kind != "free"]
    return {_first_absent(old, change.key): change.old for change in changed}


def _first_absent(node: Any, key: str) -> str:
    """The beginning of a dotted key from which on `node` has nothing; all of it if it is there."""
    path = key.split(".")
    for number, name in enumerate(path, start=1):
        if not isinstance(node, dict) or name not in node:
            return ".".join(path[:number])
        node = node[name]
    return key


def trunk_values(branch: Mapping[str, Any]) -> dict[str, Any]:
    """The resolved config of a branch with the trunk's values in place of those that it changed.

    A trunk that is itself a branch has its own entries under `fork`.
    """
    values = copy.deepcopy({**branch, "fork": branch["fork"]["trunk"] or NO_FORK})
    for key, value in branch["fork"]["was"].items():
        *path, last = key.split(".")
        node = values
        for name in path:
            if not isinstance(node.get(name), dict):
                node[name] = {}
            node = node[name]
        if value == ABSENT:
            node.pop(last, None)
        else:
            node[last] = copy.deepcopy(value)
    return values


def planned(branch: Config, trunk: Config) -> Config:
    """What a branch trains by.

    The order of samples keeps the trunk's seed, and the learning rate the trunk's base where a phase can scale it.
    Everything else that the branch changed is as the branch has it, and `fork.was` has what no phase changes; with that
    of the trunk, if the trunk is a branch that begins at the very same step.

    Args:
        branch: as frozen.
        trunk: what the trunk trains by, from the branch's config with the trunk's values.
    """
    step = branch.fork.step
    assert step is not None
    before, after = map(phase_schedule, (trunk, branch))
    scale = _lr_scale(trunk, branch)
    sources = branch.data.sources
    phases = {
        name: replace(phase, weights={source: w for source, w in phase.weights.items() if source in sources})
        for name, phase in trunk.phases.items()
        if phase.start_step < step
    }
    names = {phase.start_step: name for name, phase in branch.phases.items()}
    for start in sorted({step, *(start for start in names if start > step)}):
        now = after.at(start)
        phase = Phase(start, dict(now.weights), now.temperature, now.lr_scale * (scale or 1.0))
        then = before.at(start)
        if start > step or (phase.weights, phase.temperature, phase.lr_scale) != (
            then.weights,
            then.temperature,
            then.lr_scale,
        ):
            phases[_free_name(names.get(start, NAME), phases)] = phase
    # A source that is new has had no share until now.
    weights = {name: source_weights(trunk).get(name, 0.0) for name in sources}
    sampler = replace(branch.sampler, weights=weights, temperature=trunk.sampler.temperature)
    sampler.options.update(branch.sampler.options)
    optimizer = branch.optimizer if scale is None else {**branch.optimizer, "lr": trunk.optimizer["lr"]}
    was = {key: value for key, value in branch.fork.was.items() if key != "optimizer.lr" or scale is None}
    if trunk.fork.step == step:
        was |= trunk.fork.was
    fork = replace(branch.fork, was=was)
    return replace(branch, seed=trunk.seed, sampler=sampler, phases=phases, optimizer=optimizer, fork=fork)


def _lr_scale(trunk: Config, branch: Config) -> float | None:
    """The factor by which the branch changes the learning rate, if it does and a phase can do it."""
    old, new = trunk.optimizer.get("lr"), branch.optimizer.get("lr")
    if old == new or not (_is_rate(old) and _is_rate(new)) or branch.optimizers:
        return None
    if (branch.scheduler.target or "").startswith(TORCH_SCHEDULERS):
        return None
    if any("lr" in group for group in branch.optimizer.get("groups") or []):
        return None
    return float(new) / float(old)  # type: ignore[arg-type]


def _is_rate(value: Any) -> bool:
    return is_finite(value) and value > 0


def _free_name(name: str, taken: Mapping[str, Any]) -> str:
    while name in taken:
        name += "_"
    return name

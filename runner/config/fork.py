"""Plan the training of a branch, using its config's record of the trunk's values.

The frozen config of a branch has the values that the user asked for. `fork.was` has the trunk's values that they
replace. Training follows the trunk's plan up to the step of the fork, and the branch's plan after it. Phases change the
weights, the temperature and the learning rate at that step. Therefore the result is bitwise identical to a run planned
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
"""The name of the phase that begins at the fork, unless the branch defines a phase at that step."""


def replaced_values(trunk: Mapping[str, Any], branch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trunk's values for `fork.was`: those that the branch changes and that can change the result.

    Args:
        trunk: the trunk's resolved config.
        branch: the branch's resolved config.
    """
    old, new = ({key: value for key, value in plain.items() if key != "fork"} for plain in (trunk, branch))
    changed = [change for change in differences(old, new) if change.kind != "free"]
    return {_first_absent(old, change.key): change.old for change in changed}


def _first_absent(node: Any, key: str) -> str:
    """Return the shortest prefix of a dotted key that `node` does not have, or the complete key if `node` has it."""
    path = key.split(".")
    for number, name in enumerate(path, start=1):
        if not isinstance(node, dict) or name not in node:
            return ".".join(path[:number])
        node = node[name]
    return key


def trunk_values(branch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the resolved config of a branch, with changed values reset to those of the trunk.

    If the trunk is itself a branch, its own `fork` section is restored too.
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
    """Return the config a branch trains with.

    The order of samples keeps the trunk's seed. If a phase can scale the learning rate, its base value is the trunk's.
    All other changes of the branch are applied. The `fork.was` of the result has the replaced values that no phase
    handles. If the trunk is itself a branch that begins at the same step, its `fork.was` is added.

    Args:
        branch: the frozen config of the branch.
        trunk: the config that the trunk trains with. It is made from the branch's config and the trunk's values.
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
    # A new source had weight 0 before the fork.
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
    """Return the factor by which the branch changes the learning rate.

    Return None if the learning rate is the same, or if a phase cannot scale it.
    """
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

"""Compute what depends on the step: the phases of a curriculum, and the learning rate. All functions are pure.

A *step index* s is the number of completed steps. The phase and the learning rate at s apply to the next step, so the
first step of a run has index 0. This module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from runner.bounds import MAX_COUNT, OTHERS, WEIGHT
from runner.config.own_target import Replaceable, option_errors
from runner.errors import UserError, nearest, refuse

MAX_FACTOR = OTHERS["phases.NAME.lr_scale"].most  # the largest factor for a learning rate
WARMUP_STEPS = 20  # the default of warmup_steps
WSD_DECAY_SHARE = 0.1  # the fraction of all steps that decay if decay_steps is not set


class ScheduleError(UserError, ValueError):
    """Arguments of phases or of a learning-rate schedule are out of range. The message has one line per error."""


@dataclass
class Phase:
    """The weights, temperature and learning-rate scale from step index `start_step` until the next phase.

    Args:
        start_step: The number of completed steps at which the phase begins.
        weights: Weight by source name; a source that is not named keeps its base weight.
        temperature: The temperature of the mixture. null: sampler.temperature.
        lr_scale: Factor of the learning rate, multiplied with the scheduler's.
    """

    start_step: int = 0
    weights: dict[str, float] = field(default_factory=dict)
    temperature: float | None = None
    lr_scale: float = 1.0


@dataclass(frozen=True)
class PhaseState:
    """The settings in effect at a step. `weights` has a weight for every source, in the order of the sources.

    `name` is the name of the phase, or None before the first phase.
    """

    weights: dict[str, Any]  # numbers once the datasets are open (see `runner.config.schema.source_weights`)
    temperature: float
    lr_scale: float
    name: str | None

    @property
    def weight_list(self) -> list[float]:
        """Return the weights as a list in the order of the sources, as the samplers need them."""
        return list(self.weights.values())


def unreached_phases(phases: Mapping[str, Phase], steps: int) -> list[str]:
    """Return a message for each phase that would begin after the end of a run with `steps` steps."""
    return [
        f"phases.{name}.start_step={phase.start_step} is never reached: the run ends after {steps} steps"
        for name, phase in phases.items()
        if phase.start_step >= steps
    ]


class PhaseSchedule:
    """The schedule of phases. It maps a step index to weights, temperature and learning-rate scale.

    A phase overrides the base values, not those of the previous phase. If it omits a setting, the base value applies.

    Args:
        phases: the phases by name, in any order.
        base_weights: a weight for every source, in the order of the sources. It is empty if there is no mixture.
        temperature: the base temperature.

    Raises:
        ScheduleError: a start is negative, two phases start at the same step, a source is unknown, a number is out of
            range, or a phase gives every source weight 0.
    """

    def __init__(
        self,
        phases: Mapping[str, Phase],
        base_weights: Mapping[str, Any] | None = None,
        temperature: float = 1.0,
    ) -> None:
        base = {name: _weight(weight) for name, weight in (base_weights or {}).items()}
        refuse(_phase_errors(phases, base), ScheduleError)
        ordered = sorted(phases.items(), key=lambda item: item[1].start_step)
        self.by_name = dict(phases)
        self._starts = [phase.start_step for _, phase in ordered]
        self._states = [PhaseState(base, float(temperature), 1.0, None)]
        for name, phase in ordered:
            weights = {source: _weight(phase.weights.get(source, weight)) for source, weight in base.items()}
            own = temperature if phase.temperature is None else phase.temperature
            self._states.append(PhaseState(weights, float(own), float(phase.lr_scale), name))

    def at(self, step: int) -> PhaseState:
        """Return the settings in effect for the step that follows `step` completed steps."""
        return self._states[sum(start <= step for start in self._starts)]

    def mixtures(self) -> list[tuple[int, PhaseState]]:
        """Return the steps at which the weights or the temperature change, with the settings from each step on.

        Step 0 is included. Phases that change only the learning rate are omitted, because they do not affect the data
        order.
        """
        found = [(0, self.at(0))]
        for start in self._starts:
            state, last = self.at(start), found[-1][1]
            if (state.weights, state.temperature) != (last.weights, last.temperature):
                found.append((start, state))
        return found


def _weight(weight: Any) -> Any:
    """Return a weight as a float, or unchanged if it is a placeholder because the datasets are not open yet."""
    return float(weight) if isinstance(weight, int | float) else weight


def _phase_errors(phases: Mapping[str, Phase], base: Mapping[str, float]) -> Iterator[str]:
    starts: dict[int, str] = {}
    for name, phase in phases.items():
        where = f"phases.{name}"
        if not hasattr(phase.start_step, "__index__") or phase.start_step < 0:
            yield f"{where}.start_step={phase.start_step} must be a whole number, 0 or more"
        elif phase.start_step > MAX_COUNT:
            yield f"{where}.start_step={phase.start_step} must be 2**40 or less"
        if phase.start_step in starts:
            yield (
                f"{where}.start_step={phase.start_step} is also the start of phases.{starts[phase.start_step]}: "
                "start each phase at a different step"
            )
        starts[phase.start_step] = name
        if not (math.isfinite(phase.lr_scale) and phase.lr_scale >= 0):
            yield f"{where}.lr_scale={phase.lr_scale} must be a finite number, 0 or more"
        elif phase.lr_scale > MAX_FACTOR:
            yield f"{where}.lr_scale={phase.lr_scale} must be {MAX_FACTOR:g} or less"
        if phase.temperature is not None and not (math.isfinite(phase.temperature) and phase.temperature > 0):
            yield f"{where}.temperature={phase.temperature} must be a finite number above 0, or null"
        yield from weight_errors(f"{where}.weights", phase.weights, base)
        if base and not any({**base, **phase.weights}.values()):
            yield f"{where}.weights leave every source at 0: at least one needs a weight above 0"


def weight_errors(key: str, weights: Mapping[str, float], sources: Collection[str]) -> Iterator[str]:
    """Yield a line for each entry of the config's `key` that is not a source or whose weight is not finite and >= 0."""
    for name, weight in weights.items():
        if name not in sources:
            known = ", ".join(sources) or "none"
            yield f"{key}.{name}: no such source{nearest(name, sources)}; the sources are {known}"
        elif not (isinstance(weight, int | float) and WEIGHT.allows(weight)):
            yield f"{key}.{name}={weight} must be a finite number, 0 or more"


class Decay(Enum):
    """The shape of the learning-rate curve after the warmup."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"
    wsd = "wsd"
    rex = "rex"


@dataclass
class SchedulerConfig(Replaceable):
    """Options of the config group `scheduler`. `learning_rate` explains the meaning of None.

    With `_target_`, the scheduler is a function (step, **options) -> factor, or a class of torch.optim.lr_scheduler.
    """

    decay: Decay = Decay.cosine
    warmup_steps: int | None = None
    total_steps: int | None = None
    min_ratio: float | None = 0.1
    decay_steps: int | None = None


def constant(progress: float) -> float:
    """Return 1 for any progress."""
    return 1.0


def linear(progress: float) -> float:
    """Decay linearly from 1 to 0."""
    return 1.0 - progress


def cosine(progress: float) -> float:
    """Decay from 1 to 0 along half a cosine wave: Loshchilov and Hutter, SGDR (2017), equation 5, without restarts."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def rex(progress: float) -> float:
    """Return (1 - p) / (1/2 + (1 - p)/2) for progress p: Chen, Wolfe and Kyrillidis, REX (2022), section 4."""
    return (1.0 - progress) / (0.5 + 0.5 * (1.0 - progress))


CURVES: dict[str, Callable[[float], float]] = {
    "constant": constant,
    "linear": linear,
    "cosine": cosine,
    "wsd": linear,  # shape of the decay; constant before it
    "rex": rex,
}


@dataclass(frozen=True)
class LearningRate:
    """A learning-rate schedule: a pure function from the step index to the factor for the base learning rate.

    During the first `warmup_steps` steps the factor is (s + 1) / warmup_steps, so that no step has factor 0. After the
    warmup, progress p goes from 0 to 1 at `total_steps`, and the factor is min_ratio + (1 - min_ratio) * curve(p). From
    `total_steps` on it is constant. `wsd` (warmup, stable, decay: Hu et al., MiniCPM, 2024) stays at 1 until
    `decay_steps` before the end and then decays linearly (Hägele et al., 2024, section 3).

    Args:
        decay: the curve: constant, linear, cosine, wsd or rex.
        total_steps: the step at which the schedule ends. If you want to extend a run at its final factor, set a fixed
            number. Otherwise the schedule changes with the length of the run.
        warmup_steps: the length of the warmup, from 0 to less than total_steps.
        min_ratio: the factor at the end, from 0 to 1. `constant` does not use it.
        decay_steps: the length of the decay of `wsd`. None means a tenth of total_steps.

    Raises:
        ScheduleError: an argument is out of range.
    """

    decay: str
    total_steps: int
    warmup_steps: int = 0
    min_ratio: float = 0.0
    decay_steps: int | None = None

    def __post_init__(self) -> None:
        refuse(self._errors(), ScheduleError)

    def _errors(self) -> Iterator[str]:
        if self.decay not in CURVES:
            yield f"scheduler.decay={self.decay!r}{nearest(self.decay, CURVES)} must be one of {', '.join(CURVES)}"
        if not 0.0 <= self.min_ratio <= 1.0:
            yield f"scheduler.min_ratio={self.min_ratio} must be between 0 and 1"
        if self.total_steps < 1:
            yield f"scheduler.total_steps={self.total_steps} must be 1 or more"
        elif not 0 <= self.warmup_steps < self.total_steps:
            yield (
                f"scheduler.warmup_steps={self.warmup_steps} must be from 0 to below the {self.total_steps} steps of "
                "the schedule (scheduler.total_steps, or else all steps of the run)"
            )
        elif self.decay_steps is not None and not 1 <= self.decay_steps <= self.total_steps - self.warmup_steps:
            longest = self.total_steps - self.warmup_steps
            yield f"scheduler.decay_steps={self.decay_steps} must be from 1 to the {longest} steps after the warmup"

    @property
    def decay_start(self) -> int:
        """Return the step index at which the decay starts."""
        if self.decay != "wsd":
            return self.warmup_steps
        length = self.decay_steps or max(1, round(self.total_steps * WSD_DECAY_SHARE))
        return max(self.warmup_steps, self.total_steps - length)

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.decay == "constant":
            return 1.0
        start = self.decay_start
        progress = min(max((step - start) / (self.total_steps - start), 0.0), 1.0)
        return self.min_ratio + (1.0 - self.min_ratio) * CURVES[self.decay](progress)


def learning_rate(options: SchedulerConfig, steps: int) -> LearningRate:
    """Return the schedule for a run of `steps` steps. It ends with the run unless `total_steps` is set.

    If `warmup_steps` is None, the warmup has `WARMUP_STEPS` steps. If the schedule decays and is shorter than that, all
    steps but the last are warmup. A constant schedule does not depend on `steps`.

    Raises:
        ScheduleError: an option is out of range.
    """
    total, warmup = options.total_steps, options.warmup_steps
    if total is None:
        total = steps
    if options.decay is Decay.constant:
        warmup = WARMUP_STEPS if warmup is None else warmup
        total = max(total, warmup + 1)
    elif warmup is None:
        warmup = min(WARMUP_STEPS, max(total - 1, 0))
    return LearningRate(options.decay.value, total, warmup, options.min_ratio or 0.0, options.decay_steps)


TORCH_SCHEDULERS = "torch.optim.lr_scheduler."
PLATEAU = (
    "needs a metric at every step, which no evaluation has: name another class of torch.optim.lr_scheduler, "
    "or a function (step, **options) -> factor"
)


def lr_scales_refused(key: str, phases: Mapping[str, Phase]) -> str | None:
    """Return an error line if a phase scales the learning rate, but a torch scheduler at `key` sets it; else None."""
    scaling = [name for name, phase in phases.items() if phase.lr_scale != 1]
    if not scaling:
        return None
    return (
        f"phases.{scaling[0]}.lr_scale={phases[scaling[0]].lr_scale} does not work with a class of torch at "
        f"{key}._target_: remove it, or name a function (step, **options) -> factor there"
    )


def scheduler_errors(
    key: str, options: SchedulerConfig, steps: int | None, phases: Mapping[str, Phase]
) -> Iterator[str]:
    """Yield a line for each error in the scheduler at the config's `key` that can be found without imports.

    `steps` is None if the length of the run is not known yet.
    """
    yield from option_errors(key, options)
    target = options.target
    if target is None:
        total = options.total_steps if options.total_steps is not None else steps
        try:
            if total is not None:
                learning_rate(options, max(total, 1))
        except ScheduleError as error:
            yield from str(error).replace("scheduler.", f"{key}.").splitlines()
    elif not target:
        yield f"{key}._target_ must be given: {key}._target_=..., a function (step, **options) -> factor"
    elif target == f"{TORCH_SCHEDULERS}ReduceLROnPlateau":
        yield f"{key}._target_={target} {PLATEAU}"
    elif target.startswith(TORCH_SCHEDULERS) and (line := lr_scales_refused(key, phases)):
        yield line


def to_scheduler(key: str, node: Mapping[str, Any]) -> SchedulerConfig:
    """Convert the plain dictionary at the config's `key` to scheduler options.

    Raises:
        ScheduleError: an option has the wrong type.
    """
    names = {each.name for each in fields(SchedulerConfig)}
    typed = {name: value for name, value in node.items() if name in names}
    errors = []
    for name, value in typed.items():
        if name == "decay":
            if value not in Decay.__members__:
                errors.append(f"{key}.decay={value!r}{nearest(str(value), CURVES)} must be one of {', '.join(CURVES)}")
            else:
                typed[name] = Decay[value]
        elif name == "_target_":
            if value is not None and not isinstance(value, str):
                errors.append(f"{key}._target_={value} must be the dotted name of a function or class")
        elif value is not None and (isinstance(value, bool) or not isinstance(value, _SCHEDULER_TYPES[name])):
            kind = "a number" if name == "min_ratio" else "a whole number"
            errors.append(f"{key}.{name}={value} must be {kind} or null")
    refuse(errors, ScheduleError)
    made = SchedulerConfig(**typed)
    made.options.update({name: value for name, value in node.items() if name not in names})
    return made


_SCHEDULER_TYPES: dict[str, Any] = {
    "warmup_steps": int,
    "total_steps": int,
    "min_ratio": int | float,
    "decay_steps": int,
}


def learning_rate_factor(rate: Callable[[int], float], phases: PhaseSchedule) -> Callable[[int], float]:
    """Return a function from the step index to the learning-rate factor, including the phase's `lr_scale`."""

    def factor(step: int) -> float:
        return rate(step) * phases.at(step).lr_scale

    return factor

"""What changes with the step: phases of a curriculum and the learning rate. Pure functions, no state.

A *step index* s is the number of steps complete: the phase and the learning rate "at s" are those of the step that
begins when s steps are complete, so the first step of a run is the one at 0. Nothing here imports torch.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from runner.errors import UserError, nearest

WSD_DECAY_SHARE = 0.1  # of all steps, unless decay_steps says otherwise


class ScheduleError(UserError, ValueError):
    """A phase or a learning-rate schedule that cannot be followed."""


class PhaseLike(Protocol):
    """What a phase must have; `runner.schema.PhaseConfig` and `Phase` do."""

    start_step: int
    weights: dict[str, float]
    temperature: float | None
    lr_scale: float


@dataclass
class Phase:
    """From step index `start_step` on, until the next phase: these weights, temperature and scale.

    Args:
        start_step: 0 or more.
        weights: by source name, 0 or more; a source that is not named has its base weight.
        temperature: above 0; None: the base temperature.
        lr_scale: what the learning rate is multiplied by, 0 or more.
    """

    start_step: int = 0
    weights: dict[str, float] = field(default_factory=dict)
    temperature: float | None = None
    lr_scale: float = 1.0


@dataclass(frozen=True)
class PhaseState:
    """What is in force at a step: weights for every source (in the sources' order) and the rest.

    `name` is that of the phase, None before the first one.
    """

    weights: dict[str, float]
    temperature: float
    lr_scale: float
    name: str | None

    @property
    def weight_list(self) -> list[float]:
        """The weights in the order of the sources, as the samplers take them."""
        return list(self.weights.values())


class PhaseSchedule:
    """Step index -> weights, temperature and learning-rate scale.

    A phase is laid over the base, not over the phase before it: what it does not name goes back to the base.

    Args:
        phases: by name, in any order.
        base_weights: a weight for every source, in the order of the sources; empty where there is no mixture.
        temperature: the base temperature.
        total_steps: how long the run is; a phase that would begin at its end or later is warned about.

    Raises:
        ScheduleError: a negative start, two phases at one step, a name that is no source, a number out of range,
            or a phase that leaves every source at weight 0.
    """

    def __init__(
        self,
        phases: Mapping[str, PhaseLike],
        base_weights: Mapping[str, float] | None = None,
        temperature: float = 1.0,
        total_steps: int | None = None,
    ) -> None:
        base = {name: float(weight) for name, weight in (base_weights or {}).items()}
        ordered = sorted(phases.items(), key=lambda item: item[1].start_step)
        starts: dict[int, str] = {}
        for name, phase in ordered:
            check_phase(name, phase, base)
            if phase.start_step in starts:
                raise ScheduleError(
                    f"phases.{name}.start_step={phase.start_step} is also the start of "
                    f"phases.{starts[phase.start_step]}: give each phase a step of its own"
                )
            starts[phase.start_step] = name
        self._starts = list(starts)
        self._states = [PhaseState(base, float(temperature), 1.0, None)]
        self._states += [_laid_over(base, temperature, name, phase) for name, phase in ordered]
        late = [name for name, phase in ordered if total_steps is not None and phase.start_step >= total_steps]
        for name in late:
            warnings.warn(
                f"phases.{name}.start_step={phases[name].start_step} is never reached: "
                f"the run ends after {total_steps} steps",
                stacklevel=2,
            )

    def at(self, step: int) -> PhaseState:
        """What is in force for the step that begins when `step` steps are complete."""
        begun = sum(start <= step for start in self._starts)
        return self._states[begun]

    def changes_at(self, step: int) -> bool:
        """Whether a phase begins exactly at `step`."""
        return step in self._starts

    def lr_scale(self, step: int) -> float:
        """`at(step).lr_scale`."""
        return self.at(step).lr_scale


def check_phase(name: str, phase: PhaseLike, base: Mapping[str, float]) -> None:
    """Raises ScheduleError for a number out of range or a name that is no source."""
    where = f"phases.{name}"
    if not hasattr(phase.start_step, "__index__") or phase.start_step < 0:
        raise ScheduleError(f"{where}.start_step={phase.start_step}: 0 or more, an integer")
    if not (math.isfinite(phase.lr_scale) and phase.lr_scale >= 0):
        raise ScheduleError(f"{where}.lr_scale={phase.lr_scale}: a finite number, 0 or more")
    if phase.temperature is not None and not (math.isfinite(phase.temperature) and phase.temperature > 0):
        raise ScheduleError(f"{where}.temperature={phase.temperature}: a finite number above 0, or null")
    for source, weight in phase.weights.items():
        if source not in base:
            raise ScheduleError(
                f"{where}.weights.{source}: no such source{nearest(source, base)}; "
                f"the sources are {', '.join(base) or 'none'}"
            )
        if not (math.isfinite(weight) and weight >= 0):
            raise ScheduleError(f"{where}.weights.{source}={weight}: a finite number, 0 or more")
    if base and not any({**base, **phase.weights}.values()):
        raise ScheduleError(f"{where}.weights leave every source at 0: at least one needs a weight above 0")


def _laid_over(base: Mapping[str, float], temperature: float, name: str, phase: PhaseLike) -> PhaseState:
    return PhaseState(
        weights={source: float(phase.weights.get(source, weight)) for source, weight in base.items()},
        temperature=float(temperature if phase.temperature is None else phase.temperature),
        lr_scale=float(phase.lr_scale),
        name=name,
    )


def constant(progress: float) -> float:
    """1 throughout."""
    return 1.0


def linear(progress: float) -> float:
    """From 1 to 0 in a straight line."""
    return 1.0 - progress


def cosine(progress: float) -> float:
    """Half a cosine wave from 1 to 0: Loshchilov and Hutter, SGDR (2017), equation 5, without restarts."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def rex(progress: float) -> float:
    """(1 - p) / (1/2 + (1 - p)/2): Chen, Wolfe and Kyrillidis, REX (2022), section 4."""
    return (1.0 - progress) / (0.5 + 0.5 * (1.0 - progress))


SHAPES: dict[str, Callable[[float], float]] = {
    "constant": constant,
    "linear": linear,
    "cosine": cosine,
    "wsd": linear,  # in its last part; before, it is constant
    "rex": rex,
}


@dataclass(frozen=True)
class LearningRate:
    """Step index -> factor of the base learning rate, from its arguments alone.

    Over the first `warmup_steps` steps the factor is (s + 1) / warmup_steps, so no step is spent at 0. Then, with
    progress p from 0 at the end of the warmup to 1 at `total_steps`, it is min_ratio + (1 - min_ratio) * shape(p);
    from `total_steps` on it stays at its end. `wsd` (warmup, stable, decay: Hu et al., MiniCPM, 2024) stays at 1
    until `decay_steps` before the end and falls in a straight line then (Hägele et al., 2024, section 3).

    Args:
        decay: constant, linear, cosine, wsd or rex.
        total_steps: where the schedule ends. A run that is made longer with this following its length has another
            schedule from there on; keep it fixed to extend a run at the factor where it ended.
        warmup_steps: 0 or more, below total_steps.
        min_ratio: the factor at the end, 0 to 1; not used by `constant`.
        decay_steps: for `wsd`; None: a tenth of total_steps.

    Raises:
        ScheduleError: an argument is out of its range.
    """

    decay: str
    total_steps: int
    warmup_steps: int = 0
    min_ratio: float = 0.0
    decay_steps: int | None = None

    def __post_init__(self) -> None:
        if self.decay not in SHAPES:
            raise ScheduleError(
                f"scheduler.decay={self.decay!r}{nearest(self.decay, SHAPES)}: one of {', '.join(SHAPES)}"
            )
        if self.total_steps < 1:
            raise ScheduleError(f"scheduler.total_steps={self.total_steps}: 1 or more")
        if not 0 <= self.warmup_steps < self.total_steps:
            raise ScheduleError(
                f"scheduler.warmup_steps={self.warmup_steps}: from 0 to below the {self.total_steps} steps of the "
                "schedule (scheduler.total_steps, or else train.steps)"
            )
        if not 0.0 <= self.min_ratio <= 1.0:
            raise ScheduleError(f"scheduler.min_ratio={self.min_ratio}: from 0 to 1")
        longest = self.total_steps - self.warmup_steps
        if self.decay_steps is not None and not 1 <= self.decay_steps <= longest:
            raise ScheduleError(
                f"scheduler.decay_steps={self.decay_steps}: from 1 to the {longest} steps after the warmup"
            )

    @property
    def decay_start(self) -> int:
        """The step index from which the factor falls."""
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
        return self.min_ratio + (1.0 - self.min_ratio) * SHAPES[self.decay](progress)


class SchedulerLike(Protocol):
    """What `learning_rate` takes; `runner.schema.SchedulerConfig` is one, but for `decay`."""

    warmup_steps: int
    total_steps: int | None
    min_ratio: float
    decay_steps: int | None


def learning_rate(decay: str, options: SchedulerLike, steps: int) -> LearningRate:
    """The learning rate's course in a run of `steps` steps; a warmup longer than the run is cut, unless the length
    of the schedule is given.

    Raises:
        ScheduleError: an option is out of its range.
    """
    total = options.total_steps or steps
    warmup = min(options.warmup_steps, max(total - 1, 0)) if options.total_steps is None else options.warmup_steps
    return LearningRate(decay, total, warmup, options.min_ratio, options.decay_steps)


def learning_rate_factor(rate: LearningRate, phases: PhaseSchedule) -> Callable[[int], float]:
    """Step index -> factor of the base learning rate, the phase's `lr_scale` included."""

    def factor(step: int) -> float:
        return rate(step) * phases.lr_scale(step)

    return factor

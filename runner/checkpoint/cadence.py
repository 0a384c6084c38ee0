"""Decide when to save, based on the step and the time that the caller passes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from runner import bounds
from runner.errors import UserError

LOST = frozenset({"preempted", "killed", "node failure", "requeued", "time limit", "failed", "crash loop", "hang"})
"""Causes for which an attempt can end without warning and lose the steps since its last save."""


@dataclass
class AdaptiveInterval:
    """The interval between saves that minimizes lost time, computed from measurements.

    If saves are rare, a kill loses much work. If saves are frequent, saving takes much time. The formula is from J. T.
    Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps" (2006), eq. 37. In seconds, C
    is the time that a save stalls training, and M is the mean time between losses:

        C < 2 M:  sqrt(2 C M) (1 + 1/3 sqrt(C / 2M) + C / (9 * 2M)) - C        (first factor: Young, 1974)
        else:     M

    M is (running time + prior) / (losses + 1), so the prior counts as one loss. Before any observation, M is the prior.

    Args:
        min_s: lower bound of the interval, in seconds. 0 means no lower bound.
        max_s: upper bound of the interval, in seconds. If 0, the interval is twice the longest write.
        prior_s: expected time between losses before any is observed, in seconds.

    Raises:
        UserError: a setting is out of range.

    Example:
        >>> from runner.checkpoint import AdaptiveInterval
        >>> interval = AdaptiveInterval(min_s=10.0, max_s=3600.0)
        >>> round(interval.interval_s())  # before any measurement: assumes 1 s per save and a loss every 4 h
        169
        >>> interval.observe_save(stall_s=4.0, write_s=12.0)
        >>> round(interval.interval_s())  # expensive saves should be rarer
        337
        >>> interval.observe_attempts([(3600.0, "preempted"), (1800.0, "node failure")])
        >>> round(interval.interval_s())  # frequent losses require frequent saves
        227
    """

    min_s: float = 30.0
    max_s: float = 1800.0
    prior_s: float = 4 * 3600.0
    _costs: list[float] = field(default_factory=list, init=False)
    _writes: list[float] = field(default_factory=list, init=False)
    _ran_s: float = field(default=0.0, init=False)
    _losses: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        bounds.check({"checkpoint.min_interval_s": self.min_s, "checkpoint.max_interval_s": self.max_s})
        if self.max_s < self.min_s:
            raise UserError(bounds.of_intervals(self.min_s, self.max_s))
        if not 0 < self.prior_s < math.inf:
            raise UserError(f"expected time between preemptions {self.prior_s}: set seconds above 0")

    def observe_save(self, stall_s: float, write_s: float) -> None:
        """Record a save that stalled training for `stall_s` seconds and was on disk after `write_s` seconds."""
        self._costs = [*self._costs[-7:], max(stall_s, 1e-6)]
        self._writes = [*self._writes[-7:], max(write_s, 0.0)]

    def observe_attempts(self, attempts: Iterable[tuple[float, str]]) -> None:
        """Replace the record of this run's ended attempts. Pass (seconds it ran, cause of its end) for each."""
        ended = list(attempts)
        self._ran_s = sum(max(seconds, 0.0) for seconds, _ in ended)
        self._losses = sum(cause in LOST for _, cause in ended)

    @property
    def cost_s(self) -> float:
        """Return the seconds that a save stalls training: the median of the last eight saves, initially 1."""
        return sorted(self._costs)[len(self._costs) // 2] if self._costs else 1.0

    def mean_time_between_losses_s(self, elapsed_s: float = 0.0) -> float:
        """Return the formula's M in seconds, given that the current attempt has run for `elapsed_s` seconds."""
        return (self._ran_s + elapsed_s + self.prior_s) / (self._losses + 1)

    def optimum_s(self, elapsed_s: float = 0.0) -> float:
        """Compute Daly's interval in seconds, before the bounds are applied."""
        cost, mean = self.cost_s, self.mean_time_between_losses_s(elapsed_s)
        if cost >= 2 * mean:
            return mean
        ratio = cost / (2 * mean)
        return math.sqrt(2 * cost * mean) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost

    def interval_s(self, elapsed_s: float = 0.0) -> float:
        """Return the interval in seconds: the optimum clipped to the bounds, but at least twice the longest write."""
        write = max(self._writes, default=0.0)
        return min(max(self.optimum_s(elapsed_s), self.min_s, 2 * write), max(self.max_s, 2 * write))

    def explain(self, elapsed_s: float = 0.0) -> str:
        """Describe the interval and its inputs in one line."""
        cost = f"a save costs {self.cost_s:.3g} s" if self._costs else "no save measured yet (1 s assumed)"
        hours = (self._ran_s + elapsed_s) / 3600
        return (
            f"saving every {self.interval_s(elapsed_s):.3g} s: {cost}, {self._losses} losses in {hours:.2g} h "
            f"(one per {self.mean_time_between_losses_s(elapsed_s) / 3600:.2g} h expected), "
            f"Young/Daly optimum {self.optimum_s(elapsed_s):.3g} s within [{self.min_s:g}, {self.max_s:g}]"
        )


class Cadence:
    """Decide at each step whether to save. Only rank 0 decides. The training loop broadcasts the decision.

    Args:
        every_steps: save at multiples of this step. If None, the step does not trigger saves.
        every_minutes: save when this many minutes have passed since the last save. If None, the time does not trigger
            saves.
        every_epochs: save when a multiple of this number of epochs is complete. If None, epochs do not trigger saves.
        completes: function of (every_epochs, step) that returns True if `step` completes a multiple of `every_epochs`
            epochs.
        adaptive: computes the interval between saves. It replaces `every_minutes`.
        start_step: step from which the run resumed, or 0. This step is not saved again.
        now: current time in seconds, from the same monotonic clock as the times that you pass to the methods.

    Raises:
        UserError: a setting is out of range.

    Example:
        >>> from runner.checkpoint import Cadence
        >>> cadence = Cadence(every_steps=100, every_minutes=10.0)
        >>> cadence.should_save(step=99, now=30.0)
        False
        >>> cadence.should_save(step=100, now=31.0)
        True
        >>> cadence.saved(step=100, now=31.0)
        >>> cadence.should_save(step=150, now=31.0 + 600.0)  # ten minutes after the last save
        True
        >>> cadence.explain(now=31.0)
        'saving every 100 steps and every 10 minutes and at the end'
    """

    def __init__(
        self,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        *,
        every_epochs: float | None = None,
        completes: Callable[[float, int], bool] = lambda every_epochs, step: False,
        adaptive: AdaptiveInterval | None = None,
        start_step: int = 0,
        now: float = 0.0,
    ) -> None:
        bounds.check(
            {
                "checkpoint.every_steps": every_steps,
                "checkpoint.every_minutes": every_minutes,
                "checkpoint.every_epochs": every_epochs,
            }
        )
        self.every_steps = every_steps
        self.every_minutes = every_minutes
        self.every_epochs = every_epochs
        self._completes = completes
        self.adaptive = adaptive
        self._start = now
        self._last_step = start_step
        self._last_time = now

    def should_save(self, step: int, now: float) -> bool:
        """Check whether to save after `step` completed steps. The caller also saves at the end of each attempt."""
        return step > self._last_step and (self._by_steps(step) or self._by_time(now))

    def saved(self, step: int, now: float) -> None:
        """Record that a save of `step` began at `now`. Call this even if the save failed; the schedule is the same."""
        self._last_step = step
        self._last_time = now

    def _by_steps(self, step: int) -> bool:
        if self.every_steps is not None and step % self.every_steps == 0:
            return True
        return self.every_epochs is not None and self._completes(self.every_epochs, step)

    def _by_time(self, now: float) -> bool:
        waited = now - self._last_time
        if self.adaptive is not None:
            return waited >= self.adaptive.interval_s(now - self._start)
        return self.every_minutes is not None and waited >= 60 * self.every_minutes

    def explain(self, now: float) -> str:
        """Describe in one line when saves happen."""
        if self.adaptive is not None:
            return self.adaptive.explain(now - self._start)
        parts = []
        if self.every_steps is not None:
            parts.append(f"every {self.every_steps} steps")
        if self.every_minutes is not None:
            parts.append(f"every {self.every_minutes:g} minutes")
        if self.every_epochs is not None:
            parts.append("every epoch" if self.every_epochs == 1 else f"every {self.every_epochs:g} epochs")
        return f"saving {' and '.join([*parts, 'at the end'])}"

"""How much of the time of a run that is killed again and again goes into steps that count: a prediction.

The model: kills come without notice and without memory, `rate` per second of allocated time. Training makes `work_s`
seconds of progress, is stalled for `stall_s` seconds by a save, and so on. A kill loses everything since the last
committed save; then `start_s` seconds pass until the first step, in which the next kill may come already.

A stretch of t seconds that a kill begins anew takes (e^(rate t) - 1) / rate seconds on average. Beginning anew means to
start first, which may be killed itself, so the mean time for `work_s` of progress is

    T = e^(rate start_s) (e^(rate (work_s + stall_s)) - 1) / rate

as in J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps" (2006). The useful
share work_s / T is highest where rate work_s = 1 - e^(-rate (work_s + stall_s)). A save in the background commits
`commit_s` seconds after training has resumed; a kill loses so much more, which is counted as a longer start. Left out
are the one first start, the end, and kills that are announced, before which a run saves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

BISECTIONS = 80


@dataclass(frozen=True)
class KilledRun:
    """A run under kills; all times in seconds, `rate` in kills per second.

    Attributes:
        rate: more than 0.
        start_s: from the start of a process until its first step, the checkpoint restored.
        stall_s: that training stands still for a save.
        commit_s: from then until the checkpoint is committed; 0 if training waits for that.
        steps_share: the part of the progress that is steps; the rest waits for data and evaluates.
    """

    rate: float
    start_s: float
    stall_s: float
    commit_s: float = 0.0
    steps_share: float = 1.0

    def useful_share(self, work_s: float) -> float:
        """The expected share of steps that count, with a save after every `work_s` seconds of progress; 0 to 1."""
        if not 0 < work_s < math.inf:
            return 0.0
        lost, stretch = self.rate * (self.start_s + self.commit_s), self.rate * (work_s + self.stall_s)
        # 1 / (e^a (e^b - 1)), which does not overflow.
        return self.steps_share * self.rate * work_s * math.exp(-lost - stretch) / -math.expm1(-stretch)

    def best_work_s(self) -> float:
        """The progress between two saves with which the useful share is highest."""
        low, high = 0.0, 1.0 / self.rate
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            wanted = -math.expm1(-self.rate * (middle + self.stall_s)) / self.rate
            low, high = (middle, high) if wanted > middle else (low, middle)
        return high

    def without_kills(self, work_s: float) -> float:
        """The share that saves, data and evaluations leave."""
        return replace(self, rate=1e-15).useful_share(work_s)

"""After which steps an epoch is complete, for what happens every so many epochs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from exactdata.order.batch_shape import BatchShape, position_at
from exactdata.samplers import Kind
from runner.config.schema import Config


@dataclass(frozen=True)
class EpochSteps:
    """Relates steps to epochs.

    Args:
        kind: of the sampler.
        total: samples of all sources.
        drop_last: of the sampler.
        shapes: how the steps so far were split, with the shape of the next one last.
    """

    kind: Kind
    total: int
    drop_last: bool
    shapes: Sequence[BatchShape]

    @staticmethod
    def of(config: Config, sizes: Sequence[int], shapes: Sequence[BatchShape]) -> EpochSteps:
        """Make those of a run, whose sources have so many samples each."""
        return EpochSteps(config.sampler.kind.value, sum(sizes), config.sampler.drop_last, shapes)

    def samples(self, epochs: Fraction) -> int:
        """Count the samples of so many epochs, over all ranks."""
        last = self.shapes[-1]
        return self.kind.samples_of(epochs, self.total, last.world_size, last.batch_size, self.drop_last)

    def completes(self, every: float, step: int) -> bool:
        """Return whether a multiple of `every` epochs is complete after `step` steps and not after one step less.

        As the length of a run in epochs does, this counts whole steps: the samples of the last, incomplete step of an
        epoch count towards the next one.
        """
        if step < 1:
            return False
        begin, end = position_at(self.shapes, step), position_at(self.shapes, step + 1)
        period = exact(every) * self.samples(Fraction(1))
        if period <= end - begin:
            return True
        first = math.ceil(begin / period)
        return any(begin <= self.samples(exact(every) * count) < end for count in (first, first + 1))


def exact(epochs: float) -> Fraction:
    """Take a number of epochs as it was written: 0.29 of 100 samples are 29."""
    return Fraction(str(epochs))

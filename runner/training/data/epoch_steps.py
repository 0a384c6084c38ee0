"""Find the steps that complete an epoch, for actions every so many epochs."""

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
    """Relate steps to epochs.

    Args:
        kind: kind of the sampler.
        total: number of samples of all sources.
        drop_last: the sampler's option.
        shapes: batch shapes of the steps so far, and last the shape of the next step.
    """

    kind: Kind
    total: int
    drop_last: bool
    shapes: Sequence[BatchShape]

    @staticmethod
    def of(config: Config, sizes: Sequence[int], shapes: Sequence[BatchShape]) -> EpochSteps:
        """Create the relation for a run whose sources have `sizes` samples."""
        return EpochSteps(config.sampler.kind.value, sum(sizes), config.sampler.drop_last, shapes)

    def samples(self, epochs: Fraction) -> int:
        """Return the number of samples of `epochs` epochs, over all ranks."""
        last = self.shapes[-1]
        return self.kind.samples_of(epochs, self.total, last.world_size, last.batch_size, self.drop_last)

    def completes(self, every: float, step: int) -> bool:
        """Return True if a multiple of `every` epochs is complete after `step` steps, but not a step before.

        This counts whole steps, like the length of a run in epochs. The samples of the last, incomplete step of an
        epoch count towards the next epoch.
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
    """Return a number of epochs as the fraction that was written: 0.29 of 100 samples are 29."""
    return Fraction(str(epochs))

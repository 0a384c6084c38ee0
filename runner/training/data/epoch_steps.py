"""Find the steps that complete an epoch, for actions that are due every N epochs."""

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
    """Convert between steps and epochs.

    Args:
        kind: kind of the sampler.
        total: number of samples of all sources.
        drop_last: the sampler's option.
        shapes: batch shapes of the steps so far, followed by the shape of the next step.
    """

    kind: Kind
    total: int
    drop_last: bool
    shapes: Sequence[BatchShape]

    @staticmethod
    def of(config: Config, sizes: Sequence[int], shapes: Sequence[BatchShape]) -> EpochSteps:
        """Create the object for a run whose sources have `sizes` samples."""
        return EpochSteps(config.sampler.kind.value, sum(sizes), config.sampler.drop_last, shapes)

    def samples(self, epochs: Fraction) -> int:
        """Return the number of samples in `epochs` epochs, over all ranks."""
        last = self.shapes[-1]
        return self.kind.samples_of(epochs, self.total, last.world_size, last.batch_size, self.drop_last)

    def completes(self, every: float, step: int) -> bool:
        """Return True if `step` is the step that completes a multiple of `every` epochs.

        Only full steps are counted, as for the length of a run in epochs. If an epoch ends within a step, that step
        belongs to the next epoch.
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
    """Return the decimal number of epochs as an exact fraction, so that 0.29 epochs of 100 samples are 29 samples."""
    return Fraction(str(epochs))

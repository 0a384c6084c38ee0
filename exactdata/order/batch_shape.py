"""Split steps over ranks and micro-batches, and find the positions of each step.

A run that resumes with a different number of ranks or a different batch size keeps its data order. Only the positions
at which later steps begin change. Each attempt with a new batch shape adds that shape to the run's list. This module
imports neither torch nor numpy.

There are two ways to split a step. Usually ranks alternate, and rank r of N takes every N-th position. In
rank-invariant training, a step has a fixed number of micro-batches, each with a fixed range of positions, and every
rank takes consecutive micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from exactdata.order.arrays import I64


@dataclass(frozen=True)
class BatchShape:
    """The way the samples of a step are split, once `step` steps are complete.

    Attributes:
        step: number of complete steps from which this shape applies.
        world_size: number of ranks.
        batch_size: samples per micro-batch of one rank.
        grad_accum_steps: micro-batches per step of one rank. In rank-invariant training, the maximum over all ranks.
        micro_batches: in rank-invariant training, micro-batches per step over all ranks. If 0, ranks alternate.
    """

    step: int
    world_size: int
    batch_size: int
    grad_accum_steps: int = 1
    micro_batches: int = 0

    @staticmethod
    def dealt(step: int, world_size: int, batch_size: int, micro_batches: int) -> BatchShape:
        """Return the batch shape for rank-invariant training."""
        return BatchShape(step, world_size, batch_size, -(-micro_batches // world_size), micro_batches)

    @property
    def global_batch_size(self) -> int:
        """Return the number of samples of one step over all ranks."""
        if self.micro_batches:
            return self.batch_size * self.micro_batches
        return self.world_size * self.batch_size * self.grad_accum_steps

    def ranks_of(self, offsets: I64) -> tuple[I64, I64]:
        """Find the rank and the micro-batch that consume each sample of a step.

        Args:
            offsets: positions of the samples relative to the start of the step, shape (count,).

        Returns:
            The rank of each sample, and the number of its micro-batch. In rank-invariant training, micro-batches are
            numbered within the step, otherwise within the rank.
        """
        if not self.micro_batches:
            return offsets % self.world_size, offsets // (self.world_size * self.batch_size)
        each, more = divmod(self.micro_batches, self.world_size)
        numbers = offsets // self.batch_size
        first = numbers // (each + 1)  # as if every rank had one more micro-batch
        late = first >= more
        return first + late * (more + (numbers - more * (each + 1)) // max(each, 1) - first), numbers

    def __str__(self) -> str:
        if self.micro_batches:
            return (
                f"{self.world_size} ranks, {self.micro_batches} micro-batches of {self.batch_size} = "
                f"global batch {self.global_batch_size}"
            )
        return (
            f"{self.world_size} ranks x batch {self.batch_size} x accumulation {self.grad_accum_steps} = "
            f"global batch {self.global_batch_size}"
        )


def share_of(micro_batches: int, world_size: int, rank: int) -> range:
    """Return the consecutive micro-batches of a rank. All ranks get equally many, or the first ranks get one more."""
    each, more = divmod(micro_batches, world_size)
    first = rank * each + min(rank, more)
    return range(first, first + each + (rank < more))


def append_shape(shapes: Sequence[BatchShape], shape: BatchShape) -> tuple[BatchShape, ...]:
    """Return a run's shapes after an attempt that begins at `shape.step`. Drops shapes that begin at later steps."""
    kept = tuple(old for old in shapes if old.step < shape.step)
    unchanged = kept and replace(kept[-1], step=shape.step) == shape
    return kept if unchanged else (*kept, shape)


def position_at(shapes: Sequence[BatchShape], step: int) -> int:
    """Return the number of samples that all ranks have consumed when `step` steps are complete."""
    ends = [*(shape.step for shape in shapes[1:]), step]
    return sum(
        shape.global_batch_size * max(0, min(end, step) - shape.step) for shape, end in zip(shapes, ends, strict=True)
    )

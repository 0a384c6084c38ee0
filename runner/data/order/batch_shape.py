"""How a step is split over ranks and micro-batches, and which positions each step therefore has.

A run that resumes with another number of ranks or another batch keeps its data order; only the positions at which later
steps begin change. Each attempt with another shape adds one. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class BatchShape:
    """How the samples of a step are split, from `step` complete steps on.

    Attributes:
        step: steps that were complete when this shape came into force.
        world_size: number of ranks.
        batch_size: samples per micro-batch of one rank.
        grad_accum_steps: micro-batches per step.
    """

    step: int
    world_size: int
    batch_size: int
    grad_accum_steps: int = 1

    @property
    def global_batch_size(self) -> int:
        """Samples of one step over all ranks."""
        return self.world_size * self.batch_size * self.grad_accum_steps

    def __str__(self) -> str:
        return (
            f"{self.world_size} ranks x batch {self.batch_size} x accumulation {self.grad_accum_steps} = "
            f"global batch {self.global_batch_size}"
        )


def append_shape(shapes: Sequence[BatchShape], shape: BatchShape) -> tuple[BatchShape, ...]:
    """The shapes of a run after an attempt that begins at `shape.step`. Shapes of later steps are discarded."""
    kept = tuple(old for old in shapes if old.step < shape.step)
    unchanged = kept and replace(kept[-1], step=shape.step) == shape
    return kept if unchanged else (*kept, shape)


def position_at(shapes: Sequence[BatchShape], step: int) -> int:
    """Samples that all ranks have consumed when `step` steps are complete."""
    ends = [*(shape.step for shape in shapes[1:]), step]
    return sum(
        shape.global_batch_size * max(0, min(end, step) - shape.step) for shape, end in zip(shapes, ends, strict=True)
    )

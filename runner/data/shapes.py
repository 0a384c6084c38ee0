"""How a step is cut up into ranks and batches, and so where steps lie among positions.

A run whose ranks or batch change keeps its data order; only the positions at which its later steps
begin move. Each attempt with another shape adds one. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Shape:
    """From `step` on: how many ranks, samples in a micro-batch of one, and micro-batches in a step."""

    step: int
    world: int
    batch_size: int
    accum: int = 1

    @property
    def global_batch(self) -> int:
        """Samples of one step over all ranks."""
        return self.world * self.batch_size * self.accum


def extended(shapes: Sequence[Shape], shape: Shape) -> tuple[Shape, ...]:
    """The shapes of a run with those of an attempt that begins at `shape.step`: what came after it is undone."""
    kept = tuple(old for old in shapes if old.step < shape.step)
    same = kept and replace(kept[-1], step=shape.step) == shape
    return kept if same else (*kept, shape)


def position_at(shapes: Sequence[Shape], step: int) -> int:
    """Samples that all ranks have consumed when `step` steps are complete."""
    ends = [*(shape.step for shape in shapes[1:]), step]
    return sum(
        shape.global_batch * max(0, min(end, step) - shape.step) for shape, end in zip(shapes, ends, strict=True)
    )

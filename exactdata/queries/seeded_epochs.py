"""Compute the position of a run with a seeded sampler in its epochs at a given step. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from exactdata.order.batch_shape import BatchShape
from exactdata.order.segments import Segment
from exactdata.queries.order_record import OrderRecord


@dataclass(frozen=True)
class SeededPosition:
    """The position of a run in its epochs before a step.

    Attributes:
        epoch: the current epoch.
        batches: number of micro-batches that each rank has consumed in the epoch.
        segment: the segment with the weights and temperature of the epoch.
        shape: batch shape of the step.
        batches_per_epoch: number of micro-batches of one rank in a complete epoch.
    """

    epoch: int
    batches: int
    segment: Segment
    shape: BatchShape
    batches_per_epoch: int

    def after(self, micro_batches: int) -> SeededPosition:
        """Return the position `micro_batches` micro-batches later, assuming that weights and shape do not change."""
        epochs, batches = divmod(self.batches + micro_batches, self.batches_per_epoch)
        return replace(self, epoch=self.epoch + epochs, batches=batches)


def count_batches_per_epoch(record: OrderRecord, shape: BatchShape) -> int:
    """Count the micro-batches of one rank in an epoch. The count is at least 1."""
    if record.sampler.is_own:
        return max(1, len(record.sampler_of(shape.world_size, 0)) // shape.batch_size)
    parts = record.sampler.drawn_sizes(record.sizes)
    ranks = shape.world_size
    samples = sum(size // ranks if record.drop_last else -(-size // ranks) for size in parts)
    return max(1, samples // shape.batch_size)


def seeded_position_at(record: OrderRecord, step: int) -> SeededPosition:
    """Return the position when `step` steps are complete.

    A segment with different weights ends the epoch in which it begins, and starts the next epoch.
    """
    shape = record.batch_shapes[0]
    current = SeededPosition(0, 0, record.segments[0], shape, count_batches_per_epoch(record, shape))
    events: list[tuple[int, int, BatchShape | Segment]] = [(one.step, 0, one) for one in record.batch_shapes[1:]]
    events += [(one.start, 1, one) for one in record.segments[1:]]
    reached = 0
    for at, _, event in sorted(events, key=lambda event: event[:2]):
        if at > step:
            break
        current = current.after((at - reached) * current.shape.grad_accum_steps)
        reached = at
        if isinstance(event, BatchShape):
            current = replace(current, shape=event, batches_per_epoch=count_batches_per_epoch(record, event))
        elif (event.weights, event.temperature) != (current.segment.weights, current.segment.temperature):
            current = replace(current, epoch=current.epoch + bool(current.batches), batches=0, segment=event)
    return current.after((step - reached) * current.shape.grad_accum_steps)

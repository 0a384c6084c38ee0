"""Where a run with a seeded sampler stands in its epochs at a step, by arithmetic. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from runner.data.ledger_entries import Segment
from runner.data.order_record import OrderRecord
from runner.data.shapes import Shape


@dataclass(frozen=True)
class Place:
    """Before a step: the epoch, and the micro-batches that each rank has had of it."""

    epoch: int
    batches: int
    segment: Segment
    shape: Shape
    per_epoch: int  # micro-batches of a whole epoch

    def after(self, micro_batches: int) -> Place:
        """Further on, with nothing changed in between."""
        epochs, batches = divmod(self.batches + micro_batches, self.per_epoch)
        return Place(self.epoch + epochs, batches, self.segment, self.shape, self.per_epoch)


def batches_per_epoch(record: OrderRecord, shape: Shape) -> int:
    """Micro-batches of one rank in an epoch; at least 1."""
    parts = list(record.sizes.values()) if record.kind == "mixture" else [sum(record.sizes.values())]
    samples = sum(size // shape.world if record.drop_last else -(-size // shape.world) for size in parts)
    return max(1, samples // shape.batch_size)


def place_at(record: OrderRecord, step: int) -> Place:
    """The place before the step that begins when `step` steps are complete.

    A segment of other weights ends the epoch that it falls into: the next one begins with it.
    """
    shape = record.shapes[0]
    place = Place(0, 0, record.segments[0], shape, batches_per_epoch(record, shape))
    events: list[tuple[int, int, Shape | Segment]] = [(one.step, 0, one) for one in record.shapes[1:]]
    events += [(one.start, 1, one) for one in record.segments[1:]]
    now = 0
    for at, _, event in sorted(events, key=lambda event: event[:2]):
        if at > step:
            break
        place = place.after((at - now) * place.shape.accum)
        now = at
        if isinstance(event, Shape):
            place = Place(place.epoch, place.batches, place.segment, event, batches_per_epoch(record, event))
        elif (event.weights, event.temperature) != (place.segment.weights, place.segment.temperature):
            epoch = place.epoch + bool(place.batches)
            place = Place(epoch, 0, event, place.shape, place.per_epoch)
    return place.after((step - now) * place.shape.accum)

"""Samples of a run with a seeded sampler: its epochs have to be drawn again, which needs torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runner.data.order_record import OrderRecord
from runner.data.sampler import DistributedSampler, MixtureSampler
from runner.data.seeded_epochs import Place, place_at

I64 = NDArray[np.int64]
Row = dict[str, Any]


def _sampler(record: OrderRecord, place: Place, rank: int) -> DistributedSampler | MixtureSampler:
    common: dict[str, Any] = {
        "num_replicas": place.shape.world,
        "rank": rank,
        "shuffle": record.shuffle,
        "seed": record.seed,
        "drop_last": record.drop_last,
    }
    if record.kind == "distributed":
        sampler: DistributedSampler | MixtureSampler = DistributedSampler(range(sum(record.sizes.values())), **common)
    else:
        weights = [place.segment.weights.get(name, 0) for name in record.sizes]
        bounds = np.cumsum([0, *record.sizes.values()]).tolist()
        sampler = MixtureSampler(bounds, weights, **common, temperature=place.segment.temperature)
    sampler.set_epoch(place.epoch)
    return sampler


def step_samples(record: OrderRecord, step: int, offsets: I64) -> tuple[list[str], I64, I64]:
    """Source names, indices and epochs of a step's samples, `offsets` into its global batch."""
    place = place_at(record, step - 1)
    shape = place.shape
    indices, epochs = np.empty_like(offsets), np.empty_like(offsets)
    per_micro = shape.world * shape.batch_size
    for micro in range(shape.accum):
        now = place.after(micro)
        for rank in range(shape.world):
            batch = _batch(_sampler(record, now, rank), now)
            chosen = np.flatnonzero((offsets // per_micro == micro) & (offsets % shape.world == rank))
            indices[chosen[: len(batch)]], epochs[chosen] = batch, now.epoch
    ends = np.cumsum(list(record.sizes.values()))
    source = np.searchsorted(ends, indices, side="right")
    starts = ends - np.array(list(record.sizes.values()))
    return [list(record.sizes)[i] for i in source.tolist()], indices - starts[source], epochs


def _batch(sampler: DistributedSampler | MixtureSampler, place: Place) -> I64:
    sampler.set_skip(place.batches * place.shape.batch_size)
    batch: I64 = next(sampler.iter_batches(place.shape.batch_size, False))
    return batch


def sample_times(record: OrderRecord, source: str, index: int) -> list[Row]:
    """When a sample is consumed until the end of the run, epoch by epoch."""
    names = list(record.sizes)
    wanted = sum(record.sizes[name] for name in names[: names.index(source)]) + index
    rows: list[Row] = []
    changes = sorted({record.steps, *(one.step for one in record.shapes), *(one.start for one in record.segments)})
    step, epoch = 0, 0  # the next epoch to look through
    while step < record.steps:
        place = place_at(record, step)
        last = place.after(place.shape.accum - 1).epoch  # a step may reach into the next epoch, or over several
        for number in range(max(epoch, place.epoch), last + 1):
            rows += _times_in_epoch(record, replace(place, epoch=number), wanted)
        epoch = last + 1
        left = (place.per_epoch - place.batches) // place.shape.accum  # whole steps until the epoch's last one
        step = min(step + max(1, left), next(at for at in changes if at > step))
    return [row for row in rows if row["step"] <= record.steps]


def _times_in_epoch(record: OrderRecord, place: Place, wanted: int) -> list[Row]:
    rows: list[Row] = []
    for rank in range(place.shape.world):
        order = np.fromiter(_sampler(record, place, rank), np.int64)
        for number in np.flatnonzero(order == wanted).tolist():
            batch = number // place.shape.batch_size
            step = _step_of_batch(record, place.epoch, batch)
            if step is not None and batch < place.per_epoch:
                rows.append({"epoch": place.epoch, "position": None, "step": step, "rank": rank})
    return sorted(rows, key=lambda row: (row["step"], row["rank"]))


def _step_of_batch(record: OrderRecord, epoch: int, batch: int) -> int | None:
    """The step (1-based) that takes this micro-batch of this epoch; None if a new phase came before it."""
    low, high = 0, record.steps
    while low < high:
        middle = (low + high) // 2
        place = place_at(record, middle + 1)
        if (place.epoch, place.batches) > (epoch, batch):
            high = middle
        else:
            low = middle + 1
    before = place_at(record, low)
    ahead = (epoch - before.epoch) * before.per_epoch + batch - before.batches  # micro-batches into that step
    reached = 0 <= ahead < before.shape.accum
    return low + 1 if low < record.steps and reached else None

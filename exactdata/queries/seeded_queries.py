"""Look up samples of a run whose sampler draws complete epochs, by drawing these epochs again using torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from exactdata.order.arrays import I64
from exactdata.queries.order_record import OrderRecord
from exactdata.queries.seeded_epochs import SeededPosition, seeded_position_at

Row = dict[str, Any]


def _sampler(record: OrderRecord, at: SeededPosition, rank: int) -> Any:
    """Create the sampler of a rank, at the start of the epoch."""
    ranks = at.shape.world_size
    if record.sampler.is_own:
        sampler = record.sampler_of(ranks, rank)
    else:
        weights = [at.segment.weights.get(name, 0) for name in record.sizes]
        common = {"num_replicas": ranks, "rank": rank, "seed": record.seed}
        common |= {"shuffle": record.shuffle, "drop_last": record.drop_last}
        sampler = record.sampler.make(record.sizes, weights, at.segment.temperature, **common)
    sampler.set_epoch(at.epoch)
    return sampler


def step_samples(record: OrderRecord, step: int, offsets: I64) -> tuple[list[str], I64, I64]:
    """Look up samples of a step.

    Args:
        record: record of a run with a seeded sampler.
        step: number of the step, counted from 1.
        offsets: indices into the global batch of the step, shape (count,).

    Returns:
        Source names, indices within the sources, and epochs, all of length count.
    """
    start = seeded_position_at(record, step - 1)
    shape = start.shape
    indices, epochs = np.empty_like(offsets), np.empty_like(offsets)
    per_micro_batch = shape.world_size * shape.batch_size
    for micro_batch in range(shape.grad_accum_steps):
        current = start.after(micro_batch)
        for rank in range(shape.world_size):
            sampler = _sampler(record, current, rank)
            sampler.set_skip(current.batches * shape.batch_size)
            batch = next(sampler.iter_batches(shape.batch_size, False), np.zeros(0, np.int64))
            chosen = np.flatnonzero((offsets // per_micro_batch == micro_batch) & (offsets % shape.world_size == rank))
            indices[chosen[: len(batch)]], epochs[chosen] = batch, current.epoch
    ends = np.cumsum(list(record.sizes.values()))
    source = np.searchsorted(ends, indices, side="right")
    starts = ends - np.array(list(record.sizes.values()))
    return [list(record.sizes)[i] for i in source.tolist()], indices - starts[source], epochs


def sample_times(record: OrderRecord, source: str, index: int) -> list[Row]:
    """List when a sample is consumed before the end of the run, as epoch, step and rank of each time."""
    names = list(record.sizes)
    wanted = sum(record.sizes[name] for name in names[: names.index(source)]) + index
    rows: list[Row] = []
    changes = sorted(
        {record.steps, *(one.step for one in record.batch_shapes), *(one.start for one in record.segments)}
    )
    step, epoch = 0, 0  # `epoch` is the next epoch to search
    while step < record.steps:
        current = seeded_position_at(record, step)
        accumulation = current.shape.grad_accum_steps
        last = current.after(accumulation - 1).epoch  # a step may extend into the next epoch, or over several
        for number in range(max(epoch, current.epoch), last + 1):
            rows += _times_in_epoch(record, replace(current, epoch=number), wanted)
        epoch = last + 1
        whole_steps = (current.batches_per_epoch - current.batches) // accumulation  # excludes the epoch's last step
        step = min(step + max(1, whole_steps), next(at for at in changes if at > step))
    return [row for row in rows if row["step"] <= record.steps]


def _times_in_epoch(record: OrderRecord, at: SeededPosition, wanted: int) -> list[Row]:
    rows: list[Row] = []
    for rank in range(at.shape.world_size):
        batches = _sampler(record, at, rank).iter_batches(at.shape.batch_size, False)
        order = np.concatenate([np.zeros(0, np.int64), *batches])
        for batch in (np.flatnonzero(order == wanted) // at.shape.batch_size).tolist():
            step = _step_of_batch(record, at.epoch, batch)
            if step is not None and batch < at.batches_per_epoch:
                rows.append({"epoch": at.epoch, "position": None, "step": step, "rank": rank})
    return sorted(rows, key=lambda row: (row["step"], row["rank"]))


def _step_of_batch(record: OrderRecord, epoch: int, batch: int) -> int | None:
    """Return the step (from 1) that consumes this micro-batch, or None if a new phase ends the epoch before it."""
    low, high = 0, record.steps
    while low < high:
        middle = (low + high) // 2
        later = seeded_position_at(record, middle + 1)
        if (later.epoch, later.batches) > (epoch, batch):
            high = middle
        else:
            low = middle + 1
    before = seeded_position_at(record, low)
    ahead = (epoch - before.epoch) * before.batches_per_epoch + batch - before.batches  # micro-batches into that step
    is_in_step = 0 <= ahead < before.shape.grad_accum_steps
    return low + 1 if low < record.steps and is_in_step else None

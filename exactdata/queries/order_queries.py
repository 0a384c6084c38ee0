"""Query a data order for the samples of a step, the times of a sample, totals per source, or differences of two runs.

Each function takes an `OrderRecord` and returns JSON-serializable values. For the elastic sampler, they are computed
directly. For the seeded samplers, the relevant epochs are drawn again using torch. Neither data nor model are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from exactdata.errors import nearest
from exactdata.order.arrays import I64
from exactdata.order.exclusions import POSITIONS, listed
from exactdata.order.segments import segment_at
from exactdata.order.sequence import ElasticSequence
from exactdata.order.weights import shares
from exactdata.queries.order_record import OrderRecord, RecordError

Row = dict[str, Any]

_SCAN = 1 << 14  # number of positions compared at a time
_SCAN_LIMIT = 1 << 22  # maximum number of positions compared


def samples_of_step(record: OrderRecord, step: int) -> list[Row]:
    """List the samples of a step, with rank, micro_batch, position, source, index and epoch of the source.

    Args:
        record: the record of the run's data order.
        step: number of the step, counted from 1 as in the metrics.

    Returns:
        One row per sample, sorted by rank and position.

    Raises:
        RecordError: the run has no such step.
    """
    if not 1 <= step <= record.steps:
        raise RecordError(f"step {step}: this run has steps 1 to {record.steps}")
    shape = record.shape_at(step - 1)
    first = record.position_at(step - 1)
    positions = np.arange(first, first + shape.global_batch_size, dtype=np.int64)
    if record.sampler.elastic:
        order = record.elastic_sequence()
        positions = positions[positions < (order.total or positions[-1] + 1)]
        ids, index, epochs = order.locate(positions)
        names = [order.names[i] for i in ids.tolist()]
    else:
        from exactdata.queries.seeded_queries import step_samples

        names, index, epochs = step_samples(record, step, positions - first)
    ranks, micro = shape.ranks_of(positions - first)
    columns = ranks.tolist(), micro.tolist(), positions.tolist(), names, index.tolist(), epochs.tolist()
    keys = "rank", "micro_batch", "position", "source", "index", "epoch"
    rows = [dict(zip(keys, row, strict=True)) for row in zip(*columns, strict=True)]
    return sorted(rows, key=lambda row: (row["rank"], row["position"]))


def times_of_sample(record: OrderRecord, source: str, index: int) -> list[Row]:
    """List when a sample is consumed before the end of the run, as epoch, position, step and rank of each time.

    The position is None for the seeded samplers.

    Raises:
        RecordError: the run has no such source, or the source has no such index.
    """
    if source not in record.sizes:
        raise RecordError(
            f"unknown source {source!r}{nearest(source, record.sizes)}; the sources are {', '.join(record.sizes)}"
        )
    if not 0 <= index < record.sizes[source]:
        raise RecordError(f"sample {source}:{index}: source {source!r} has indices 0 to {record.sizes[source] - 1}")
    end = record.position_at(record.steps)
    if not record.sampler.elastic:
        from exactdata.queries.seeded_queries import sample_times

        return sample_times(record, source, index)
    order = record.elastic_sequence()
    last = min(end, order.total or end)
    epochs = np.arange(int(order.epochs_at(last)[source]) + 1)
    positions = order.find(np.full(len(epochs), order.id_of(source)), np.full(len(epochs), index), epochs)
    return [
        {"epoch": epoch, "position": position, **_when(record, position)}
        for epoch, position in zip(epochs.tolist(), positions.tolist(), strict=True)
        if 0 <= position < last
    ]


def _when(record: OrderRecord, position: int) -> Row:
    step = record.step_of(position)
    offset = np.array([position - record.position_at(step - 1)])
    return {"step": step, "rank": int(record.shape_at(step - 1).ranks_of(offset)[0][0])}


def source_totals(record: OrderRecord) -> list[Row]:
    """Sum up each source in each part of the run: share, samples, tokens, and epochs at the end of the part.

    For the seeded samplers, the counts of an incomplete epoch are proportional to the shares.

    Returns:
        One row per range of positions with constant shares, then one for the complete run.
    """
    if record.sampler.elastic:
        return _elastic_totals(record)
    return _seeded_totals(record)


def _elastic_totals(record: OrderRecord) -> list[Row]:
    order = record.elastic_sequence()
    end = record.position_at(record.steps)
    end = min(end, order.total or end)
    bounds = sorted({0, end, *(start for start in order.spans.start.tolist() if start < end)})
    ranges = [*pairwise(bounds), (0, end)] if end else []
    rows = []
    for first, last in ranges:
        before, after = order.consumed_at(first), order.consumed_at(last)
        counts = {name: after[name] - before[name] for name in record.sizes}
        epochs = order.epochs_at(last)
        rows.append(_totals_row(record, first, last, counts, {name: epochs[name] for name in record.sizes}))
    return rows


def _totals_row(
    record: OrderRecord, first: int, last: int, counts: Mapping[str, float], epochs: Mapping[str, float]
) -> Row:
    total = sum(counts.values())
    sources = {
        name: {
            "share": count / total if total else 0.0,
            "samples": count,
            "tokens": count * record.tokens_per_sample[name] if name in record.tokens_per_sample else None,
            "epochs_at_end": epochs[name],
        }
        for name, count in counts.items()
    }
    steps = (record.step_of(first), record.step_of(last - 1)) if last > first else (0, 0)
    return {
        "first_step": steps[0],
        "last_step": steps[1],
        "first_position": first,
        "stop_position": last,
        "sources": sources,
    }


def _seeded_totals(record: OrderRecord) -> list[Row]:
    starts = [segment.start for segment in record.segments if segment.start < record.steps]
    bounds = [*starts, record.steps]
    totals = dict.fromkeys(record.sizes, 0.0)
    rows = []
    for (first, last), segment in zip(pairwise(bounds), record.segments, strict=False):
        share = _seeded_shares(record, segment.weights, segment.temperature)
        positions = record.position_at(first), record.position_at(last)
        counts = {name: round(share[name] * (positions[1] - positions[0])) for name in record.sizes}
        totals = {name: totals[name] + counts[name] for name in record.sizes}
        epochs = {name: totals[name] / max(1, record.sizes[name]) for name in record.sizes}
        rows.append(_totals_row(record, *positions, counts, epochs))
    epochs = {name: totals[name] / max(1, record.sizes[name]) for name in record.sizes}
    return [*rows, _totals_row(record, 0, record.position_at(record.steps), totals, epochs)]


def _seeded_shares(record: OrderRecord, weights: Any, temperature: float) -> dict[str, float]:
    if not record.sampler.several:
        total = sum(record.sizes.values())
        return {name: size / total for name, size in record.sizes.items()}
    values = shares([weights.get(name, 0) for name in record.sizes], temperature)
    return dict(zip(record.sizes, values, strict=True))


def first_difference(one: OrderRecord, other: OrderRecord) -> Row:
    """Find the first position at which two data orders differ.

    Returns:
        A dict with `reason` (the inputs in which the orders differ) and `position` (the first position with different
        samples, or None). If there is such a position, the dict also has its `steps` in both runs and, for the elastic
        sampler, both `samples`. Otherwise it has the number of positions `compared`, and the number that both runs have
        in `common`.
    """
    if one.kind != other.kind:
        return {"position": 0, "reason": f"sampler {one.kind} and {other.kind}", "steps": [1, 1]}
    if not one.sampler.elastic:
        return _seeded_difference(one, other)
    orders = one.elastic_sequence(), other.elastic_sequence()
    end = min(record.position_at(record.steps) for record in (one, other))
    end = min(end, *(order.total or end for order in orders))
    reason, first = "; ".join(_differing_inputs(one, other)), min(end, _first_other_input(one, other, end))
    compared = min(end, first + _SCAN_LIMIT)
    for start in range(first, compared, _SCAN):
        positions = np.arange(start, min(compared, start + _SCAN), dtype=np.int64)
        position = _first_mismatch(orders, positions)
        if position is not None:
            return {
                "position": position,
                "steps": [one.step_of(position), other.step_of(position)],
                "samples": [_sample(order, position) for order in orders],
                "reason": reason,
            }
    return {"position": None, "compared": compared, "common": end, "reason": reason}


def _differing_inputs(one: OrderRecord, other: OrderRecord) -> list[str]:
    names = [name for name in ("seed", "sizes", "shuffle") if getattr(one, name) != getattr(other, name)]
    reasons = [f"{name} {getattr(one, name)} and {getattr(other, name)}" for name in names]
    if one.sampler.elastic and _first_weight_difference(one, other) is not None:
        reasons.append("the segments differ")
    if one.exclusions != other.exclusions:
        texts = [listed([each.what for each in record.exclusions]) for record in (one, other)]
        reasons.append(f"excluded: {texts[0]} and {texts[1]}")
    batches = [
        ", ".join(f"{shape.global_batch_size} from step {shape.step + 1}" for shape in record.batch_shapes)
        for record in (one, other)
    ]
    if batches[0] != batches[1]:
        reasons.append(f"global batch: {batches[0]}, and {batches[1]}")
    return reasons


def _first_other_input(one: OrderRecord, other: OrderRecord, end: int) -> int:
    """Return the first position for which two elastic orders use different inputs, or `end` if all inputs agree."""
    sizes = [{**record.sizes, **record.retired} for record in (one, other)]
    if any(sizes[0][name] != sizes[1][name] for name in sizes[0].keys() & sizes[1].keys()):
        return 0
    if (one.seed, one.shuffle) != (other.seed, other.shuffle):
        return 0
    starts = [_first_weight_difference(one, other)]
    for mine, theirs in ((one.exclusions, other.exclusions), (other.exclusions, one.exclusions)):
        new = [each for each in mine if each not in theirs]
        starts += [max(each.at, each.what.first if each.what.source == POSITIONS else 0) for each in new]
    return min((start for start in starts if start is not None), default=end)


def _first_mismatch(orders: tuple[ElasticSequence, ElasticSequence], positions: I64) -> int | None:
    located = [order.locate(positions) for order in orders]
    names = [np.array(order.names)[ids] for order, (ids, _, _) in zip(orders, located, strict=True)]
    differs = (names[0] != names[1]) | (located[0][1] != located[1][1])
    return int(positions[int(np.argmax(differs))]) if differs.any() else None


def _sample(order: ElasticSequence, position: int) -> str:
    ids, index, _ = order.locate(np.array([position]))
    return f"{order.names[int(ids[0])]}:{int(index[0])}"


def _seeded_difference(one: OrderRecord, other: OrderRecord) -> Row:
    reasons = _differing_inputs(one, other)
    world_sizes = [record.batch_shapes[0].world_size for record in (one, other)]
    if world_sizes[0] != world_sizes[1] and one.sampler.mixes:
        reasons.append(
            f"world size {world_sizes[0]} and {world_sizes[1]}, on which the order of a seeded mixture depends"
        )
    if reasons:
        return {"position": 0, "steps": [1, 1], "reason": "; ".join(reasons)}
    start = _first_weight_difference(one, other)
    if start is not None and start < min(one.steps, other.steps):
        reason = f"weights from step {start + 1} on"
        return {"position": one.position_at(start), "steps": [start + 1, start + 1], "reason": reason}
    end = one.position_at(min(one.steps, other.steps))
    return {"position": None, "compared": end, "common": end, "reason": ""}


def _first_weight_difference(one: OrderRecord, other: OrderRecord) -> int | None:
    """Return the first start of a segment at which the weights, temperatures or caps of two records differ."""
    for start in sorted({segment.start for record in (one, other) for segment in record.segments}):
        held = [segment_at(record.segments, start) for record in (one, other)]
        drawn = [{name: weight for name, weight in each.weights.items() if weight > 0} for each in held]
        caps = [
            {name: cap for name, cap in each.max_epochs.items() if name in names}
            for each, names in zip(held, drawn, strict=True)
        ]
        if drawn[0] != drawn[1] or held[0].temperature != held[1].temperature or caps[0] != caps[1]:
            return start
    return None

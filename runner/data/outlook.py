"""What a data order did and will do: which samples a step sees, when a sample comes, the plan, a comparison.

Each function takes an `OrderRecord` and returns plain values, ready for JSON. For the elastic sampler
they are arithmetic; the seeded samplers have to draw the epoch in question, which needs torch. No data and
no model is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runner.data.order import ElasticOrder, Piece
from runner.data.order_record import OrderRecord, RecordError
from runner.data.shares import shares
from runner.errors import nearest

I64 = NDArray[np.int64]
Row = dict[str, Any]

_SCAN = 1 << 14  # positions compared at a time
_SCAN_LIMIT = 1 << 22


def samples_of_step(record: OrderRecord, step: int) -> list[Row]:
    """Every sample of a step (1-based): rank, micro-batch, position, source, index, epoch of the source."""
    if not 1 <= step <= record.steps:
        raise RecordError(f"step {step}: the run has steps 1 to {record.steps}")
    shape = record.shape_at(step - 1)
    first = record.position_at(step - 1)
    positions = np.arange(first, first + shape.global_batch, dtype=np.int64)
    if record.kind == "elastic":
        order = record.elastic_order()
        positions = positions[positions < (order.total or positions[-1] + 1)]
        ids, index, epochs = order.locate(positions)
        names = [order.names[i] for i in ids.tolist()]
    else:
        from runner.data.seeded_outlook import step_samples

        names, index, epochs = step_samples(record, step, positions - first)
    ranks = (positions - first) % shape.world
    micro = (positions - first) // (shape.world * shape.batch_size)
    columns = ranks.tolist(), micro.tolist(), positions.tolist(), names, index.tolist(), epochs.tolist()
    keys = "rank", "micro_batch", "position", "source", "index", "epoch"
    rows = [dict(zip(keys, row, strict=True)) for row in zip(*columns, strict=True)]
    return sorted(rows, key=lambda row: (row["rank"], row["position"]))


def times_of_sample(record: OrderRecord, source: str, index: int) -> list[Row]:
    """When a sample is consumed until the end of the run: epoch, position, step, rank."""
    if source not in record.sizes:
        raise RecordError(
            f"unknown source {source!r}{nearest(source, record.sizes)}; the sources are {', '.join(record.sizes)}"
        )
    if not 0 <= index < record.sizes[source]:
        raise RecordError(f"sample {source}:{index}: the source has indices 0 to {record.sizes[source] - 1}")
    end = record.position_at(record.steps)
    if record.kind != "elastic":
        from runner.data.seeded_outlook import sample_times

        return sample_times(record, source, index)
    order = record.elastic_order()
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
    return {"step": step, "rank": (position - record.position_at(step - 1)) % record.shape_at(step - 1).world}


def plan(record: OrderRecord) -> list[Row]:
    """Phase by phase, per source: share, samples, epochs and tokens; the last entry is the whole run."""
    if record.kind == "elastic":
        return _elastic_plan(record)
    return _seeded_plan(record)


def _elastic_plan(record: OrderRecord) -> list[Row]:
    order = record.elastic_order()
    end = record.position_at(record.steps)
    end = min(end, order.total or end)
    bounds = sorted({0, end, *(piece.start for piece in order.pieces if piece.start < end)})
    spans = [*pairwise(bounds), (0, end)] if end else []
    rows = []
    for first, last in spans:
        before, after = order.consumed_at(first), order.consumed_at(last)
        counts = {name: after[name] - before[name] for name in record.sizes}
        epochs = order.epochs_at(last)
        rows.append(_plan_row(record, first, last, counts, {name: epochs[name] for name in record.sizes}))
    return rows


def _plan_row(
    record: OrderRecord, first: int, last: int, counts: Mapping[str, float], epochs: Mapping[str, float]
) -> Row:
    total = sum(counts.values())
    sources = {
        name: {
            "share": count / total if total else 0.0,
            "samples": count,
            "tokens": count * record.sequence_length,
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


def _seeded_plan(record: OrderRecord) -> list[Row]:
    """Whole epochs are exact; the part of an epoch is taken in proportion."""
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
        rows.append(_plan_row(record, *positions, counts, epochs))
    epochs = {name: totals[name] / max(1, record.sizes[name]) for name in record.sizes}
    return [*rows, _plan_row(record, 0, record.position_at(record.steps), totals, epochs)]


def _seeded_shares(record: OrderRecord, weights: Any, temperature: float) -> dict[str, float]:
    if record.kind == "distributed":
        total = sum(record.sizes.values())
        return {name: size / total for name, size in record.sizes.items()}
    values = shares([weights.get(name, 0) for name in record.sizes], temperature)
    return dict(zip(record.sizes, values, strict=True))


def difference(one: OrderRecord, other: OrderRecord) -> Row:
    """Where two data orders part: `position` and the `step` of each run, or None where they do not."""
    if one.kind != other.kind:
        return {"position": 0, "reason": f"sampler {one.kind} and {other.kind}", "steps": [1, 1]}
    if one.kind != "elastic":
        return _seeded_difference(one, other)
    orders = one.elastic_order(), other.elastic_order()
    end = min(record.position_at(record.steps) for record in (one, other))
    end = min(end, *(order.total or end for order in orders))
    reasons = _reasons(one, other)
    for first, last in _unlike(orders, end):
        for start in range(first, last, _SCAN):
            if start - first >= _SCAN_LIMIT:
                break
            positions = np.arange(start, min(last, start + _SCAN), dtype=np.int64)
            part = _first_unlike(orders, positions)
            if part is not None:
                return {
                    "position": part,
                    "steps": [one.step_of(part), other.step_of(part)],
                    "samples": [_sample(order, part) for order in orders],
                    "reason": "; ".join(reasons),
                }
    return {"position": None, "compared": end, "reason": "; ".join(reasons)}


def _reasons(one: OrderRecord, other: OrderRecord) -> list[str]:
    names = [name for name in ("seed", "sizes", "shuffle") if getattr(one, name) != getattr(other, name)]
    reasons = [f"{name} {getattr(one, name)} and {getattr(other, name)}" for name in names]
    if one.segments != other.segments:
        reasons.append("the segments differ")
    if one.exclusions != other.exclusions:
        texts = [", ".join(entry.text for entry in record.exclusions) or "nothing" for record in (one, other)]
        reasons.append(f"excluded: {texts[0]} and {texts[1]}")
    batches = [[(shape.step, shape.global_batch) for shape in record.shapes] for record in (one, other)]
    if batches[0] != batches[1]:
        reasons.append(f"global batches by step {batches[0]} and {batches[1]}")
    return reasons


def _unlike(orders: tuple[ElasticOrder, ElasticOrder], end: int) -> Iterator[tuple[int, int]]:
    """Runs of positions where the two orders are not made in the same way."""
    same_streams = orders[0].seed == orders[1].seed and orders[0].shuffle == orders[1].shuffle
    bounds = sorted({0, end, *(piece.start for order in orders for piece in order.pieces if piece.start < end)})
    for first, last in pairwise(bounds):
        made = [_made(order, order.piece_at(first), first) for order in orders]
        if not same_streams or made[0] != made[1]:
            yield first, last


def _made(order: ElasticOrder, piece: Piece, first: int) -> tuple[Any, ...]:
    names = [order.names[source] for source in piece.sources.tolist()]
    places = [
        (name, order.sizes[name], order.stream(source).signature, int(piece.base[source]))
        for name, source in zip(names, piece.sources.tolist(), strict=True)
    ]
    return tuple(places), piece.quanta, piece.mixture.key, piece.slot - piece.start


def _first_unlike(orders: tuple[ElasticOrder, ElasticOrder], positions: I64) -> int | None:
    located = [order.locate(positions) for order in orders]
    names = [np.array(order.names)[ids] for order, (ids, _, _) in zip(orders, located, strict=True)]
    unlike = (names[0] != names[1]) | (located[0][1] != located[1][1])
    return int(positions[int(np.argmax(unlike))]) if unlike.any() else None


def _sample(order: ElasticOrder, position: int) -> str:
    ids, index, _ = order.locate(np.array([position]))
    return f"{order.names[int(ids[0])]}:{int(index[0])}"


def _seeded_difference(one: OrderRecord, other: OrderRecord) -> Row:
    reasons = _reasons(one, other)
    worlds = [record.shapes[0].world for record in (one, other)]
    if worlds[0] != worlds[1] and one.kind == "mixture":
        reasons.append(f"world size {worlds[0]} and {worlds[1]}, which the order of a seeded mixture depends on")
    for before, after in zip(one.segments, other.segments, strict=False):
        if before != after:
            step = min(before.start, after.start) + 1
            reasons.append(f"weights from step {step} on")
            return {"position": one.position_at(step - 1), "steps": [step, step], "reason": "; ".join(reasons)}
    if reasons:
        return {"position": 0, "steps": [1, 1], "reason": "; ".join(reasons)}
    return {"position": None, "compared": one.position_at(min(one.steps, other.steps)), "reason": ""}

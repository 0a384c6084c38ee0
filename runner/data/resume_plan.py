"""Before a resume: what other settings would repeat or skip, and what to do about it. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from runner.data.elastic import check_global_batch
from runner.data.ledger_entries import Segment, check_segment
from runner.data.order import ElasticOrder
from runner.data.order_record import OrderRecord, RecordError
from runner.data.seeded_epochs import batches_per_epoch, place_at
from runner.data.shapes import Shape
from runner.errors import UserError, nearest

_SHAPE = {
    "world_size": "world",
    "train.batch_size": "batch_size",
    "batch_size": "batch_size",
    "train.grad_accum_steps": "accum",
    "grad_accum_steps": "accum",
}
_OTHER = ("train.global_batch_size", "data.num_workers", "seed", "sampler.temperature", "sampler.weights.NAME")


def parse_overrides(record: OrderRecord, texts: list[str]) -> dict[str, Any]:
    """`world_size=3 train.batch_size=4 sampler.weights.code=2 ...` as a mapping.

    Raises:
        RecordError: an unknown setting or source, or a value that is no number.
    """
    values: dict[str, Any] = {}
    for text in texts:
        key, _, value = text.lstrip("+").partition("=")
        source = key.removeprefix("sampler.weights.")
        known = [*_SHAPE, *_OTHER[:-1]]
        if source != key and source not in record.sizes:
            raise RecordError(
                f"{key}: no such source{nearest(source, record.sizes)}; the sources are {', '.join(record.sizes)} "
                "(a resume plan knows no source that is added)"
            )
        if key not in known and source == key:
            raise RecordError(f"{key!r}{nearest(key, known)}: --resume-plan knows {', '.join([*_SHAPE, *_OTHER])}")
        try:
            values[key] = float(value) if key == "sampler.temperature" or source != key else int(value)
        except ValueError:
            raise RecordError(f"{text!r}: expected a number after '='") from None
        if values[key] < (0 if key in ("seed", "data.num_workers") or source != key else 1e-9):
            raise RecordError(f"{text!r}: the value is too small")
    return values


def resume_plan(record: OrderRecord, step: int, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """What happens if the run goes on after `step` complete steps under other settings.

    Returns:
        `position`; `shape` before and after; `repeated` and `skipped` samples; `accepted`: whether the
        sampler goes on at all; `notes` and `advice` in words.
    """
    old = record.shape_at(max(0, step - 1))
    new = _new_shape(old, step, overrides)
    report: dict[str, Any] = {
        "step": step,
        "position": record.position_at(step),
        "before": _shape_words(old),
        "after": _shape_words(new),
        "repeated": 0,
        "skipped": 0,
        "accepted": True,
        "notes": [],
        "advice": [],
    }
    if overrides.get("seed", record.seed) != record.seed:
        report["accepted"] = False
        report["notes"].append(f"seed {overrides['seed']}: the order was made with seed {record.seed}; it is refused")
        report["advice"].append(f"keep seed={record.seed}")
    if record.kind == "elastic":
        _elastic(record, new, old, overrides, report)
    else:
        _seeded(record, new, old, overrides, report)
    return report


def _new_shape(old: Shape, step: int, overrides: Mapping[str, Any]) -> Shape:
    changed = {_SHAPE[key]: value for key, value in overrides.items() if key in _SHAPE}
    shape = replace(old, step=step, **changed)
    wanted = overrides.get("train.global_batch_size")
    if wanted is None:
        return shape
    try:
        check_global_batch(wanted, shape.world * shape.batch_size)
    except UserError as error:
        raise RecordError(f"train.global_batch_size: {error} (replicas times batch_size)") from None
    return replace(shape, accum=wanted // (shape.world * shape.batch_size))


def _shape_words(shape: Shape) -> str:
    return (
        f"{shape.world} ranks x batch {shape.batch_size} x accumulation {shape.accum} = "
        f"global batch {shape.global_batch}"
    )


def _elastic(record: OrderRecord, new: Shape, old: Shape, overrides: Mapping[str, Any], report: dict[str, Any]) -> None:
    position = report["position"]
    report["notes"].append(
        f"the same global sequence goes on at position {position}: nothing repeated, nothing skipped"
    )
    if new.global_batch == old.global_batch:
        report["notes"].append("the global batch stays: every step consumes the same samples as before the change")
    else:
        report["notes"].append(
            f"the global batch goes from {old.global_batch} to {new.global_batch}: from here on a step is another run "
            "of the same sequence"
        )
        accum, rest = divmod(old.global_batch, new.world * new.batch_size)
        if not rest:
            report["advice"].append(f"train.grad_accum_steps={accum} keeps the global batch at {old.global_batch}")
        else:
            fitting = [size for size in range(1, old.global_batch + 1) if old.global_batch % (size * new.world) == 0]
            if fitting:
                best = min(fitting, key=lambda size: abs(size - new.batch_size))
                accum = old.global_batch // (best * new.world)
                fits = f"train.batch_size={best} train.grad_accum_steps={accum}"
                report["advice"].append(f"{fits} keeps the global batch at {old.global_batch}")
    _elastic_weights(record, overrides, report)


def _elastic_weights(record: OrderRecord, overrides: Mapping[str, Any], report: dict[str, Any]) -> None:
    changed = {key.removeprefix("sampler.weights."): value for key, value in overrides.items() if "weights" in key}
    temperature = overrides.get("sampler.temperature")
    if not changed and temperature is None:
        return
    position = report["position"]
    current = max((s for s in record.segments if s.start <= position), key=lambda segment: segment.start)
    segment = Segment(
        position,
        {**current.weights, **changed},
        current.temperature if temperature is None else temperature,
        current.max_epochs,
    )
    check_segment(segment, record.sizes)
    order = record.elastic_order()
    kept = [one for one in record.segments if one.start != position]
    changed_order = (
        ElasticOrder(record.sizes, record.seed, [*kept, segment], record.exclusions) if not record.retired else None
    )
    before = ", ".join(f"{name} {share:.4f}" for name, share in order.shares_at(position).items())
    report["notes"].append(f"shares until position {position}: {before}")
    if changed_order is not None:
        after = ", ".join(f"{name} {share:.4f}" for name, share in changed_order.shares_at(position).items())
        report["notes"].append(f"shares from position {position}: {after}; every source goes on at its own next sample")
    report["advice"].append("this changes the data of the run: it needs run.allow_data_change=true")


def _seeded(record: OrderRecord, new: Shape, old: Shape, overrides: Mapping[str, Any], report: dict[str, Any]) -> None:
    place = place_at(record, report["step"])
    used = place.batches * old.batch_size * old.world  # samples of this epoch that were consumed
    reached = place.batches * new.batch_size * new.world  # where the skip of another shape would land
    per_epoch = batches_per_epoch(record, old) * old.batch_size * old.world
    report |= {"epoch": place.epoch, "consumed_of_epoch": used, "epoch_samples": per_epoch}
    if (new.world, new.batch_size) == (old.world, old.batch_size):
        report["notes"].append("ranks and batch stay: the epoch goes on exactly where it was")
    elif record.kind == "distributed":
        report["repeated"], report["skipped"] = max(0, used - reached), max(0, reached - used)
        report["notes"].append(
            f"epoch {place.epoch} has given {used} of {per_epoch} samples; its skip of {place.batches} batches would "
            f"land at {reached}: {report['repeated']} repeated, {report['skipped']} never seen in this epoch"
        )
    else:
        left = max(0, per_epoch - reached)
        report["repeated"] = round(left * used / max(1, per_epoch))
        report["skipped"] = report["repeated"] + max(0, reached - used)
        report["notes"].append(
            f"the order of a seeded mixture depends on ranks and batch: of the {left} samples that would follow about "
            f"{report['repeated']} were seen in epoch {place.epoch} already, about {report['skipped']} would be missed"
        )
    if new.world != old.world or (new.batch_size != old.batch_size and place.batches):
        report["accepted"] = False
        report["advice"] += [
            f"the state is refused; go on with world_size={old.world} train.batch_size={old.batch_size} "
            "(train.grad_accum_steps and data.num_workers may change)",
            "use sampler=elastic for runs whose size may change",
        ]
    if any("weights" in key or "temperature" in key for key in overrides):
        _check_weights(record, place.segment, overrides)
        report["notes"].append(
            f"new weights end epoch {place.epoch} early: {per_epoch - used} of its samples are not given in it"
            if place.batches
            else "new weights begin with the new epoch"
        )


def _check_weights(record: OrderRecord, current: Segment, overrides: Mapping[str, Any]) -> None:
    if record.kind == "distributed":
        raise RecordError("this run's sampler is distributed: it has neither weights nor a temperature to change")
    changed = {key.removeprefix("sampler.weights."): value for key, value in overrides.items() if "weights" in key}
    temperature = overrides.get("sampler.temperature", current.temperature)
    check_segment(replace(current, weights={**current.weights, **changed}, temperature=temperature), record.sizes)

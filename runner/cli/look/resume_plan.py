"""Predict which samples a resume with different settings would repeat or skip, and suggest remedies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from exactdata.elastic import check_global_batch
from exactdata.order.batch_shape import BatchShape
from exactdata.order.segments import Segment, check_sources, check_values, segment_at
from exactdata.order.weights import SamplerError
from exactdata.queries.order_record import OrderRecord, RecordError
from exactdata.queries.seeded_epochs import SeededPosition, count_batches_per_epoch, seeded_position_at
from runner.errors import UserError, nearest

_SHAPE = {
    "world_size": "world_size",
    "launcher.ranks": "world_size",
    "train.batch_size": "batch_size",
    "batch_size": "batch_size",
    "train.grad_accum_steps": "grad_accum_steps",
    "grad_accum_steps": "grad_accum_steps",
}
_OTHERS = ("train.global_batch_size", "data.num_workers", "seed", "sampler.temperature")
_WEIGHT = "sampler.weights."
_MAY_BE_ZERO = ("seed", "data.num_workers")


def parse_overrides(record: OrderRecord, texts: list[str]) -> dict[str, Any]:
    """Parse overrides such as `world_size=3 train.batch_size=4 sampler.weights.code=2`.

    Raises:
        RecordError: a setting or source is unknown, or a value is invalid.
    """
    known = [*_SHAPE, *_OTHERS]
    values: dict[str, Any] = {}
    for text in texts:
        key, _, value = text.lstrip("+").partition("=")
        is_weight = key.startswith(_WEIGHT)
        source = key.removeprefix(_WEIGHT)
        if is_weight and source not in record.sizes:
            raise RecordError(
                f"{key}: unknown source{nearest(source, record.sizes)}; the sources are {', '.join(record.sizes)} "
                "(a resume plan cannot add one)"
            )
        if not is_weight and key not in known:
            raise RecordError(f"{key!r}{nearest(key, known)}: --resume-plan accepts {', '.join(known)}, {_WEIGHT}NAME")
        try:
            values[key] = float(value) if is_weight or key == "sampler.temperature" else int(value)
        except ValueError:
            raise RecordError(f"{text!r}: expected a number after '='") from None
        least = 0 if is_weight or key in _MAY_BE_ZERO else 1
        most = 2**63 - 1 if key == "seed" else 2**40
        if key == "sampler.temperature":
            if not 0 < values[key] < math.inf:
                raise RecordError(f"{text!r}: it must be a finite number above 0")
        elif not least <= values[key] <= most:
            raise RecordError(f"{text!r}: it must be a number from {least} to {most}")
    return values


def resume_plan(record: OrderRecord, step: int, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Predict the effect of resuming the run with different settings.

    Args:
        record: the order record of the run.
        step: the number of complete steps.
        overrides: the result of `parse_overrides`.

    Returns:
        `step`, `position`, the batch shape `before` and `after`, the numbers of `repeated` and `skipped` samples,
        `accepted` (whether the runner would resume at all), and the lists of messages `notes` and `advice`.

    Raises:
        RecordError: the settings are impossible.
        SamplerError: the weights are invalid.
    """
    old = record.shape_at(max(0, step - 1))
    new = _new_shape(old, step, overrides)
    report: dict[str, Any] = {
        "step": step,
        "position": record.position_at(step),
        "before": str(old),
        "after": str(new),
        "repeated": 0,
        "skipped": 0,
        "accepted": True,
        "notes": [],
        "advice": [],
    }
    if overrides.get("seed", record.seed) != record.seed:
        report["accepted"] = False
        report["notes"].append(f"seed {overrides['seed']}: the order has seed {record.seed}; the resume is refused")
        report["advice"].append(f"keep seed={record.seed}")
    if record.sampler.elastic:
        _report_elastic(record, new, old, overrides, report)
    else:
        _report_seeded(record, new, old, overrides, report)
    return report


def _new_shape(old: BatchShape, step: int, overrides: Mapping[str, Any]) -> BatchShape:
    changed = {_SHAPE[key]: value for key, value in overrides.items() if key in _SHAPE}
    shape = replace(old, step=step, **changed)
    global_batch_size = overrides.get("train.global_batch_size")
    if old.micro_batches:
        return _dealt_shape(shape, global_batch_size or old.global_batch_size)
    if global_batch_size is None:
        return shape
    try:
        check_global_batch(global_batch_size, shape.world_size * shape.batch_size)
    except UserError as error:
        raise RecordError(f"train.global_batch_size: {error} (replicas times batch_size)") from None
    return replace(shape, grad_accum_steps=global_batch_size // (shape.world_size * shape.batch_size))


def _dealt_shape(shape: BatchShape, global_batch_size: int) -> BatchShape:
    """Return the batch shape in rank-invariant training, which keeps the global batch."""
    micro_batches, rest = divmod(global_batch_size, shape.batch_size)
    if rest:
        raise RecordError(
            f"train.global_batch_size={global_batch_size} must be a multiple of train.batch_size={shape.batch_size}"
        )
    return BatchShape.dealt(shape.step, shape.world_size, shape.batch_size, micro_batches)


def _changed_segment(record: OrderRecord, current: Segment, overrides: Mapping[str, Any]) -> Segment | None:
    """Return the segment with the overridden weights and temperature, or None if neither is overridden.

    Raises:
        RecordError: the sampler does not accept the values.
    """
    weights = {key.removeprefix(_WEIGHT): value for key, value in overrides.items() if key.startswith(_WEIGHT)}
    if not weights and "sampler.temperature" not in overrides:
        return None
    temperature = overrides.get("sampler.temperature", current.temperature)
    changed = replace(current, weights={**current.weights, **weights}, temperature=temperature)
    try:
        check_sources([changed], record.sizes)
        check_values([changed])
    except SamplerError as error:
        raise RecordError(str(error)) from None
    return changed


def _report_elastic(
    record: OrderRecord, new: BatchShape, old: BatchShape, overrides: Mapping[str, Any], report: dict[str, Any]
) -> None:
    report["notes"].append(
        f"the same global sequence continues at position {report['position']}: nothing is repeated or skipped"
    )
    if new.global_batch_size == old.global_batch_size:
        report["notes"].append("the global batch is unchanged: every step consumes the same samples as before")
    else:
        report["notes"].append(
            f"the global batch changes from {old.global_batch_size} to {new.global_batch_size}: later steps consume "
            "other ranges of the same sequence"
        )
        settings = _keeping_global_batch(new, old.global_batch_size)
        if settings:
            report["advice"].append(f"{settings} keeps the global batch at {old.global_batch_size}")
    _report_elastic_weights(record, overrides, report)


def _keeping_global_batch(new: BatchShape, wanted: int) -> str | None:
    """Return settings that keep the global batch size `wanted` on the ranks of `new`, or None if there are none."""
    accumulation, rest = divmod(wanted, new.world_size * new.batch_size)
    if not rest:
        return f"train.grad_accum_steps={accumulation}"
    fitting = [size for size in range(1, wanted + 1) if wanted % (size * new.world_size) == 0]
    if not fitting:
        return None
    nearest_size = min(fitting, key=lambda size: abs(size - new.batch_size))
    accumulation = wanted // (nearest_size * new.world_size)
    return f"train.batch_size={nearest_size} train.grad_accum_steps={accumulation}"


def _report_elastic_weights(record: OrderRecord, overrides: Mapping[str, Any], report: dict[str, Any]) -> None:
    position = report["position"]
    segment = _changed_segment(record, segment_at(record.segments, position), overrides)
    if segment is None:
        return
    kept = tuple(one for one in record.segments if one.start != position)
    changed = replace(record, segments=(*kept, replace(segment, start=position)))
    before, after = (
        ", ".join(f"{name} {share:.4f}" for name, share in one.elastic_sequence().shares_at(position).items())
        for one in (record, changed)
    )
    report["notes"] += [
        f"shares before position {position}: {before}",
        f"shares from position {position}: {after}; every source continues at its next sample",
    ]
    report["advice"].append("this changes the data of the run: set run.allow_data_change=true")


def _report_seeded(
    record: OrderRecord, new: BatchShape, old: BatchShape, overrides: Mapping[str, Any], report: dict[str, Any]
) -> None:
    current = seeded_position_at(record, report["step"])
    consumed = current.batches * old.batch_size * old.world_size  # samples of this epoch
    landing = current.batches * new.batch_size * new.world_size  # samples skipped with the new shape
    epoch_samples = count_batches_per_epoch(record, old) * old.batch_size * old.world_size
    left = epoch_samples - consumed
    report |= {"epoch": current.epoch, "consumed_of_epoch": consumed, "epoch_samples": epoch_samples}
    if (new.world_size, new.batch_size) == (old.world_size, old.batch_size):
        report["notes"].append("ranks and batch are unchanged: the epoch continues exactly where it was")
    elif not record.sampler.mixes:
        report["repeated"], report["skipped"] = max(0, consumed - landing), min(left, max(0, landing - consumed))
        report["notes"].append(
            f"epoch {current.epoch} has consumed {consumed} of {epoch_samples} samples; skipping {current.batches} "
            f"batches would land at {landing}: {report['repeated']} repeated, {report['skipped']} skipped"
        )
    else:
        coming = max(0, epoch_samples - landing)
        report["repeated"] = round(coming * consumed / max(1, epoch_samples))
        report["skipped"] = min(left, report["repeated"] + max(0, landing - consumed))
        report["notes"].append(
            f"the order of a seeded mixture depends on ranks and batch: of the next {coming} samples about "
            f"{report['repeated']} were already consumed in epoch {current.epoch}, and about {report['skipped']} "
            "would be skipped"
        )
    if new.world_size != old.world_size or (new.batch_size != old.batch_size and current.batches):
        report["accepted"] = False
        report["advice"] += [
            f"the resume is refused: keep world_size={old.world_size} train.batch_size={old.batch_size} "
            "(train.grad_accum_steps and data.num_workers may change)",
            "use sampler=elastic for runs whose size may change",
        ]
    _report_seeded_weights(record, current, left, overrides, report)


def _report_seeded_weights(
    record: OrderRecord, current: SeededPosition, left: int, overrides: Mapping[str, Any], report: dict[str, Any]
) -> None:
    segment = _changed_segment(record, current.segment, overrides)
    if segment is None:
        return
    if not record.sampler.mixes:
        raise RecordError(f"sampler={record.kind} has neither weights nor a temperature: leave them out")
    report["notes"].append(
        f"new weights end epoch {current.epoch} early: {left} of its samples are not consumed"
        if current.batches
        else "new weights begin with the new epoch"
    )

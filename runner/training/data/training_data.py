"""Open the training data of an attempt: the sources, the loader, and the data order for the training loop."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from exactdata import StatefulDataLoader
from exactdata.order.batch_shape import BatchShape, append_shape
from exactdata.order.ledger import DataLedger
from runner.config.schema import Config, phase_schedule
from runner.config.targets import instantiate
from runner.data import order_file
from runner.rundir.attempt_log import insist
from runner.rundir.paths import RunDir
from runner.system import stacks
from runner.system.distributed import World
from runner.training.data.consumption import (
    Consumption,
    ElasticConsumption,
    OwnConsumption,
    SeededConsumption,
    TrackedConsumption,
)
from runner.training.data.order import batch_shape, check_epoch, data_plan, make_sampler, order_record
from runner.training.data.sources import join_sources, make_collate, measures, tokens_per_sample
from runner.training.records.run_state import RunState


def run_state_at(step: int, config: Config, world: World, before: RunState | None) -> RunState:
    """Return the run state of an attempt that begins or resumes at `step`.

    Raises:
        UserError: train.global_batch_size cannot be divided among the ranks.
    """
    seed = config.fork.seed_at(step)
    if seed is None:
        seed = before.seed if before else config.seed
    return RunState(
        order={},
        evaluated=before.evaluated if before else False,
        threads=config.run.threads,
        batch_shapes=append_shape(before.batch_shapes if before else (), batch_shape(config, world, step)),
        data_plan=data_plan(config),
        samples_seen=before.samples_seen if before else 0,
        seed=seed,
    )


def open_training_data(
    config: Config,
    world: World,
    datasets: dict[str, Any],
    device: torch.device,
    now: RunState,
    before: RunState | None,
    step: int,
) -> Consumption:
    """Open the training data for the steps from `step` on. This does not restore the loader.

    Args:
        config: config of the run.
        world: the ranks.
        datasets: sources by name.
        device: device that batches are pinned for.
        now: run state of this attempt.
        before: run state of the resumed checkpoint, or None for a new run.
        step: number of completed steps.

    Raises:
        UserError: the loader or the sampler cannot be created, or there is less than one batch of data.
    """
    if config.data.loader:
        return Consumption(instantiate("data.loader", config.data.loader))
    collate = make_collate(config)
    dataset = join_sources(datasets, collate)
    # If the data plan is the same, only the batch shape can have changed.
    same_plan = before is not None and before.data_plan == now.data_plan
    allow_change = config.run.allow_data_change or same_plan or config.fork.begins_at(step)
    sampler = make_sampler(config, dataset, datasets, world, now.batch_shapes, allow_change)
    check_epoch(config, sampler)
    options = _options(config, device)
    loader = StatefulDataLoader(dataset, config.train.batch_size, sampler=sampler, collate_fn=collate, config=options)
    ledger = DataLedger(list(datasets), [len(part) for part in datasets.values()], measures(datasets))
    kind, tokens = config.sampler.kind.value, tokens_per_sample(datasets)
    if kind.elastic:
        return ElasticConsumption(loader, sampler, ledger, tokens)
    consumption = (OwnConsumption if kind.is_own else SeededConsumption)(
        loader,
        sampler,
        ledger,
        tokens,
        phases=phase_schedule(config) if kind.mixes else None,
        num_replicas=world.size,
        rank=world.rank,
    )
    consumption.start_at(step)
    return consumption


def _options(config: Config, device: torch.device) -> SimpleNamespace:
    """Return the options of the loader. They make its workers show their stack traces if they hang."""
    data = config.data
    return SimpleNamespace(
        num_workers=data.num_workers,
        prefetch_factor=data.prefetch_factor,
        pin_memory=device.type == "cuda" if data.pin_memory is None else data.pin_memory,
        worker_start=stacks.show_to_parent,
    )


def record_order(
    run: RunDir, config: Config, consumption: Consumption, datasets: dict[str, Any], shapes: Sequence[BatchShape]
) -> None:
    """Write the record from which `runner inspect` reproduces the data order, if the order is known."""
    if isinstance(consumption, TrackedConsumption):
        order = order_record(config, consumption.sampler, datasets, shapes)
        insist(lambda: order_file.write(order, run.order, run.guard), run.order)

"""Create the data order from the resolved config: batch shapes, samplers, records, and the run's length."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from exactdata.micro_batches import MicroBatchSampler
from exactdata.order.batch_shape import BatchShape, position_at
from exactdata.order.exclusions import Selections
from exactdata.order.segments import Segment
from exactdata.queries.order_record import OrderRecord
from runner.config.schema import Config, length_errors, phase_schedule, rank_invariant, source_weights
from runner.config.targets import bind, instantiate
from runner.errors import UserError
from runner.system import files
from runner.system.distributed import World
from runner.training.data.epoch_steps import EpochSteps, exact
from runner.training.data.sources import mean_tokens

_log = logging.getLogger(__name__)


def batch_shape(config: Config, world: World, step: int) -> BatchShape:
    """Return the batch shape that applies from `step` on.

    Raises:
        UserError: train.global_batch_size cannot be divided among the ranks.
    """
    each, micro = config.train.batch_size, config.train.batch_size * world.size
    accum, whole = config.train.grad_accum_steps, config.train.global_batch_size
    if whole is None:
        return BatchShape(step, world.size, each, accum or 1)
    if whole % micro == 0 and accum is not None and accum * micro != whole:
        raise UserError(
            f"train.global_batch_size={whole} is not train.batch_size={each} x {world.size} ranks"
            f" x train.grad_accum_steps={accum}: remove train.grad_accum_steps, or set it to {whole // micro}"
        )
    if rank_invariant(config):
        return BatchShape.dealt(step, world.size, each, whole // each)
    if whole % micro:
        if whole % world.size:
            remedy = f"choose a multiple of {world.size}, or another number of ranks"
        else:
            remedy = f"choose a train.batch_size that divides {whole // world.size}"
        raise UserError(
            f"train.global_batch_size={whole} is not a multiple of train.batch_size={each} x {world.size} ranks: "
            f"{remedy}"
        )
    return BatchShape(step, world.size, each, whole // micro)


def warn_of_idle_ranks(shape: BatchShape) -> None:
    """Warn if a step has fewer micro-batches than ranks."""
    if 0 < shape.micro_batches < shape.world_size:
        _log.warning(
            f"{shape.world_size - shape.micro_batches} of {shape.world_size} ranks have nothing to do: a step has "
            f"{shape.micro_batches} micro-batches; lower train.batch_size={shape.batch_size}, or use fewer ranks"
        )


def make_sampler(
    config: Config,
    dataset: Any,
    datasets: dict[str, Any],
    world: World,
    shapes: Sequence[BatchShape],
    allow_change: bool,
) -> Any:
    """Create the sampler of this rank.

    Args:
        config: config of the run.
        dataset: the concatenation of `datasets`; the sampler yields indices into it.
        datasets: sources by name.
        world: the ranks.
        shapes: batch shapes of the run, used to convert a phase's start step to a position.
        allow_change: allow loading the state of a different data plan.
    """
    options, sizes = config.sampler, {name: len(part) for name, part in datasets.items()}
    if options.kind.value.is_own:
        return make_own_sampler(config, dataset, sizes, world.size, world.rank)
    if options.kind.value.elastic:
        return _elastic_sampler(config, datasets, shapes, world, allow_change)
    first, common = phase_schedule(config).at(0), {"num_replicas": world.size, "rank": world.rank, "seed": config.seed}
    common |= {"shuffle": options.shuffle, "drop_last": options.drop_last}
    return options.kind.value.make(sizes, first.weight_list, first.temperature, **common)


def _elastic_sampler(
    config: Config, datasets: dict[str, Any], shapes: Sequence[BatchShape], world: World, allow_change: bool
) -> Any:
    """Create the sampler for this rank's part of each global batch, or for its micro-batches."""
    from exactdata import ElasticSampler

    shape, phases = shapes[-1], phase_schedule(config)
    first = phases.at(0)
    elastic = ElasticSampler(
        {name: len(part) for name, part in datasets.items()},
        first.weights,
        num_replicas=1 if shape.micro_batches else world.size,
        rank=0 if shape.micro_batches else world.rank,
        seed=config.seed,
        global_batch_size=shape.global_batch_size,
        temperature=first.temperature,
        segments=[
            {"start": position_at(shapes, step), "weights": state.weights, "temperature": state.temperature}
            for step, state in phases.mixtures()[1:]
        ],
        max_epochs=config.sampler.max_epochs,
        exclude=config.sampler.exclude,
        shuffle=config.sampler.shuffle,
        allow_data_change=allow_change,
    )
    return MicroBatchSampler(elastic, shape, world.rank) if shape.micro_batches else elastic


def make_own_sampler(config: Config, dataset: Any, sizes: dict[str, int], num_replicas: int, rank: int) -> Any:
    """Create the sampler that `sampler._target_` names.

    Args:
        config: config of the run.
        dataset: the dataset, passed as the sampler's first argument.
        sizes: number of samples by source.
        num_replicas: number of ranks.
        rank: this rank.

    Raises:
        UserError: the sampler cannot be created, lacks a method, or has an order that cannot be reproduced.
    """
    from exactdata.own_sampler import own_sampler

    options = config.sampler
    node = options.node(())
    try:
        names = set(inspect.signature(bind("sampler", node).func).parameters) - options.options.keys()
    except ValueError:  # some functions written in C have no signature
        names = set()
    if options.temperature != 1 and "temperature" not in names:
        raise UserError(
            f"sampler.temperature={options.temperature:g}: {options.target} has no argument of this name; leave it out"
        )
    offered: dict[str, Any] = {"seed": config.seed, "sources": sizes, "weights": source_weights(config)}
    offered |= {name: getattr(options, name) for name in ("shuffle", "drop_last", "temperature")}

    def make(num_replicas: int, rank: int) -> Any:
        asked = {**offered, "num_replicas": num_replicas, "rank": rank}
        return instantiate("sampler", node, dataset, **{name: asked[name] for name in names & asked.keys()})

    knows_ranks = {"num_replicas", "rank"} <= names
    return own_sampler(make, knows_ranks, sum(sizes.values()), num_replicas, rank, config.seed)


def check_epoch(config: Config, sampler: Any) -> None:
    """Check that an epoch, or a capped order, has a full batch for every rank. Incomplete batches are dropped.

    Raises:
        UserError: the epoch has too few samples.
    """
    key, least, whose = "train.batch_size", config.train.batch_size, "a rank gets"
    if isinstance(sampler, MicroBatchSampler):
        key, least, whose = "train.global_batch_size", config.train.global_batch_size or 0, "there are"
        sampler = sampler.sampler
    try:
        samples = len(sampler)
    except TypeError:  # the order is infinite
        return
    if samples < least:
        remedy = ", or raise sampler.max_epochs" if config.sampler.max_epochs else ""
        raise UserError(
            f"{key}={least} is more than the {samples} samples that {whose} before the data end: lower {key} or add "
            f"data{remedy}"
        )


def order_record(config: Config, sampler: Any, datasets: dict[str, Any], shapes: Sequence[BatchShape]) -> OrderRecord:
    """Return the record from which `runner inspect` reproduces the data order."""
    sizes = {name: len(part) for name, part in datasets.items()}
    shape: dict[str, Any] = {
        "steps": config.steps,
        "tokens_per_sample": mean_tokens(datasets),
        "packed": {
            name: str(files.resolve(part.packed.directory))
            for name, part in datasets.items()
            if hasattr(getattr(part, "packed", None), "directory")
        },
        "batch_shapes": tuple(shapes),
    }
    if config.sampler.kind.value.elastic:
        return OrderRecord.of_elastic(sampler.state_dict(), sizes, **shape)
    mixtures = phase_schedule(config).mixtures()
    return OrderRecord(
        kind=config.sampler.kind.name,
        seed=config.seed,
        sizes=sizes,
        segments=tuple(Segment(step, state.weights, state.temperature) for step, state in mixtures),
        shuffle=config.sampler.shuffle,
        drop_last=config.sampler.drop_last,
        **shape,
    )


def data_plan(config: Config) -> dict[str, Any]:
    """Return the settings that determine the data order. They do not include the batch shape."""
    options = config.sampler
    return {
        "weights": source_weights(config),
        "temperature": options.temperature,
        "shuffle": options.shuffle,
        "exclude": Selections.parse(options.exclude).to_json(),
        "max_epochs": dict(options.max_epochs),
        "phases": [[step, state.weights, state.temperature] for step, state in phase_schedule(config).mixtures()[1:]],
    }


def with_steps(config: Config, sizes: Sequence[int], shapes: Sequence[BatchShape]) -> Config:
    """Return `config` with the number of steps computed from `train.epochs`.

    If `train.steps` sets the length, the config is returned unchanged.

    Args:
        config: config of the run.
        sizes: number of samples of each source.
        shapes: batch shapes of the steps so far, followed by the shape of the next step. After a change of shape, the
            number of remaining steps is computed from the remaining samples.

    Raises:
        UserError: the epochs have less than one step, or a different setting requires a longer run.
    """
    if config.train.epochs is None:
        return config
    last = shapes[-1]
    samples = EpochSteps.of(config, sizes, shapes).samples(exact(config.train.epochs))
    left = samples - position_at(shapes, last.step)
    steps = last.step + max(left, 0) // last.global_batch_size
    if steps < 1:
        raise UserError(
            f"train.epochs={config.train.epochs:g} of {sum(sizes)} samples is less than one step "
            f"({last}): raise train.epochs, add data, or lower train.batch_size"
        )
    config = replace(config, train=replace(config.train, steps=steps))
    if errors := length_errors(config):
        raise UserError("\n".join(f"{error} (train.epochs={config.train.epochs:g})" for error in errors))
    return config

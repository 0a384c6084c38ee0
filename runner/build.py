"""Resolved config -> the objects one attempt trains with. The last place that knows of the config."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import IterableDataset

from runner.data.datasets import MixtureDataset
from runner.data.ledger_entries import Segment
from runner.data.order_record import OrderRecord
from runner.data.shapes import Shape, position_at
from runner.distributed import World
from runner.errors import UserError
from runner.optim import AdamW, LearningRateScheduler, decay_groups
from runner.schedule import PhaseSchedule, learning_rate, learning_rate_factor
from runner.schema import Config, Precision, SamplerKind


def instantiate(key: str, node: dict[str, Any], *arguments: Any, **more: Any) -> Any:
    """The object that the config's `key` describes by `_target_`, called with these arguments besides.

    Raises:
        UserError: there is no such class, its arguments do not fit, or it refused them.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate as create

    try:
        make = create({**node, "_partial_": True}, _convert_="all")
    except InstantiationException as error:
        raise UserError(f"{key}._target_={node.get('_target_')!r} cannot be made: {_cause(error)}") from error
    try:
        return make(*arguments, **more)
    except TypeError as error:
        raise UserError(f"{key} ({node.get('_target_')}): {error}: check the options under {key}") from error
    except UserError as error:
        raise type(error)(f"{key}: {error}") from error
    except (ValueError, OSError) as error:
        raise UserError(f"{key} ({node.get('_target_')}): {error}") from error


def _cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).splitlines()[0]


def choose_device(wanted: str, world: World) -> torch.device:
    """The device of this rank.

    Raises:
        UserError: a GPU is asked for that is not there.
    """
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(wanted)
    if device.type == "cuda":
        count = torch.cuda.device_count()
        index = world.local_rank if device.index is None else device.index
        if index >= count:
            raise UserError(
                f"train.device={wanted}: GPU {index} is not on this machine, which has {count}: "
                "use train.device=cpu, or fewer ranks on this machine"
            )
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    return device


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seed Python's, numpy's and torch's generators; each rank gets a stream of its own."""
    words = np.random.SeedSequence([seed, rank]).generate_state(4, np.uint64)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]) % 2**32)
    torch.manual_seed(int(words[2]) >> 1)


def sources(config: Config, group: str = "sources") -> dict[str, Any]:
    """The datasets of `data.sources` or `data.eval_sources`, by name.

    Raises:
        UserError: one cannot be made, is no map-style dataset, or has more tokens than the model knows.
    """
    made = {name: instantiate(f"data.{group}.{name}", node) for name, node in getattr(config.data, group).items()}
    known = config.model.get("vocab_size")
    for name, dataset in made.items():
        if not hasattr(dataset, "__len__") or isinstance(dataset, IterableDataset):
            raise UserError(
                f"data.{group}.{name} is a {type(dataset).__name__}, no map-style dataset with a length: "
                "give one, or give a stream as data.loader (docs/streaming.md)"
            )
        tokens = getattr(dataset, "vocab_size", None)
        if isinstance(known, int) and isinstance(tokens, int) and tokens > known:
            raise UserError(
                f"model.vocab_size={known} is too small for data.{group}.{name}, whose tokens are 0 to {tokens - 1}: "
                f"set data.vocab_size={tokens} (model.vocab_size follows it unless it is set)"
            )
    return made


def join(datasets: dict[str, Any], mixed: bool) -> Any:
    """One dataset of all of them: the only one itself, unless it is to carry the number of its source."""
    if len(datasets) == 1 and not mixed:
        return next(iter(datasets.values()))
    return MixtureDataset(list(datasets.values()), list(datasets))


def phase_schedule(config: Config) -> PhaseSchedule:
    """What is in force at each step: weights by source name, temperature, learning-rate scale."""
    weights = {name: config.sampler.weights.get(name, 1.0) for name in config.data.sources}
    return PhaseSchedule(config.phases, weights, config.sampler.temperature)


def batch_shape(config: Config, world: World) -> tuple[int, int]:
    """Micro-batches in a step, and samples in a step over all ranks (the global batch).

    Raises:
        UserError: train.global_batch_size does not divide among the ranks.
    """
    one = config.train.batch_size * world.size
    accum, whole = config.train.grad_accum_steps, config.train.global_batch_size
    if whole is None:
        return accum or 1, one * (accum or 1)
    if whole % one == 0 and accum is not None and accum * one != whole:
        raise UserError(
            f"train.global_batch_size={whole} is not train.batch_size={config.train.batch_size} x {world.size} ranks"
            f" x train.grad_accum_steps={accum}: leave train.grad_accum_steps out, or set it to {whole // one}"
        )
    if whole % one:
        raise UserError(
            f"train.global_batch_size={whole} is not train.batch_size={config.train.batch_size} x {world.size} ranks"
            f" x a whole number of micro-batches: "
            f"choose train.batch_size so that it divides {whole // world.size if whole % world.size == 0 else whole}"
            f"{'' if whole % world.size == 0 else f', which {world.size} ranks cannot share evenly'}"
        )
    return whole // one, whole


def model(config: Config) -> nn.Module:
    """The model, with the same initial weights on every rank."""
    seed_everything(config.seed)
    made = instantiate("model", config.model)
    if not isinstance(made, nn.Module):
        raise UserError(f"model._target_={config.model['_target_']} gave a {type(made).__name__}, no torch.nn.Module")
    return made


def optimizer(config: Config, made: nn.Module) -> torch.optim.Optimizer:
    """The optimizer over the parameters of `made`; our AdamW leaves norms, biases and embeddings undecayed."""
    node = dict(config.optimizer)
    if node["_target_"] == f"{AdamW.__module__}.{AdamW.__qualname__}":
        params: Any = decay_groups(made, float(node.get("weight_decay", 0.01)))
    else:
        params = [parameter for parameter in made.parameters() if parameter.requires_grad]
        if not params:
            raise UserError(f"model {config.model['_target_']} has no parameter to train")
    return instantiate("optimizer", node, params)  # type: ignore[no-any-return]


def scheduler(config: Config, made: torch.optim.Optimizer, phases: PhaseSchedule) -> LearningRateScheduler:
    """Learning rate by step: warmup, decay and the phases' lr_scale."""
    rate = learning_rate(config.scheduler.decay.value, config.scheduler, config.train.steps)
    return LearningRateScheduler(made, learning_rate_factor(rate, phases))


def autocast(config: Config, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """The precision of the forward pass."""
    wanted = config.train.precision
    if wanted is Precision.auto:
        native = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        wanted = Precision.bfloat16 if native else Precision.float32
    if wanted is Precision.float32:
        return nullcontext
    return lambda: torch.autocast(device.type, torch.bfloat16)


def loss(config: Config) -> Callable[[nn.Module, Any], torch.Tensor]:
    """The loss: (model, batch) -> one loss per sample."""
    node = config.train.loss or {"_target_": "runner.models.loss.next_token_loss"}
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate as create

    if not node.get("_target_"):
        raise UserError("train.loss has no _target_: name a function, or leave train.loss out")
    try:
        return create({**node, "_partial_": True}, _convert_="all")  # type: ignore[no-any-return]
    except InstantiationException as error:
        raise UserError(f"train.loss._target_={node['_target_']!r} cannot be imported: {_cause(error)}") from error


def sampler(
    config: Config,
    dataset: Any,
    datasets: dict[str, Any],
    world: World,
    shapes: Sequence[Shape],
    allow_change: bool,
) -> Any:
    """The sampler of this rank.

    Args:
        dataset: what it yields indices into, the sources `datasets` end to end.
        shapes: where the steps lie; the elastic sampler's phases are positions.
        allow_change: whether a state of another plan may be loaded.
    """
    from runner.data import DistributedSampler, ElasticSampler, MixtureSampler

    options, phases = config.sampler, phase_schedule(config)
    common = {"num_replicas": world.size, "rank": world.rank, "seed": config.seed}
    if options.kind is SamplerKind.distributed:
        return DistributedSampler(dataset, **common, shuffle=options.shuffle, drop_last=options.drop_last)
    first = phases.at(0)
    if options.kind is SamplerKind.mixture:
        return MixtureSampler(
            dataset.cumulative_sizes,
            first.weight_list,
            **common,
            shuffle=options.shuffle,
            drop_last=options.drop_last,
            temperature=first.temperature,
        )
    starts = sorted({phase.start_step for phase in config.phases.values()} - {0})
    segments = [(position_at(shapes, step), phases.at(step)) for step in starts]
    return ElasticSampler(
        {name: len(part) for name, part in datasets.items()},
        first.weights,
        global_batch_size=shapes[-1].global_batch,
        temperature=first.temperature,
        segments=[
            {"start": start, "weights": state.weights, "temperature": state.temperature} for start, state in segments
        ],
        max_epochs=options.max_epochs,
        exclude=options.exclude,
        shuffle=options.shuffle,
        allow_data_change=allow_change,
        **common,
    )


def order_record(config: Config, sampler_made: Any, sizes: dict[str, int], shapes: Sequence[Shape]) -> OrderRecord:
    """What `runner.inspect` needs to know of the data order."""
    shape: dict[str, Any] = {
        "steps": config.train.steps,
        "sequence_length": config.data.sequence_length,
        "shapes": tuple(shapes),
    }
    if config.sampler.kind is SamplerKind.elastic:
        return OrderRecord.of_elastic(sampler_made.state_dict(), sizes, **shape)
    phases = phase_schedule(config)
    starts = sorted({0, *(phase.start_step for phase in config.phases.values())})
    return OrderRecord(
        kind=config.sampler.kind.value,
        seed=config.seed,
        sizes=sizes,
        segments=tuple(Segment(step, phases.at(step).weights, phases.at(step).temperature) for step in starts),
        shuffle=config.sampler.shuffle,
        drop_last=config.sampler.drop_last,
        **shape,
    )


def data_plan(config: Config) -> dict[str, Any]:
    """What the data order is made from, as the config has it: to tell a change of it from a change of shape."""
    options = config.sampler
    return {
        "weights": {name: options.weights.get(name, 1.0) for name in config.data.sources},
        "temperature": options.temperature,
        "shuffle": options.shuffle,
        "exclude": list(options.exclude),
        "max_epochs": dict(options.max_epochs),
        "phases": {
            name: [phase.start_step, dict(phase.weights), phase.temperature] for name, phase in config.phases.items()
        },
    }


def fingerprint(config: Config, datasets: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint and the run that loads it must agree in; each source by itself, since sources may come
    and go in a run that allows it."""
    parts: dict[str, Any] = {"seed": config.seed, "sampler": config.sampler.kind.value}
    for name, dataset in datasets.items():
        own = dataset.fingerprint() if hasattr(dataset, "fingerprint") else {}
        parts[f"source {name}"] = {"samples": len(dataset), **own}
    return parts

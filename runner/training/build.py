"""Resolved config -> the objects that one attempt trains with."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.utils.data import IterableDataset

from runner.config.optimizers import OURS, OWN_KEYS, SINGLE, key_of, optimizer_nodes, scheduler_of
from runner.config.schema import Config, Precision, phase_schedule, rank_invariant, source_weights
from runner.config.targets import bind, check_call, instantiate, named
from runner.data.datasets import MixtureDataset
from runner.data.loading.fetch import is_collated
from runner.data.micro_batches import MicroBatchSampler
from runner.data.order.batch_shape import BatchShape, position_at
from runner.data.order.exclusions import Selections
from runner.data.order.segments import Segment
from runner.data.queries.order_record import OrderRecord
from runner.errors import UserError
from runner.system import signals
from runner.system.distributed import World
from runner.training import parameters
from runner.training.average import Average
from runner.training.optimizers import Optimizers
from runner.training.schedulers import make_scheduler


def choose_device(wanted: str, world: World) -> torch.device:
    """The device of this rank.

    Raises:
        UserError: the configured GPU does not exist.
    """
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(wanted)
    if device.type == "cuda":
        count = torch.cuda.device_count()
        index = world.local_rank if device.index is None else device.index
        if index >= count:
            raise UserError(
                f"train.device={wanted}: there is no GPU {index}, this machine has {count}: "
                "use train.device=cpu, or fewer ranks on this machine"
            )
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    return device


def seed_everything(seed: int, *stream: int) -> None:
    """Seed Python's, numpy's and torch's generators; each `stream`, such as a rank, has numbers of its own."""
    words = np.random.SeedSequence([seed, *(stream or (0,))]).generate_state(4, np.uint64)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]) % 2**32)
    torch.manual_seed(int(words[2]) >> 1)


def sources(config: Config, group: str = "sources", streams: bool = False) -> dict[str, Any]:
    """The datasets of `data.sources` or `data.eval_sources`, by name.

    Args:
        streams: iterable datasets are welcome as well.

    Raises:
        UserError: one cannot be instantiated, is not a map-style dataset, or has more tokens than the model.
    """
    datasets = {name: instantiate(f"data.{group}.{name}", node) for name, node in getattr(config.data, group).items()}
    vocabulary = config.model.get("vocab_size")
    for name, dataset in datasets.items():
        if isinstance(dataset, IterableDataset) and streams:
            continue
        if not hasattr(dataset, "__len__") or isinstance(dataset, IterableDataset):
            raise UserError(
                f"data.{group}.{name} is a {type(dataset).__name__}, not a map-style dataset with a length: "
                "use one, or read a stream with data.loader (docs/streaming.md)"
            )
        tokens = getattr(dataset, "vocab_size", None)
        if isinstance(vocabulary, int) and isinstance(tokens, int) and tokens > vocabulary:
            raise UserError(
                f"model.vocab_size={vocabulary} is too small for data.{group}.{name}, with tokens 0 to {tokens - 1}: "
                f"set data.vocab_size={tokens} (model.vocab_size follows it unless set)"
            )
    return datasets


def tokens_per_sample(datasets: dict[str, Any]) -> dict[str, int]:
    """Tokens in each sample, by source, for the datasets that say it by an attribute of this name."""
    said = {name: getattr(dataset, "tokens_per_sample", None) for name, dataset in datasets.items()}
    return {name: tokens for name, tokens in said.items() if isinstance(tokens, int) and not isinstance(tokens, bool)}


def join(datasets: dict[str, Any], collate: Callable[[Any], Any] | None = None) -> Any:
    """One dataset of all of them, whose samples are what the datasets return; a single one is returned as it is.

    Args:
        collate: that of `data.collate`: a list of samples, not a finished batch, is what it takes.
    """
    whole = next(iter(datasets.values()))
    if len(datasets) == 1 and (collate is None or not is_collated(whole)):
        return whole
    return MixtureDataset(list(datasets.values()), list(datasets), tagged=False, gathers=collate is None)


def collate(config: Config) -> Callable[[Any], Any] | None:
    """What makes a batch from a list of samples: a function, or an instance of a class; None: torch's default.

    Raises:
        UserError: it cannot be called with a list of samples.
    """
    node = config.data.collate
    if not node:
        return None
    if inspect.isclass(named("data.collate", node)):
        instance = instantiate("data.collate", node)
        if not callable(instance):
            raise UserError(f"data.collate._target_={node['_target_']}: its instances need a method __call__(samples)")
        made = partial(instance)
    else:
        made = bind("data.collate", node)
    check_call(made, f"data.collate ({node['_target_']})", "collate(samples)", None)
    return made


def batch_shape(config: Config, world: World, step: int) -> BatchShape:
    """How the steps from `step` on are split.

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


def model(config: Config) -> nn.Module:
    """The model, with the same initial weights on every rank, and without gradients where a group freezes it.

    Raises:
        UserError: it cannot be created, or the parameters that the optimizers name are not its own.
    """
    seed_everything(config.seed)
    module = instantiate("model", config.model)
    if not isinstance(module, nn.Module):
        target, found = config.model["_target_"], type(module).__name__
        raise UserError(f"model._target_={target} must create a torch.nn.Module, not a {found}")
    parameters.freeze(module, config.optimizer, config.optimizers)
    return module


def optimizers(config: Config, module: nn.Module, device: torch.device | None = None) -> Optimizers:
    """The optimizers over the parameters of `module`, their schedules, and the scaling of gradients.

    Args:
        module: from `model`, wrapped as it is trained.
        device: where it is trained; by default the CPU.

    Raises:
        UserError: an optimizer or scheduler cannot be created, or a group has an option that its optimizer has not.
    """
    nodes, several = optimizer_nodes(config.optimizer, config.optimizers), config.optimizers
    named = parameters.named_parameters(module)
    parts = parameters.owned(several, named) if several else dict.fromkeys(nodes, named)
    made, schedulers = {}, {}
    for name, node in nodes.items():
        key = key_of(name, several)
        made[name] = _optimizer(key, node, module, parts[name])
        where, options = scheduler_of(key, node if several else {}, config.scheduler)
        schedulers[name] = make_scheduler(where, options, made[name], config.steps, phase_schedule(config))
    kind = (device or torch.device("cpu")).type
    scaler = torch.amp.GradScaler(kind) if config.train.precision is Precision.float16 else None
    return Optimizers(module, made, schedulers, scaler)


def _optimizer(
    key: str, node: dict[str, Any], module: nn.Module, members: parameters.Parameters
) -> torch.optim.Optimizer:
    """One optimizer; our AdamW does not decay norms, biases and embeddings."""
    options = parameters.with_tuples(
        {name: value for name, value in node.items() if name not in (OWN_KEYS if key != SINGLE else ("groups",))}
    )
    groups = parameters.Group.all_of(key, node)
    decay = float(node.get("weight_decay", 0.01)) if node["_target_"] == OURS else None
    params = parameters.param_groups(key, module, members, groups, decay)
    made = instantiate(key, options, params)
    if not isinstance(made, torch.optim.Optimizer):
        raise UserError(f"{key}._target_={node['_target_']} must create a torch.optim.Optimizer, not {made!r:.60}")
    parameters.check_options(groups, made)
    closure = inspect.signature(type(made).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UserError(
            f"{key}._target_={node['_target_']} calls the model several times in an update, which a run that may be "
            "killed does not support: choose another optimizer"
        )
    return made


def average(config: Config, module: nn.Module, world: World, device: torch.device) -> Average | None:
    """The average of the weights of `module`, which is not wrapped yet; None without `train.ema_decay`.

    Raises:
        UserError: the model cannot be copied.
    """
    if config.train.ema_decay is None:
        return None
    return Average(module.to(device), config.train.ema_decay, config.strategy.value, world, device)


def compiled(model: nn.Module, device: torch.device) -> nn.Module:
    """`torch.compile(model)`, which compiles at the first call.

    What Inductor starts for that first is started here, where a signal to the process group does not end it. On a CPU,
    these are trial programs that find out what the CPU can do: Inductor would take one that was ended for a CPU that
    can do less, without a word, and the step in progress would be made, and saved, with other bits. Elsewhere, it is
    the process whose workers compile: nothing notices its end, and the compilation would wait for it for ever.
    """
    with suppress(ImportError), signals.blocked():
        if device.type == "cpu":
            from torch._inductor.cpu_vec_isa import pick_vec_isa

            pick_vec_isa()
        else:
            from torch._inductor.async_compile import AsyncCompile

            AsyncCompile.warm_pool()
    return cast(nn.Module, torch.compile(model))


def autocast(config: Config, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """The precision of the forward pass."""
    wanted = config.train.precision
    if wanted is Precision.auto:
        native = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        wanted = Precision.bfloat16 if native else Precision.float32
    if wanted is Precision.float32:
        return nullcontext
    dtype = torch.float16 if wanted is Precision.float16 else torch.bfloat16
    return lambda: torch.autocast(device.type, dtype)


def sampler(
    config: Config,
    dataset: Any,
    datasets: dict[str, Any],
    world: World,
    shapes: Sequence[BatchShape],
    allow_change: bool,
) -> Any:
    """The sampler of this rank.

    Args:
        dataset: the sources `datasets` concatenated; the sampler yields indices into it.
        shapes: the batch shapes of the run: they turn the start step of a phase into a position.
        allow_change: whether the state of another data plan may be loaded.
    """
    options, sizes = config.sampler, {name: len(part) for name, part in datasets.items()}
    if options.kind.value.is_own:
        return own_sampler(config, dataset, sizes, world.size, world.rank)
    if options.kind.value.elastic:
        return _elastic_sampler(config, datasets, shapes, world, allow_change)
    first, common = phase_schedule(config).at(0), {"num_replicas": world.size, "rank": world.rank, "seed": config.seed}
    common |= {"shuffle": options.shuffle, "drop_last": options.drop_last}
    return options.kind.value.make(sizes, first.weight_list, first.temperature, **common)


def _elastic_sampler(
    config: Config, datasets: dict[str, Any], shapes: Sequence[BatchShape], world: World, allow_change: bool
) -> Any:
    """That of this rank: of its part of each global batch, or of its micro-batches."""
    from runner.data import ElasticSampler

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


def own_sampler(config: Config, dataset: Any, sizes: dict[str, int], num_replicas: int, rank: int) -> Any:
    """The sampler that `sampler._target_` names.

    Args:
        dataset: its first argument.
        sizes: samples by source name.

    Raises:
        UserError: it cannot be created, lacks a method, or its order cannot be repeated.
    """
    from runner.data.own_sampler import own_sampler as adapted

    options = config.sampler
    node = options.node(())
    try:
        names = set(inspect.signature(bind("sampler", node).func).parameters) - options.options.keys()
    except ValueError:  # some written in C have none
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
    return adapted(make, knows_ranks, sum(sizes.values()), num_replicas, rank, config.seed)


def check_epoch(config: Config, sampler: Any) -> None:
    """Check that an epoch, or a capped order, holds a batch of every rank at all: incomplete ones are dropped.

    Raises:
        UserError: it does not.
    """
    key, least, whose = "train.batch_size", config.train.batch_size, "a rank gets"
    if isinstance(sampler, MicroBatchSampler):
        key, least, whose = "train.global_batch_size", config.train.global_batch_size or 0, "there are"
        sampler = sampler.sampler
    try:
        samples = len(sampler)
    except TypeError:  # it does not end
        return
    if samples < least:
        remedy = ", or raise sampler.max_epochs" if config.sampler.max_epochs else ""
        raise UserError(
            f"{key}={least} is more than the {samples} samples that {whose} before the data end: lower {key} or add "
            f"data{remedy}"
        )


def order_record(config: Config, sampler: Any, datasets: dict[str, Any], shapes: Sequence[BatchShape]) -> OrderRecord:
    """What `runner inspect` needs to know about the data order."""
    sizes = {name: len(part) for name, part in datasets.items()}
    shape: dict[str, Any] = {
        "steps": config.steps,
        "tokens_per_sample": tokens_per_sample(datasets),
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
    """The part of the config that determines the data order: equal if only the batch shape was changed."""
    options = config.sampler
    return {
        "weights": source_weights(config),
        "temperature": options.temperature,
        "shuffle": options.shuffle,
        "exclude": Selections.parse(options.exclude).to_json(),
        "max_epochs": dict(options.max_epochs),
        "phases": [[step, state.weights, state.temperature] for step, state in phase_schedule(config).mixtures()[1:]],
    }


def fingerprint(config: Config, datasets: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint and the run that loads it must have in common, each source by itself: a run may allow sources
    to be added and removed."""
    parts: dict[str, Any] = {"seed": config.seed, "sampler": config.sampler.kind.name}
    for name, dataset in datasets.items():
        own = dataset.fingerprint() if hasattr(dataset, "fingerprint") else {}
        parts[f"source {name}"] = {"samples": len(dataset), **own}
    return parts

"""Define the contents of a config with plain dataclasses, and check its values.

This module does not import torch, hydra, omegaconf or numpy. `runner.config.tree` registers these classes with Hydra.
Other packages take instances of them, or plain values, as arguments.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import Any

from exactdata.samplers import SamplerKind
from runner import bounds
from runner.bounds import MAX_COUNT
from runner.config.early_stopping import Best, EarlyStoppingConfig
from runner.config.identity import DEFAULT_STEPS
from runner.config.optimizers import is_finite, optimizer_errors
from runner.config.own_target import Replaceable, option_errors
from runner.config.schedule import (
    Phase,
    PhaseSchedule,
    ScheduleError,
    SchedulerConfig,
    scheduler_errors,
    weight_errors,
)
from runner.config.search import SearchConfig
from runner.errors import nearest


class WeightsBy(Enum):
    """The default weight of sources that `sampler.weights` does not name. With `tokens`, all weights are in tokens."""

    equal = "equal"  # weight 1
    sizes = "sizes"  # the number of samples of the source
    tokens = "tokens"  # the number of tokens of the source


class Precision(Enum):
    float32 = "float32"
    float16 = "float16"  # uses gradient scaling
    bfloat16 = "bfloat16"
    auto = "auto"  # bfloat16 if the device supports it, else float32


class NonFinite(Enum):
    stop = "stop"
    skip = "skip"


class CallbackFailure(Enum):
    drop = "drop"
    stop = "stop"


class Strategy(Enum):
    ddp = "ddp"
    fsdp = "fsdp"


# Configs use the names of the members. `async` is a keyword, so a class statement could not define it.
SaveMode = Enum("SaveMode", {"async": "async", "sync": "sync"})
ASYNC = SaveMode("async")


@dataclass
class RunConfig:
    name: str | None = None
    dir: str | None = None
    root: str = "outputs"
    tags: list[str] = field(default_factory=list)
    notes: str | None = None
    allow_data_change: bool = False
    threads: int = 1
    lease_timeout_s: float = 30.0
    directory: str | None = None  # filled in: the command's working directory
    typed: dict[str, Any] = field(default_factory=dict)  # filled in: paths relative to that directory, by dotted key
    changed_by: list[str] = field(default_factory=list)  # filled in: callbacks that change what is trained


@dataclass
class TrainConfig:
    steps: int | None = None
    epochs: float | None = None
    batch_size: int = 16
    grad_accum_steps: int | None = None
    global_batch_size: int | None = None
    rank_invariant: bool | None = None
    clip_norm: float | None = 1.0
    precision: Precision = Precision.auto
    ema_decay: float | None = None
    compile: bool = False
    device: str = "auto"
    deterministic: bool = False
    peer_timeout_s: float = 60.0
    hang_timeout_s: float | None = 60.0
    on_nonfinite: NonFinite = NonFinite.stop
    on_callback_error: CallbackFailure = CallbackFailure.drop
    profile: str | None = None
    loss: dict[str, Any] = field(default_factory=dict)


@dataclass
class EvalSetConfig:
    """Options of one evaluation set.

    Args:
        sources: The sources of data.eval_sources to evaluate on. []: all.
        every_steps: Steps between its evaluations. 0: none. null: as eval.every_steps.
        batches: Batches per source. null: as eval.batches.
        batch_size: Sequences per batch. null: as eval.batch_size.
    """

    sources: list[str] = field(default_factory=list)
    every_steps: int | None = None
    batches: int | None = None
    batch_size: int | None = None


@dataclass
class EvalConfig:
    every_steps: int | None = None
    every_epochs: float | None = None
    at_start: bool = False
    at_end: bool = True
    batches: int = 8
    batch_size: int | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    sets: dict[str, EvalSetConfig] = field(default_factory=dict)


@dataclass
class DataConfig:
    sources: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    eval_sources: dict[str, Any] = field(default_factory=dict)
    loader: dict[str, Any] = field(default_factory=dict)
    collate: dict[str, Any] = field(default_factory=dict)
    sequence_length: int = 128
    vocab_size: int = 256
    cache_dir: str | None = None
    num_workers: int = 0
    prefetch_factor: int | None = None
    pin_memory: bool | None = None


@dataclass
class SamplerConfig(Replaceable):
    kind: SamplerKind = SamplerKind.distributed
    temperature: float = 1.0
    weights: dict[str, float] = field(default_factory=dict)
    weights_by: WeightsBy | None = None
    shuffle: bool = True
    drop_last: bool = True
    exclude: list[str] = field(default_factory=list)
    max_epochs: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target and self.kind is SamplerKind.distributed:  # the default, which users may leave
            self.kind = SamplerKind.own


@dataclass
class BestConfig:
    metric: str = "eval_loss"
    mode: Best = Best.min


@dataclass
class CheckpointConfig:
    every_steps: int | None = 100
    every_minutes: float | None = None
    every_epochs: float | None = None
    keep_last: int = 3
    keep_every_steps: int | None = None
    keep_best: int = 0
    best: BestConfig = field(default_factory=BestConfig)
    mode: SaveMode = ASYNC
    adaptive: bool = False
    min_interval_s: float = 10.0
    max_interval_s: float = 1800.0


@dataclass
class InitConfig:
    path: str | None = None  # path of a .safetensors file, or of a run, which is then identified by the fields below
    run: str | None = None
    at: str | None = None  # a step number, `last` or `best`
    digest: str | None = None  # the identity of the source run
    match: list[str] = field(default_factory=list)
    strict: bool = True


@dataclass
class ForkConfig:
    run: str | None = None
    step: int | None = None
    digest: str | None = None
    seed: int | None = None
    was: dict[str, Any] = field(default_factory=dict)
    trunk: dict[str, Any] = field(default_factory=dict)

    def begins_at(self, step: int) -> bool:
        """Return whether a branch begins at `step`. Then it loads its trunk's checkpoint, and its changes apply."""
        return self.run is not None and step == self.step

    def seed_at(self, step: int) -> int | None:
        """Return the seed of a branch that begins at `step` if it differs from its trunk's seed, else None."""
        return self.seed if self.begins_at(step) and "seed" in self.was else None


@dataclass
class Config:
    seed: int = 0
    run: RunConfig = field(default_factory=RunConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    data: DataConfig = field(default_factory=DataConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    phases: dict[str, Phase] = field(default_factory=dict)
    early_stopping: EarlyStoppingConfig = field(default_factory=EarlyStoppingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    model: dict[str, Any] = field(default_factory=dict)
    task: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    optimizers: dict[str, Any] = field(default_factory=dict)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    strategy: Strategy = Strategy.ddp
    launcher: dict[str, Any] = field(default_factory=dict)
    logger: dict[str, Any] = field(default_factory=dict)
    callbacks: dict[str, Any] = field(default_factory=dict)
    init_from: InitConfig = field(default_factory=InitConfig)
    fork: ForkConfig = field(default_factory=ForkConfig)
    user: dict[str, Any] = field(default_factory=dict)

    @property
    def known_steps(self) -> int | None:
        """Return the number of steps. Return None if it depends on `train.epochs` and the datasets are not open yet."""
        if self.train.steps is None and self.train.epochs is None:
            return DEFAULT_STEPS
        return self.train.steps

    @property
    def steps(self) -> int:
        """Return the number of steps of the run.

        Call this only when the number is known, e.g. in an attempt that has opened its datasets.
        """
        assert self.known_steps is not None
        return self.known_steps

    @property
    def evaluation_interval(self) -> int:
        """Return the steps between evaluations, which do not depend on the run's length. 0 means none."""
        if not self.data.eval_sources:
            return 0
        if self.eval.every_steps is None:
            return EVALUATION_INTERVAL if self.eval.every_epochs is None else 0
        return self.eval.every_steps

    @property
    def evaluates(self) -> bool:
        """Return whether the run has any evaluations."""
        others = any(each.every_steps for each in self.eval.sets.values())
        usual = self.evaluation_interval > 0 or self.eval.every_epochs is not None
        return bool(self.data.eval_sources) and (usual or others)

    @property
    def evaluates_every_set(self) -> bool:
        """Return whether the run has evaluations and none of them is disabled."""
        usual = self.evaluation_interval > 0 or self.eval.every_epochs is not None
        return self.evaluates and usual and 0 not in [each.every_steps for each in self.eval.sets.values()]


@dataclass
class CommandData(DataConfig):
    """The data section of a command. Sources may share values: each source starts with the values of `source`."""

    source: dict[str, Any] = field(default_factory=dict)


@dataclass
class Command(Config):
    """All settings of a command: the config of a run, and the settings of a search."""

    data: CommandData = field(default_factory=CommandData)
    search: SearchConfig = field(default_factory=SearchConfig)


def rank_invariant(config: Config) -> bool:
    """Return whether the result is independent of the number of ranks. By default it is, whenever possible."""
    wanted = config.train.rank_invariant
    return not list(_obstacles_to_rank_invariance(config)) if wanted is None else wanted


def _obstacles_to_rank_invariance(config: Config) -> Iterator[str]:
    """Yield each obstacle to rank-invariant training, with one remedy."""
    if config.train.global_batch_size is None:
        yield "set train.global_batch_size=N: otherwise the batch of a step grows with the ranks"
    if config.data.loader:
        yield "remove data.loader, which deals out its own batches"
    elif not config.sampler.kind.value.elastic:
        yield f"choose sampler=elastic: with {config.sampler.kind.name} the order depends on the ranks"
    if config.strategy is not Strategy.ddp:
        yield f"choose strategy=ddp: {config.strategy.value} adds gradients in the order of the ranks"


EVALUATION_INTERVAL = 100  # the default of eval.every_steps


def config_errors(config: Config) -> list[str]:
    """Return every error in `config`, one line each, with the key, its value and the allowed values."""
    return [
        *_number_errors(config),
        *_range_errors(config),
        *_profile_errors(config),
        *_shipped_class_errors(config),
        *_path_errors(config),
        *_missing_target_errors(config),
        *_eval_set_errors(config),
        *optimizer_errors(config.optimizer, config.optimizers, config.known_steps, config.phases),
        *_length_of_sample_errors(config),
        *_sampler_errors(config),
        *_evaluation_errors(config),
        *config.early_stopping.option_errors(),
        *_epochs_errors(config),
        *length_errors(config),
        *_fork_errors(config),
        *_rank_invariance_errors(config),
    ]


def _rank_invariance_errors(config: Config) -> Iterator[str]:
    """Yield the obstacles if rank-invariant training was requested but is not possible."""
    if config.train.rank_invariant:
        for remedy in _obstacles_to_rank_invariance(config):
            yield f"train.rank_invariant=true: {remedy}"


def _number_errors(config: Config) -> Iterator[str]:
    """Yield the errors of numbers that are too small, too large or not finite."""
    for key in bounds.BOUNDS:
        if line := bounds.error(key, attrgetter(key)(config)):
            yield line
    decay = config.train.ema_decay
    if decay is not None and not bounds.OTHERS["train.ema_decay"].allows(decay):
        yield f"train.ema_decay={decay} must be a number between 0 and 1, such as 0.999, or null"


def _range_errors(config: Config) -> Iterator[str]:
    run = config.run
    paths = {"run.dir": run.dir, "run.root": run.root, "run.name": run.name, "init_from": config.init_from.path}
    for key, text in paths.items():
        if text is not None and not text.strip():
            yield f"{key} is empty: set a name, or null for the default"
        if text is not None and not text.isprintable():
            yield f"{key}={text!r} must be printable: without line breaks, tabs and the like"
    for tag in config.run.tags:
        if not tag.strip() or not tag.isprintable() or "," in tag:
            yield f"run.tags={tag!r}: a tag must be printable, without commas"
    name = config.run.name or ""
    if name.startswith("/") or any(part.startswith(".") for part in name.split("/")):
        yield f"run.name={name} must stay below run.root, without parts that start with a dot: set run.root or run.dir"
    if config.checkpoint.max_interval_s < config.checkpoint.min_interval_s:
        yield bounds.of_intervals(config.checkpoint.min_interval_s, config.checkpoint.max_interval_s)
    batch, whole = config.train.batch_size, config.train.global_batch_size
    if whole is not None and batch >= 1 and whole % batch:
        yield f"train.global_batch_size={whole} must be a multiple of train.batch_size={batch}"
    if not (metric := config.checkpoint.best.metric).strip() or not metric.isprintable():
        yield f"checkpoint.best.metric={metric!r} must be a key of an evaluation's record, such as eval_loss"
    if config.train.precision is Precision.float16 and config.strategy is Strategy.fsdp:
        yield "train.precision=float16 does not work with strategy=fsdp: use bfloat16, or strategy=ddp"
    device = config.train.device
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        yield f"train.device={device!r} must be auto, cpu, cuda or cuda:N{nearest(device, ['auto', 'cpu', 'cuda'])}"


def profiled_steps(text: str) -> tuple[int, int] | None:
    """Return (first, last) from `train.profile=first:last`, or None if the value has a different form."""
    found = re.fullmatch(r"(\d{1,18}):(\d{1,18})", text)
    return (int(found[1]), int(found[2])) if found else None


def _profile_errors(config: Config) -> Iterator[str]:
    train, known = config.train, config.known_steps
    if train.profile is None:
        return
    most = MAX_COUNT if known is None else known
    steps = profiled_steps(train.profile)
    if steps is None:
        yield f"train.profile={train.profile} must be first:last, two step numbers such as 20:25 (in quotes in a file)"
    elif not 1 <= steps[0] <= steps[1] <= most:
        limit = "" if known is None else f", {known} or less, the steps of this run"
        yield f"train.profile={train.profile} must be first:last, both 1 or more and in this order{limit}"


def _shipped_class_errors(config: Config) -> Iterator[str]:
    """Yield the errors in options of this package's model. Other models check their options when they are created."""
    model = config.model
    if model.get("_target_") == "runner.models.gpt.GPT":
        sizes = {key: model.get(key, 1) for key in ("vocab_size", "sequence_length", "layers", "heads", "width")}
        wrong = [
            f"model.{key}={size} must be a whole number, {'1 or more' if not _is_size(size) else '2**40 or less'}"
            for key, size in sizes.items()
            if not _is_size(size) or size > MAX_COUNT
        ]
        yield from wrong
        if not wrong and "width" in model and sizes["width"] % sizes["heads"]:
            yield f"model.width={sizes['width']} must be a multiple of model.heads={sizes['heads']}"
        for key in ("bias", "tie_weights"):
            if not isinstance(flag := model.get(key, True), bool):
                yield f"model.{key}={flag} must be true or false"
        if not is_finite(dropout := model.get("dropout", 0.0)) or not 0 <= dropout < 1:
            yield f"model.dropout={dropout} must be a number from 0 to below 1"


PATH_CLASSES = tuple(
    f"runner.data.{name}" for name in ("text.TextFiles", "shards.TokenShards", "documents.dataset.Documents")
)


def _path_errors(config: Config) -> Iterator[str]:
    """Yield the errors in paths of this package's datasets.

    Held-out sources often have the same paths as training sources, so the same wrong value is reported only once.
    """
    reported: list[Any] = []
    for key, node in _source_nodes(config):
        target = node.get("_target_") if isinstance(node, dict) else None
        if target not in PATH_CLASSES:
            continue
        paths = node.get("paths")
        listed = paths if isinstance(paths, list) else [paths]
        if paths not in reported and not (listed and all(isinstance(path, str) and path for path in listed)):
            reported.append(paths)
            yield f"{key}.paths={paths} must be a path, or a list of paths: a/b, or [a,b]"


def _source_nodes(config: Config) -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the node of every source, held-out sources last."""
    for group in ("sources", "eval_sources"):
        for name, node in getattr(config.data, group).items():
            yield f"data.{group}.{name}", node


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _missing_target_errors(config: Config) -> Iterator[str]:
    """Yield the errors of nodes that need a `_target_` and have none."""
    if not config.data.sources and not config.data.loader:
        yield (
            "data.sources is empty: choose data=text or data=mixture, name your documents with data=documents "
            "data.sources.NAME.paths=..., or add your own source: +data.sources.NAME={_target_:my_module.MyData}"
        )
    if not config.model.get("_target_"):
        yield "model._target_ is missing: choose a model, for example model=gpt"
    for key, node in _source_nodes(config):
        if not isinstance(node, dict):
            group, _, name = key.rpartition(".")
            yield f"{key}={node} must be a source: a dictionary, or write {group}.NAME.{name}={node}"
        elif not node.get("_target_"):
            yield f"{key} has no _target_: name the class of the dataset"
    if config.data.loader and not config.data.loader.get("_target_"):
        yield "data.loader has no _target_: name the class of your loader"
    if config.data.collate and not config.data.collate.get("_target_"):
        yield "data.collate has no _target_: name a function or class that makes a batch from a list of samples"
    if config.data.collate and config.data.loader:
        yield "data.collate is unused with data.loader, which makes its own batches: remove one of them"
    named = (
        ("logger", "logger", config.logger),
        ("callbacks", "callback", config.callbacks),
        ("eval.metrics", "metric", config.eval.metrics),
    )
    for group, what, nodes in named:
        for name, node in nodes.items():
            if node is not None and not (isinstance(node, dict) and node.get("_target_")):
                yield f"{group}.{name} has no _target_: name the class of the {what}, or set null to drop it"


def _eval_set_errors(config: Config) -> Iterator[str]:
    """Yield the errors of evaluation sets: unknown sources, numbers out of range, a metric named like the loss."""
    if config.eval.metrics.get("loss") is not None:
        yield "eval.metrics.loss would replace eval_loss, the mean of the task's loss: choose another name"
    known = list(config.data.eval_sources)
    for name, each in config.eval.sets.items():
        key = f"eval.sets.{name}"
        if not name.isidentifier():
            yield f"{key}: the name becomes part of the metrics' names: use letters, digits and underscores"
        for source in each.sources:
            if source not in known:
                there = ", ".join(known) or "none"
                yield f"{key}.sources: no such source {source!r}{nearest(source, known)}; data.eval_sources has {there}"
        for option in ("every_steps", "batches", "batch_size"):
            value, bound = getattr(each, option), bounds.OTHERS[f"eval.sets.NAME.{option}"]
            if value is not None and not bound.allows(value):
                yield f"{key}.{option}={value} must be from {bound.least} to 2**40"


def _sampler_errors(config: Config) -> Iterator[str]:
    """Yield the errors of sources, weights and phases that the sampler does not support."""
    sources, options, name = list(config.data.sources), config.sampler, config.sampler.kind.name
    kind = options.kind.value
    yield from option_errors("sampler", options)
    if kind.is_own and not options.target:
        yield "sampler._target_ is missing: name the class of your sampler, or choose sampler=elastic"
    if not kind.is_own and options.target:
        yield (
            f"sampler._target_={options.target} is unused by sampler={name}: choose sampler=own, or "
            "remove it and its options with '~sampler._target_' and so on"
        )
    yield from weight_errors("sampler.weights", options.weights, sources)
    for line in weight_errors("data.weights", config.data.weights, sources):
        yield f"{line}; data.sources.NAME=null removes a source with its weight" if "no such source" in line else line
    yield from weight_errors("sampler.max_epochs", options.max_epochs, sources)
    if sources and not any(source_weights(config).values()):
        yield "sampler.weights are all 0: at least one source needs a weight above 0"
    if not kind.several and len(sources) > 1:
        yield (
            f"sampler.kind={name} samples one source and data.sources names {len(sources)} "
            f"({', '.join(sources)}): choose sampler=mixture or sampler=elastic, or keep one source "
            "(data=own has only those that you add)"
        )
    if not kind.mixes:
        for phase_name, phase in config.phases.items():
            if phase.weights or phase.temperature is not None:
                yield f"phases.{phase_name} sets weights, unused by sampler={name}: choose sampler=mixture or elastic"
    tempered = is_finite(options.temperature) and options.temperature > 0 and options.temperature != 1
    if not kind.several and tempered:
        yield (
            f"sampler.temperature={options.temperature:g} works with several sources, not with sampler={name}: "
            "choose data=mixture, or sampler=mixture or sampler=elastic with several data.sources, or leave it out"
        )
    if not kind.elastic:
        for key in ("exclude", "max_epochs"):
            if getattr(options, key):
                yield f"sampler.{key} works with sampler=elastic only, not with {name}"


def source_weights(config: Config) -> dict[str, Any]:
    """Return the base weight of every source, in the order of the sources.

    If `sampler.weights` does not name a source, its weight is taken from `data.weights`, or is 1. If
    `sampler.weights_by` is set, it takes precedence over both: the weight is 1, or the placeholder `WeightsBy.sizes` or
    `WeightsBy.tokens` until the datasets are open.
    """
    by, own = config.sampler.weights_by, config.data.weights
    usual: dict[str, Any] = {name: own.get(name, 1.0) for name in config.data.sources}
    if by is not None:
        usual = dict.fromkeys(usual, 1.0 if by is WeightsBy.equal else by)
    return {name: config.sampler.weights.get(name, weight) for name, weight in usual.items()}


def phase_schedule(config: Config) -> PhaseSchedule:
    """Return the schedule of phases: weights by source name, temperature and learning-rate scale."""
    return PhaseSchedule(config.phases, source_weights(config), config.sampler.temperature)


def _fork_errors(config: Config) -> Iterator[str]:
    """Yield an error if `fork` is only partly set. When a branch is composed, all of it is filled in."""
    fork = config.fork
    given = [f"fork.{name}={value}" for name, value in vars(fork).items() if value not in (None, {})]
    if given and None in (fork.run, fork.step, fork.digest):
        yield f"{given[0]} is filled in for a branch: name its trunk with fork=RUN@STEP on the command line"


def _length_of_sample_errors(config: Config) -> Iterator[str]:
    """Yield an error if samples are longer than this package's model supports. Other models report this themselves."""
    most = config.model.get("sequence_length", 0)
    if config.model.get("_target_") != "runner.models.gpt.GPT" or not _is_size(most):
        return
    found: dict[str, Any] = {}
    for key, node in _source_nodes(config):
        length = node.get("sequence_length", 0) if isinstance(node, dict) else 0
        if _is_size(length) and length > most:
            shared = length == config.data.sequence_length
            found["data.sequence_length" if shared else f"{key}.sequence_length"] = length
    for key, length in found.items():
        yield (
            f"{key}={length} must be {most} or less, which is model.sequence_length: shorten the samples, or remove "
            "model.sequence_length, which then follows data.sequence_length"
        )


def _evaluation_errors(config: Config) -> Iterator[str]:
    """Yield the errors of evaluations that were requested but can never happen, regardless of the number of steps."""
    best = config.checkpoint.keep_best
    if config.eval.at_start and config.data.eval_sources and not config.evaluates:
        yield "eval.at_start=true needs evaluations, and eval.every_steps=0 means none: set eval.every_steps=null"
    if config.early_stopping.is_set and not config.evaluates:
        remedy = "set eval.every_steps=null" if config.data.eval_sources else "add data.eval_sources.NAME"
        yield f"early_stopping needs evaluations, and there are none: {remedy}, or choose early_stopping=none"
    if best > 0 and not config.data.eval_sources:
        yield (
            f"checkpoint.keep_best={best} needs evaluations: add data.eval_sources.NAME, or set checkpoint.keep_best=0"
        )
    elif best > 0 and not config.evaluates:
        yield (
            f"checkpoint.keep_best={best} needs evaluations, and eval.every_steps=0 means none: set "
            "eval.every_steps=null, or checkpoint.keep_best=0"
        )


def _epochs_errors(config: Config) -> Iterator[str]:
    """Yield an error if `train.epochs` and `train.steps` are both set, or if epochs are set for data without length."""
    train = config.train
    given = {"eval.every_epochs": config.eval.every_epochs, "checkpoint.every_epochs": config.checkpoint.every_epochs}
    for key, value in given.items():
        if value is not None and config.data.loader:
            yield (
                f"{key}={value:g} needs data with a length, and data.loader may be a stream without one: set "
                f"{key}=null and {key.replace('epochs', 'steps')}=N"
            )
    if train.epochs is None:
        return
    if train.steps is not None:
        yield (
            f"train.steps={train.steps} and train.epochs={train.epochs:g} both set the length of the run: keep one, "
            "and set the other to null"
        )
    if config.data.loader:
        yield (
            f"train.epochs={train.epochs:g} needs data with a length, and data.loader may be a stream without one: "
            "set train.epochs=null and train.steps=N"
        )


def length_errors(config: Config) -> list[str]:
    """Return the errors that depend on the number of steps, one line each, if `Config.known_steps` is known."""
    return [*_schedule_errors(config), *_interval_errors(config)]


def _interval_errors(config: Config) -> Iterator[str]:
    """Yield an error if checkpoints are kept by evaluation results but the run ends before its first evaluation."""
    steps, best = config.known_steps or 0, config.checkpoint.keep_best
    if steps < 1 or best < 1 or not config.data.eval_sources:
        return
    every = [config.evaluation_interval, *(each.every_steps for each in config.eval.sets.values())]
    intervals = [interval for interval in every if interval]
    if intervals and config.eval.every_epochs is None and min(intervals) > steps:
        yield (
            f"checkpoint.keep_best={best} needs evaluations, and the first one is due at step {min(intervals)} of "
            f"{steps}: set eval.every_steps={steps} or less, or checkpoint.keep_best=0"
        )


def _schedule_errors(config: Config) -> Iterator[str]:
    """Yield the errors of the phases and of the learning-rate schedule."""
    weights = source_weights(config)
    try:
        # Wrong values are reported elsewhere.
        if all(isinstance(weight, int | float | WeightsBy) for weight in weights.values()):
            PhaseSchedule(config.phases, weights)
    except ScheduleError as error:
        yield from str(error).splitlines()
    yield from scheduler_errors("scheduler", config.scheduler, config.known_steps, config.phases)

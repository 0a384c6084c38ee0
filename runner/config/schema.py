"""What a config may contain: plain dataclasses and their checks.

Nothing here imports torch, hydra, omegaconf or numpy. `runner.config.tree` registers these classes with Hydra;
everything outside this package takes them, or plain values, as arguments.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from runner.config.further import FURTHER, unknown_key_errors
from runner.config.schedule import (
    MAX_COUNT,
    MAX_FACTOR,
    Phase,
    PhaseSchedule,
    ScheduleError,
    SchedulerConfig,
    learning_rate,
    weight_errors,
)
from runner.errors import nearest


class SamplerKind(Enum):
    distributed = "distributed"
    mixture = "mixture"
    elastic = "elastic"
    own = "own"


class Precision(Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    auto = "auto"  # bfloat16 where the device has it, float32 elsewhere


class NonFinite(Enum):
    stop = "stop"
    skip = "skip"


class Strategy(Enum):
    ddp = "ddp"
    fsdp = "fsdp"


# A config uses the members' names, and `async` is a keyword, which a class statement cannot define.
SaveMode = Enum("SaveMode", {"async": "async", "sync": "sync"})
ASYNC = SaveMode("async")


@dataclass
class RunConfig:
    name: str | None = None
    dir: str | None = None
    root: str = "outputs"
    allow_data_change: bool = False
    threads: int | None = None
    lease_timeout_s: float = 30.0


@dataclass
class TrainConfig:
    steps: int = 300
    batch_size: int = 16
    grad_accum_steps: int | None = None
    global_batch_size: int | None = None
    clip_norm: float | None = 1.0
    precision: Precision = Precision.auto
    compile: bool = False
    device: str = "auto"
    deterministic: bool = False
    peer_timeout_s: float = 60.0
    on_nonfinite: NonFinite = NonFinite.stop
    loss: dict[str, Any] = field(default_factory=dict)


@dataclass
class EvalConfig:
    every_steps: int = 100
    batches: int = 8
    batch_size: int | None = None


@dataclass
class DataConfig:
    sources: dict[str, Any] = field(default_factory=dict)
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
class SamplerConfig:
    kind: SamplerKind = SamplerKind.distributed
    temperature: float = 1.0
    weights: dict[str, float] = field(default_factory=dict)
    shuffle: bool = True
    drop_last: bool = True
    exclude: list[str] = field(default_factory=list)
    max_epochs: dict[str, float] = field(default_factory=dict)
    _target_: str | None = None
    options: dict[str, Any] = field(default_factory=dict, metadata=FURTHER)


@dataclass
class CheckpointConfig:
    every_steps: int | None = 100
    every_minutes: float | None = None
    keep_last: int = 3
    keep_every_steps: int | None = None
    keep_best: int = 0
    mode: SaveMode = ASYNC
    adaptive: bool = False
    min_interval_s: float = 10.0
    max_interval_s: float = 1800.0


@dataclass
class Config:
    seed: int = 0
    run: RunConfig = field(default_factory=RunConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    data: DataConfig = field(default_factory=DataConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    phases: dict[str, Phase] = field(default_factory=dict)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    model: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    strategy: Strategy = Strategy.ddp
    launcher: dict[str, Any] = field(default_factory=dict)
    logger: dict[str, Any] = field(default_factory=dict)


# With more, torch crashes when it starts them.
MAX_THREADS = 1024
MAX_BATCH = 2**31
MAX_WORKERS = 1024
MAX_PREFETCH = 2**20
MAX_SECONDS = 2**30


def config_errors(config: Config) -> list[str]:
    """Every error of `config`, one line each: the key, its value, what is allowed."""
    return [
        *_number_errors(config),
        *_range_errors(config),
        *_shipped_class_errors(config),
        *_missing_target_errors(config),
        *_sampler_errors(config),
        *_schedule_errors(config),
    ]


def _number_errors(config: Config) -> Iterator[str]:
    """Numbers that are too small, too large or not finite."""
    train, data, checkpoint = config.train, config.data, config.checkpoint
    ranges: list[tuple[str, float | None, float, float]] = [
        ("seed", config.seed, 0, 2**63 - 1),
        ("train.steps", train.steps, 1, MAX_COUNT),
        ("train.batch_size", train.batch_size, 1, MAX_BATCH),
        ("train.grad_accum_steps", train.grad_accum_steps, 1, MAX_BATCH),
        ("train.global_batch_size", train.global_batch_size, 1, MAX_BATCH),
        ("train.peer_timeout_s", train.peer_timeout_s, 1, MAX_SECONDS),
        ("eval.every_steps", config.eval.every_steps, 0, MAX_COUNT),
        ("eval.batches", config.eval.batches, 1, MAX_COUNT),
        ("eval.batch_size", config.eval.batch_size, 1, MAX_BATCH),
        ("run.threads", config.run.threads, 1, MAX_THREADS),
        ("run.lease_timeout_s", config.run.lease_timeout_s, 1, MAX_SECONDS),
        ("data.sequence_length", data.sequence_length, 1, MAX_COUNT),
        ("data.vocab_size", data.vocab_size, 2, MAX_COUNT),
        ("data.num_workers", data.num_workers, 0, MAX_WORKERS),
        ("data.prefetch_factor", data.prefetch_factor, 1, MAX_PREFETCH),
        ("checkpoint.every_steps", checkpoint.every_steps, 1, MAX_COUNT),
        ("checkpoint.keep_last", checkpoint.keep_last, 1, MAX_COUNT),
        ("checkpoint.keep_every_steps", checkpoint.keep_every_steps, 1, MAX_COUNT),
        ("checkpoint.keep_best", checkpoint.keep_best, 0, MAX_COUNT),
        ("checkpoint.min_interval_s", checkpoint.min_interval_s, 0, MAX_SECONDS),
        ("checkpoint.max_interval_s", checkpoint.max_interval_s, 0, MAX_SECONDS),
    ]
    for key, value, least, most in ranges:
        if value is not None and not least <= value <= most:  # nan compares false
            allowed = f"{_bound(most)} or less" if value > most else f"{least:g} or more"
            yield f"{key}={value} must be {'' if _is_finite(value) else 'finite and '}{allowed}"
    for key, number, most in (
        ("train.clip_norm", train.clip_norm, math.inf),
        ("checkpoint.every_minutes", checkpoint.every_minutes, MAX_SECONDS),
        ("sampler.temperature", config.sampler.temperature, math.inf),
    ):
        if number is not None and not (math.isfinite(number) and 0 < number <= most):
            limit = "" if most == math.inf else f", {_bound(most)} or less"
            yield f"{key}={number} must be a finite number above 0{limit}"


def _bound(value: float) -> str:
    """An upper limit as a person would write it."""
    if value == 2**63 - 1:
        return "2**63 - 1"
    return f"2**{int(value).bit_length() - 1}" if value >= 2**20 else f"{value:g}"


def _range_errors(config: Config) -> Iterator[str]:
    for key, text in (("run.dir", config.run.dir), ("run.root", config.run.root), ("run.name", config.run.name)):
        if text is not None and not text.strip():
            yield f"{key} is empty: set a name, or null for the default"
        if text is not None and not text.isprintable():
            yield f"{key}={text!r} must be printable: without line breaks, tabs and the like"
    name = config.run.name or ""
    if name.startswith("/") or any(part.startswith(".") for part in name.split("/")):
        yield f"run.name={name} must stay below run.root, without parts that start with a dot: set run.root or run.dir"
    if config.checkpoint.max_interval_s < config.checkpoint.min_interval_s:
        yield (
            f"checkpoint.max_interval_s={config.checkpoint.max_interval_s} must be at least "
            f"checkpoint.min_interval_s={config.checkpoint.min_interval_s}"
        )
    batch, whole = config.train.batch_size, config.train.global_batch_size
    if whole is not None and batch >= 1 and whole % batch:
        yield f"train.global_batch_size={whole} must be a multiple of train.batch_size={batch}"
    device = config.train.device
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        yield f"train.device={device!r} must be auto, cpu, cuda or cuda:N{nearest(device, ['auto', 'cpu', 'cuda'])}"


def _shipped_class_errors(config: Config) -> Iterator[str]:
    """Options of the model and optimizers that come with this package; others check theirs when they are created."""
    model, optimizer = config.model, config.optimizer
    if model.get("_target_") == "runner.models.gpt.GPT":
        sizes = {key: model.get(key, 1) for key in ("vocab_size", "sequence_length", "layers", "heads", "width")}
        wrong = [
            f"model.{key}={size} must be a whole number, 1 or more" for key, size in sizes.items() if not _is_size(size)
        ]
        yield from wrong
        if not wrong and "width" in model and sizes["width"] % sizes["heads"]:
            yield f"model.width={sizes['width']} must be a multiple of model.heads={sizes['heads']}"
        for key in ("bias", "tie_weights"):
            if not isinstance(flag := model.get(key, True), bool):
                yield f"model.{key}={flag} must be true or false"
        if not _is_finite(dropout := model.get("dropout", 0.0)) or not 0 <= dropout < 1:
            yield f"model.dropout={dropout} must be a number from 0 to below 1"
    if optimizer.get("_target_") in ("runner.training.optim.AdamW", "torch.optim.AdamW", "torch.optim.SGD"):
        for key in ("lr", "weight_decay", "eps", "momentum"):
            if not _is_finite(value := optimizer.get(key, 0.0)) or value < 0:
                yield f"optimizer.{key}={value} must be a finite number, 0 or more"
            elif value > MAX_FACTOR:
                yield f"optimizer.{key}={value} must be {MAX_FACTOR:g} or less"
        betas = optimizer.get("betas", [0.0, 0.0])
        if not isinstance(betas, list) or len(betas) != 2 or not all(_is_finite(b) and 0 <= b < 1 for b in betas):
            yield f"optimizer.betas={betas} must be a list of two numbers from 0 to below 1"


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def _missing_target_errors(config: Config) -> Iterator[str]:
    """Nodes that name no class."""
    if not config.data.sources and not config.data.loader:
        yield (
            "data.sources is empty: choose data=text or data=mixture, or add your own source: "
            "+data.sources.NAME={_target_:my_module.MyData}"
        )
    if not config.model.get("_target_"):
        yield "model._target_ is missing: choose a model, for example model=gpt"
    if not config.optimizer.get("_target_"):
        yield "optimizer._target_ is missing: choose an optimizer, for example optimizer=adamw"
    for group, nodes in (("data.sources", config.data.sources), ("data.eval_sources", config.data.eval_sources)):
        for name, node in nodes.items():
            if not isinstance(node, dict) or not node.get("_target_"):
                yield f"{group}.{name} has no _target_: name the class of the dataset"
    if config.data.loader and not config.data.loader.get("_target_"):
        yield "data.loader has no _target_: name the class of your loader"
    if config.data.collate and not config.data.collate.get("_target_"):
        yield "data.collate has no _target_: name a function or class that makes a batch from a list of samples"
    if config.data.collate and config.data.loader:
        yield "data.collate is unused with data.loader, which makes its own batches: remove one of them"
    for name, node in config.logger.items():
        if node is not None and not (isinstance(node, dict) and node.get("_target_")):
            yield f"logger.{name} has no _target_: name the class of the logger, or set null to drop it"


def _sampler_errors(config: Config) -> Iterator[str]:
    """Sources, weights, and phases that the sampler cannot follow."""
    sources, options = list(config.data.sources), config.sampler
    yield from unknown_key_errors("sampler", options)
    if options.kind is SamplerKind.own and not options._target_:
        yield "sampler._target_ is missing: name the class of your sampler, or choose sampler=elastic"
    if options.kind is not SamplerKind.own and options._target_:
        yield f"sampler._target_={options._target_} is unused by sampler.kind={options.kind.value}: choose sampler=own"
    yield from weight_errors("sampler.weights", options.weights, sources)
    yield from weight_errors("sampler.max_epochs", options.max_epochs, sources)
    if sources and not any(options.weights.get(name, 1.0) for name in sources):
        yield "sampler.weights are all 0: at least one source needs a weight above 0"
    if options.kind is SamplerKind.distributed and len(sources) > 1:
        yield (
            f"sampler.kind=distributed samples one source and data.sources names {len(sources)} "
            f"({', '.join(sources)}): choose sampler=mixture or sampler=elastic, or keep one source "
            "(data=own has only those that you add)"
        )
    if options.kind in (SamplerKind.distributed, SamplerKind.own):
        for name, phase in config.phases.items():
            if phase.weights or phase.temperature is not None:
                kind = options.kind.value
                yield f"phases.{name} sets weights, unused by sampler={kind}: choose sampler=mixture or elastic"
    if options.kind is not SamplerKind.elastic:
        for key in ("exclude", "max_epochs"):
            if getattr(options, key):
                yield f"sampler.{key} works with sampler=elastic only, not with {options.kind.value}"


def source_weights(config: Config) -> dict[str, float]:
    """The base weight of every source, in their order; 1 where `sampler.weights` does not name it."""
    return {name: config.sampler.weights.get(name, 1.0) for name in config.data.sources}


def _schedule_errors(config: Config) -> Iterator[str]:
    """Errors of the phases and of the learning rate, as their own classes report them."""
    weights = source_weights(config)
    try:
        PhaseSchedule(config.phases, weights)
    except ScheduleError as error:
        yield from str(error).splitlines()
    try:
        learning_rate(config.scheduler, max(config.train.steps, 1))
    except ScheduleError as error:
        yield from str(error).splitlines()

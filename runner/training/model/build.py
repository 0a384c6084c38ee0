"""Build an attempt's model and optimizers from the resolved config, on this rank's device."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from runner.config.optimizers import OURS, OWN_KEYS, SINGLE, key_of, optimizer_nodes, scheduler_of
from runner.config.schema import Config, Precision, phase_schedule
from runner.config.targets import instantiate
from runner.errors import UserError
from runner.system import signals
from runner.system.distributed import World
from runner.training.model import parameters
from runner.training.model.average import Average
from runner.training.model.optimizers import Optimizers
from runner.training.model.schedulers import make_scheduler


def choose_device(wanted: str, world: World) -> torch.device:
    """Return the device of this rank.

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
    """Seed Python's, numpy's and torch's generators. Each `stream`, e.g. a rank, gets different numbers."""
    words = np.random.SeedSequence([seed, *(stream or (0,))]).generate_state(4, np.uint64)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]) % 2**32)
    torch.manual_seed(int(words[2]) >> 1)


def model(config: Config) -> nn.Module:
    """Create the model with the same initial weights on every rank, and freeze the parameters of frozen groups.

    Raises:
        UserError: the model cannot be created, or the config's optimizers name parameters that the model does not have.
    """
    seed_everything(config.seed)
    module = instantiate("model", config.model)
    if not isinstance(module, nn.Module):
        target, found = config.model["_target_"], type(module).__name__
        raise UserError(f"model._target_={target} must create a torch.nn.Module, not a {found}")
    parameters.freeze(module, config.optimizer, config.optimizers)
    return module


def optimizers(config: Config, module: nn.Module, device: torch.device | None = None) -> Optimizers:
    """Create the optimizers for the parameters of `module`, their schedules, and the gradient scaler.

    Args:
        config: config of the run.
        module: the model from `model`, wrapped for training.
        device: device of the model. The default is the CPU.

    Raises:
        UserError: an optimizer or scheduler cannot be created, or a group has an option that its optimizer lacks.
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
    """Create an optimizer. The runner's AdamW does not apply weight decay to norms, biases and embeddings."""
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
    """Return the average of the weights of the unwrapped `module`, or None if `train.ema_decay` is not set.

    Raises:
        UserError: the model cannot be copied.
    """
    if config.train.ema_decay is None:
        return None
    return Average(module.to(device), config.train.ema_decay, config.strategy.value, world, device)


def compiled(model: nn.Module, device: torch.device) -> nn.Module:
    """Return `torch.compile(model)`, which compiles at the first call.

    This starts Inductor's helper processes in a way that a signal to the process group does not end them. On a CPU,
    these are test programs that detect the CPU's instruction sets. If a signal ended one, Inductor would silently
    assume a less capable CPU, and the step in progress would be computed and saved with different bits. On other
    devices, the helper is the parent of the compile workers. If a signal ended it, the compilation would wait for it
    forever.
    """
    with signals.blocked():
        if device.type == "cpu":
            from torch._inductor.cpu_vec_isa import pick_vec_isa

            pick_vec_isa()
        else:
            from torch._inductor.async_compile import AsyncCompile

            AsyncCompile.warm_pool()
    return cast(nn.Module, torch.compile(model))


def autocast(config: Config, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """Return a function that creates the autocast context of the forward pass."""
    wanted = config.train.precision
    if wanted is Precision.auto:
        native = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        wanted = Precision.bfloat16 if native else Precision.float32
    if wanted is Precision.float32:
        return nullcontext
    dtype = torch.float16 if wanted is Precision.float16 else torch.bfloat16
    return lambda: torch.autocast(device.type, dtype)

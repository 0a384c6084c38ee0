"""Count a model's parameters and estimate the memory required for training.

The estimate needs almost no memory: it uses the meta device, or copies of the parameters on the meta device.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from runner.config.identity import DEFAULT_STEPS
from runner.config.schema import Config, Strategy, rank_invariant
from runner.metrics.progress import quantity, size
from runner.training.model import build
from runner.training.model.optimizers import Optimizers
from runner.training.model.parameters import named_parameters


@dataclass(frozen=True)
class Part:
    """A top-level module of a model: its number of parameters, number of trained parameters, and bytes of weights.

    A shared parameter is counted only in the first module that has it.
    """

    name: str
    parameters: int = 0
    trainable: int = 0
    weights: int = 0


@dataclass(frozen=True)
class Footprint:
    """The memory of a model on one rank. With FSDP2, it is the memory of this rank's shard.

    Attributes:
        model: bytes of parameters and buffers.
        gradients: bytes of one copy of the gradients.
        optimizers: bytes of the optimizers' state after their first step, or None if it is unknown before that step.
        average: bytes of the averaged weights, or 0 without `train.ema_decay`.
        parts: the top-level modules that have parameters.
    """

    model: int
    gradients: int
    optimizers: int | None
    average: int
    parts: tuple[Part, ...]

    @property
    def total(self) -> Part:
        """Add up the parts. The weights include the model's buffers."""
        counts = [sum(getattr(part, name) for part in self.parts) for name in ("parameters", "trainable")]
        return Part("total", counts[0], counts[1], self.model)

    def __str__(self) -> str:
        """Describe the footprint in one line."""
        whole = self.total
        share = f" ({100 * whole.trainable / whole.parameters:.3g} % trainable)" if whole.parameters else ""
        state = "optimizer not known" if self.optimizers is None else f"about {size(self.optimizers)} optimizer"
        average = f" + {size(self.average)} average" if self.average else ""
        memory = f"{size(self.model)} weights + {size(self.gradients)} gradients + {state}{average}"
        return f"{quantity(whole.parameters)} parameters{share}, {memory}"

    def per_rank(self, config: Config, ranks: int, micro_batches: int) -> int | None:
        """Estimate the bytes that a rank needs during a step, without activations and batches.

        In rank-invariant training, a rank adds up the gradients of its micro-batches in a binary tree and keeps one sum
        per level. These are about 1 + log2(micro-batches) copies. With several ranks, rank-invariant training and
        DistributedDataParallel keep a further copy for sending. FSDP2 shards everything over the ranks.

        Args:
            config: config of the run.
            ranks: number of ranks.
            micro_batches: the maximum number of micro-batches that a rank computes in a step.
        """
        if self.optimizers is None:
            return None
        copies = 1 if ranks == 1 or config.strategy is Strategy.fsdp else 2
        if rank_invariant(config):
            copies += math.ceil(math.log2(max(micro_batches, 1)))
        whole = self.model + copies * self.gradients + self.optimizers + self.average
        return -(-whole // ranks) if config.strategy is Strategy.fsdp else whole


def footprint(config: Config, device: str = "meta") -> Footprint:
    """Create the model and the optimizers of a config, and measure them.

    Args:
        config: config of the run.
        device: device for the model and the optimizers. Any device except `meta` allocates the memory.

    Raises:
        UserError: the model or an optimizer cannot be created.
        Exception: the model or an optimizer cannot be created on the meta device, e.g. because it reads weights from a
            file.
    """
    known = replace(config, train=replace(config.train, steps=config.known_steps or DEFAULT_STEPS, epochs=None))
    with torch.device(device):
        model = build.model(known)
        optimizers = build.optimizers(known, model, torch.device(device))
    return measured(model, optimizers, config.train.ema_decay is not None, to_try=True)


def measured(model: nn.Module, optimizers: Optimizers, averaged: bool, to_try: bool = False) -> Footprint:
    """Measure a model and its optimizers without changing them.

    Args:
        model: the model, wrapped for training.
        optimizers: optimizers of its parameters.
        averaged: True if averaged weights are kept.
        to_try: allow running a step of a user's optimizer on copies of the parameters. Such a step might change more
            than the copies.
    """
    parts: dict[str, Part] = {}
    parameters = {name: each for name, each in named_parameters(model).items() if not is_lazy(each)}
    for name, parameter in parameters.items():
        top, below, _ = name.partition(".")
        part = parts.get(top := top if below else "(itself)", Part(top))
        count = parameter.numel()
        parts[top] = Part(
            top,
            part.parameters + count,
            part.trainable + count * parameter.requires_grad,
            part.weights + _bytes([parameter]),
        )
    held = _bytes([*parameters.values(), *model.buffers()])
    states = [_state_bytes(optimizers[name], to_try) for name in optimizers.names]
    return Footprint(
        model=held,
        gradients=_bytes(each for each in parameters.values() if each.requires_grad),
        optimizers=None if None in states else sum(filter(None, states)),
        average=held if averaged else 0,
        parts=tuple(parts.values()),
    )


def _state_bytes(optimizer: torch.optim.Optimizer, to_try: bool) -> int | None:
    """Return the bytes of an optimizer's state. Before the first step, run a step of a copy on the meta device.

    Return None if the copy's step fails, or is not allowed because its class is neither torch's nor the runner's.
    """
    state = optimizer.state
    if not state:
        if not to_try and not type(optimizer).__module__.startswith(("torch.optim.", "runner.training.optim")):
            return None
        copy = object.__new__(type(optimizer))
        # Omit `step`, because a scheduler has wrapped it for the original.
        vars(copy).update({name: value for name, value in vars(optimizer).items() if name != "step"})
        state = copy.state = defaultdict(dict)
        try:
            copy.param_groups = [_on_meta(group) for group in optimizer.param_groups]
            copy.step()
        except Exception:  # noqa: BLE001 a user's optimizer may raise anything; torch's Adafactor needs real numbers
            return None
    return _bytes(value for each in state.values() for value in each.values() if isinstance(value, torch.Tensor))


def _on_meta(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's group with its parameters and gradients on the meta device, where they need no memory."""
    made = []
    for parameter in group["params"]:
        if parameter.requires_grad and not is_lazy(parameter):
            made.append(nn.Parameter(torch.empty_like(_local(parameter), device="meta")))
            made[-1].grad = torch.empty_like(made[-1])
    needs_device = {name: False for name in ("fused", "capturable") if group.get(name)}
    return {**group, **needs_device, "params": made}


def per_step(ranks: int, samples: int | None, tokens: int | None, divided: bool = False) -> str:
    """Describe the number of ranks of a footprint, and the data of a step.

    Args:
        ranks: number of ranks.
        divided: True if the footprint is the total of all ranks, each of which has a part.
        samples: number of samples per step over all ranks, or None if unknown.
        tokens: number of tokens per sample, or None if unknown or if the data have no tokens.
    """
    where = f"{', divided over' if divided else ' on each of'} {ranks} ranks" if ranks > 1 else ""
    if samples is None:
        return where
    return f"{where}; {samples:,} samples{f' ({samples * tokens:,} tokens)' if tokens else ''} per step"


def planned_step(config: Config, ranks: int) -> str:
    """Describe the data of a config's step, as far as known before the data are opened."""
    train, nodes = config.train, [node for node in config.data.sources.values() if isinstance(node, dict)]
    samples = train.global_batch_size or train.batch_size * (train.grad_accum_steps or 1) * ranks
    ours = [node.get("sequence_length") for node in nodes if str(node.get("_target_")).startswith("runner.data.")]
    tokens = ours[0] if len(ours) == len(nodes) and len({*ours}) == 1 else None
    divided = config.strategy is Strategy.fsdp
    return per_step(
        ranks, None if config.data.loader else samples, tokens if isinstance(tokens, int) else None, divided
    )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in map(_local, tensors))

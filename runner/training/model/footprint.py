"""How much memory a model and its optimizers take, without taking any: they are created on the meta device."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from runner.config.identity import DEFAULT_STEPS
from runner.config.schema import Config, Strategy, rank_invariant
from runner.training.model import build


@dataclass(frozen=True)
class Footprint:
    """Bytes of the model with its buffers, of one copy of its gradients, of the state of its optimizers, and of the
    average of its weights (0 without `train.ema_decay`)."""

    model: int
    gradients: int
    optimizers: int
    average: int

    def per_rank(self, config: Config, ranks: int, micro_batches: int) -> int:
        """An estimate of the bytes that a rank holds in a step, without activations and batches.

        In rank-invariant training a rank adds up the gradients of its micro-batches as a binary tree, of which it keeps
        one sum per level: about 1 + log2(micro-batches) copies. With several ranks, that and DistributedDataParallel
        keep another copy to send; FSDP2 splits everything over the ranks.

        Args:
            config: of the run.
            ranks: how many there are.
            micro_batches: the most that one rank computes in a step.
        """
        copies = 1 if ranks == 1 or config.strategy is Strategy.fsdp else 2
        if rank_invariant(config):
            copies += math.ceil(math.log2(max(micro_batches, 1)))
        whole = self.model + copies * self.gradients + self.optimizers + self.average
        return -(-whole // ranks) if config.strategy is Strategy.fsdp else whole


def footprint(config: Config) -> Footprint:
    """That of the model of a config, after one step of its optimizers on zero gradients.

    Raises:
        UserError: the model or an optimizer cannot be created.
        Exception: the model or an optimizer needs real memory, such as weights that it reads from a file.
    """
    known = replace(config, train=replace(config.train, steps=config.known_steps or DEFAULT_STEPS, epochs=None))
    with torch.device("meta"):
        model = build.model(known)
        optimizers = build.optimizers(known, model, torch.device("meta"))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        for name in optimizers.names:
            optimizers[name].step()
    states = [each for name in optimizers.names for each in optimizers[name].state.values()]
    held = _bytes([*model.parameters(), *model.buffers()])
    return Footprint(
        model=held,
        gradients=_bytes(trained),
        optimizers=_bytes(value for state in states for value in state.values() if isinstance(value, torch.Tensor)),
        average=held if config.train.ema_decay is not None else 0,
    )


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

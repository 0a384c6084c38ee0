"""The exponential moving average of a model's weights (EMA), by torch.optim.swa_utils.AveragedModel.

It is updated after each training step, evaluated in place of the weights, and saved beside them. After the first update
it equals the weights; after each later one it is decay * average + (1 - decay) * weights. Buffers are the model's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from runner.checkpoint.tensors.staging import bare
from runner.errors import UserError
from runner.system.distributed import World
from runner.training.ranks.parallel import place


class Average:
    """The average of a model's weights.

    Args:
        model: the model that is trained, on its device and before it is wrapped.
        decay: the share of the average that each update keeps, above 0 and below 1.
        strategy, world, device: as for `parallel.place`: with `fsdp` the average is sharded as the model is.

    Raises:
        UserError: the model cannot be copied.
    """

    def __init__(self, model: nn.Module, decay: float, strategy: str, world: World, device: torch.device) -> None:
        try:
            function: Any = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
            self.averaged = AveragedModel(model, multi_avg_fn=function)
        except (RuntimeError, TypeError) as error:
            raise UserError(
                f"train.ema_decay={decay}: {type(model).__name__} cannot be copied ({error}): remove train.ema_decay"
            ) from error
        self.averaged.requires_grad_(False)
        self.averaged.eval()
        self._sharded = strategy == "fsdp" and world.size > 1
        if self._sharded:
            place(self.module, strategy, world, device)

    @property
    def module(self) -> nn.Module:
        """The model with the averaged weights, to be evaluated."""
        module: nn.Module = self.averaged.module
        return module

    def update(self, model: nn.Module) -> None:
        """Take in the present weights of `model`, which may be wrapped."""
        if self._sharded:
            from torch.distributed.fsdp import FSDPModule

            for each in (*self.module.modules(), *model.modules()):
                if isinstance(each, FSDPModule):  # an evaluation leaves the parameters gathered
                    each.reshard()
        self.averaged.update_parameters(bare(model))

"""Keep the exponential moving average (EMA) of a model's weights, with torch.optim.swa_utils.AveragedModel.

The average is updated after each training step, evaluated in place of the trained weights, and saved with them. The
first update sets it to the weights. Each later update sets it to decay * average + (1 - decay) * weights. Its buffers
are copies of the model's buffers.
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
    """The exponential moving average of a model's weights.

    Args:
        model: the trained model, on its device and before it is wrapped.
        decay: weight of the old average in each update, above 0 and below 1.
        strategy, world, device: as for `parallel.place`. With `fsdp`, the average is sharded like the model.

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
        """Return the model with the averaged weights, for evaluation."""
        module: nn.Module = self.averaged.module
        return module

    def update(self, model: nn.Module) -> None:
        """Update the average with the current weights of `model`, with or without wrappers."""
        if self._sharded:
            from torch.distributed.fsdp import FSDPModule

            for each in (*self.module.modules(), *model.modules()):
                if isinstance(each, FSDPModule):  # an evaluation leaves FSDP's parameters gathered
                    each.reshard()
        self.averaged.update_parameters(bare(model))

"""Build the objects that an attempt trains: task, model, averaged weights and optimizers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from runner.config.schema import Config
from runner.rundir.paths import RunDir
from runner.system.distributed import World
from runner.training.model import build
from runner.training.model.average import Average
from runner.training.model.optimizers import Optimizers
from runner.training.model.warm_start import start_warm
from runner.training.ranks.parallel import place
from runner.training.ranks.peers import peer_errors
from runner.training.step.tasks import Task


@dataclass(frozen=True)
class Trained:
    """The objects that an attempt trains: task, model, averaged weights and optimizers.

    Attributes:
        bare: the model without wrappers.
    """

    device: torch.device
    task: Task
    bare: nn.Module
    model: nn.Module
    average: Average | None
    optimizers: Optimizers

    @staticmethod
    def build(task: Task, config: Config, run: RunDir, world: World, device: torch.device) -> Trained:
        """Build the model, averaged weights and optimizers for `task`. A new run loads the weights of `init_from`.

        Raises:
            UserError: the config does not match the model.
            PeerError: another rank has exited or does not respond.
        """
        bare = build.model(config)
        start_warm(bare, config, run, world)
        average = build.average(config, bare, world, device)
        with peer_errors(world):
            model = place(bare, config.strategy.value, world, device)
        return Trained(device, task, bare, model, average, build.optimizers(config, model, device))

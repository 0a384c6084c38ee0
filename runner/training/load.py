"""Load a run's model from one of its checkpoints, with `runner.load`."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from exactdata import generators
from runner.checkpoint.files import choice
from runner.checkpoint.files.choice import Candidate, Intact
from runner.checkpoint.files.directory import store_of
from runner.checkpoint.files.manifest import refusing_corruption
from runner.checkpoint.tensors.checks import check_model
from runner.checkpoint.tensors.reader import CheckpointReader, load_train_state
from runner.checkpoint.tensors.restore import fill
from runner.checkpoint.tensors.staging import AVERAGE, AVERAGE_COUNT, MODEL, bare, model_state, plain_name
from runner.config.frozen import load as load_config
from runner.config.schema import Config
from runner.errors import UserError
from runner.rundir.find import run_dir
from runner.rundir.origin import search_modules
from runner.rundir.trust import check_trusted, reading
from runner.training.model import build

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """A run's model with the weights of a checkpoint.

    Attributes:
        model: the model, in evaluation mode and on the requested device.
        config: the config of the run.
        step: step of the checkpoint.
        averaged: True if these are the averaged weights (`train.ema_decay`).
        run: the run directory.
    """

    model: nn.Module
    config: Config
    step: int
    averaged: bool
    run: Path

    def __repr__(self) -> str:
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        return (
            f"Loaded from {os.path.relpath(self.run)}, step {self.step}\n"
            f"  {type(self.model).__name__} with {parameters:,} parameters"
            f"{', the average of the weights' if self.averaged else ''}\n"
            f"  data: {', '.join(self.config.data.sources) or 'data.loader'}; seed {self.config.seed}"
        )

    def __iter__(self) -> Iterator[Any]:
        """Iterate over model, config and step, for `model, config, step = runner.load(...)`."""
        return iter((self.model, self.config, self.step))


def _skipped(bad: Candidate, why: str) -> None:
    _log.warning("%s is corrupt (%s): skipped", bad.path, why)


def load(
    run: str | os.PathLike[str], step: int | str | None = None, device: str | torch.device = "cpu", *, raw: bool = False
) -> Loaded:
    """Load the model of a run, with the weights of a verified checkpoint.

    Only code named in the run's frozen config is executed. Neither the run nor the random generators of this process
    are changed.

    Args:
        run: a run directory.
        step: step of the checkpoint, `"best"`, or `"last"` (the default).
        device: device for the model.
        raw: if True, load the trained weights even if the run has averaged weights.

    Raises:
        UserError: the run or the checkpoint does not exist, or the model cannot be created.
        CheckpointError: the checkpoint is corrupt, or does not match the model.
    """
    found = run_dir(run)
    with reading(found):
        check_trusted(found)
        config = load_config(found.path)
        search_modules(found, config.run.directory)
        chosen = choice.choose(store_of(found), choice.LAST if step is None else step, _skipped)
    with generators.lent():
        model = build.model(config)
    averaged = restore(model, chosen, raw)
    try:
        model = model.to(device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch without CUDA raises AssertionError
        raise UserError(f"device={device}: the model cannot be put there ({str(error).splitlines()[0]})") from None
    return Loaded(model.eval(), config, chosen.step, averaged, found.path)


def restore(model: nn.Module, chosen: Intact, raw: bool = False) -> bool:
    """Load the weights of a verified checkpoint into an unwrapped model. Return True if they are averaged weights.

    Raises:
        CheckpointError: the checkpoint does not match the model.
    """
    where = str(chosen.path)
    with refusing_corruption(chosen.path), CheckpointReader(chosen.at, chosen.manifest) as opened:
        averaged = AVERAGE_COUNT in opened.entries and not raw
        prefix = AVERAGE if averaged else MODEL
        tensors = model_state(model)[0]
        check_model(opened, tensors, where, prefix)
        for name, tensor in tensors.items():
            fill(opened, prefix + name, tensor)
        opened.fetch()
    extra = train_state(chosen).get("model_extra")
    if extra:
        names = {plain_name(name): name for name in bare(model).state_dict()}
        bare(model).load_state_dict({names[name]: value for name, value in extra.items()}, strict=False)
    return averaged


def train_state(chosen: Intact) -> dict[str, Any]:
    """Return the train state of a checkpoint that was verified when it was chosen.

    Raises:
        CheckpointError: the checkpoint has changed since then, or contains an object that does not belong in a
            checkpoint.
    """
    with refusing_corruption(chosen.path):
        return load_train_state(chosen.at, chosen.manifest)

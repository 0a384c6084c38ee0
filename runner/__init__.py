"""runner: a Hydra-configured experiment runner for training that may be killed at any moment."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from runner.errors import unchained

if TYPE_CHECKING:
    from runner.api import Run as Run
    from runner.api import compose as compose
    from runner.api import runs as runs
    from runner.api import train as train
    from runner.training.load import Loaded

__version__ = "0.1.0"

# Modules only log. The program that imports them decides what is shown; training shows and records warnings.
for _name in (__name__, "exactdata"):
    logging.getLogger(_name).addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    """Import `Run`, `runs`, `compose` and `train` when they are used first."""
    if name in ("Run", "runs", "compose", "train"):
        from runner import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load(run: Any, step: int | str | None = None, device: Any = "cpu", *, raw: bool = False) -> Loaded:
    """Load the model of a run with the weights of a checkpoint. Every byte of the checkpoint is verified first.

    Only the class that the run's config.yaml names as `model._target_` is executed. Nothing is written to the run.

    Example:
        >>> import runner, torch
        >>> loaded = runner.load("outputs/base", step="best", device="cpu")
        >>> loaded
        Loaded from outputs/base, step 20
          GPT with 34,688 parameters
          data: code; seed 0
        >>> model, config, step = loaded
        >>> tokens = torch.randint(config.data.vocab_size, (1, config.data.sequence_length))
        >>> with torch.no_grad():
        ...     logits = model(tokens)  # (batch, sequence, vocabulary)

    Args:
        run: a run directory, or a `Run`.
        step: a step, `"best"`, or `"last"`, the default: the newest valid checkpoint.
        device: the device to put the model on.
        raw: load the trained weights instead of their average, if the run has one (`train.ema_decay`).

    Raises:
        UserError: there is no such run or checkpoint, or the model cannot be created.
        CheckpointError: the checkpoint is corrupt, or does not fit the model.
    """
    from runner.training.load import load as loaded  # not before it is used: torch takes seconds

    with unchained():
        return loaded(run, step, device, raw=raw)

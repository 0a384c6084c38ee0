"""A Hydra-configured runner for training experiments that may be killed at any moment."""

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

# The modules only emit log records. The importing program decides what to show. Training shows and records warnings.
for _name in (__name__, "exactdata"):
    logging.getLogger(_name).addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    """Import `Run`, `runs`, `compose` and `train` on first use."""
    if name in ("Run", "runs", "compose", "train"):
        from runner import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load(run: Any, step: int | str | None = None, device: Any = "cpu", *, raw: bool = False) -> Loaded:
    """Load a run's model with the weights of a checkpoint. Every byte of the checkpoint is verified first.

    Only the class that `model._target_` in the run's config.yaml names is executed. Nothing is written to the run
    directory.

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
        step: a step number, `"best"`, or `"last"`. The default, `"last"`, is the newest valid checkpoint.
        device: the device to put the model on.
        raw: whether to load the trained weights instead of their moving average, if the run keeps one
            (`train.ema_decay`).

    Raises:
        UserError: the run or the checkpoint does not exist, or the model cannot be created.
        CheckpointError: the checkpoint is corrupt or does not fit the model.
    """
    from runner.training.load import load as loaded  # imported late, because torch takes seconds to import

    with unchained():
        return loaded(run, step, device, raw=raw)

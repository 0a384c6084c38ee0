"""A model that stops its process (SIGSTOP), like a hanging machine.

Environment variables:

- STOP_RANK: the rank that stops.
- STOP_IN: `start` (while the model is built), `training` or `evaluation` (in the second forward pass there), or `save`
  (before it writes its part of the first checkpoint).
"""

from __future__ import annotations

import os
import signal
from typing import Any

import torch

from runner.checkpoint.tensors import writer
from runner.models.gpt import GPT

WHERE = os.environ.get("STOP_IN", "") if os.environ.get("STOP_RANK") == os.environ.get("RANK") else ""


def stop(where: str) -> None:
    """Stop here if the environment variables request it."""
    if where == WHERE:
        os.kill(os.getpid(), signal.SIGSTOP)


class StoppingGPT(GPT):
    """A GPT with places to stop at."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        stop("start")
        self.calls = {"training": 0, "evaluation": 0}

    def forward(self, input_ids: torch.Tensor, *documents: Any, **named: Any) -> torch.Tensor:
        where = "training" if self.training else "evaluation"
        self.calls[where] += 1
        if self.calls[where] == 2:
            stop(where)
        return super().forward(input_ids, *documents, **named)


def _stop_in_save() -> None:
    write = writer.write_tensors

    def stopping(*arguments: Any) -> Any:
        stop("save")
        return write(*arguments)

    writer.write_tensors = stopping  # type: ignore[assignment]


if WHERE == "save":
    _stop_in_save()

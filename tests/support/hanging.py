"""A dataset, a loss and a callback that hang in step `HANG_AT` while the FIFO `HANG_FILE` exists.

Environment variables:

- HANG_FILE: a FIFO that nobody writes to: to open it blocks for ever.
- HANG_IN: `data`, `worker` (which is the same, in a worker process), `loop`, `collective` or `callback`.
- HANG_RANK: the rank that hangs; every one by default.
- HANG_WRITES: if set, no file can be written any more once something hangs.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from custom import Rows
from torch import distributed, nn
from torch.utils.data import get_worker_info

from runner.models.loss import next_token_loss
from runner.system import files

HANG_AT = 7
BATCH = 4  # train.batch_size

_samples, _losses = itertools.count(1), itertools.count(1)
_rank = os.environ.get("RANK", "0")


def _file() -> Path:
    return Path(os.environ.get("HANG_FILE", "/nonexistent"))


def _hangs(where: str) -> bool:
    return os.environ.get("HANG_IN") == where and os.environ.get("HANG_RANK", _rank) == _rank and _file().exists()


class Blocked(Rows):
    """Rows, one of which cannot be read."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if next(_samples) > BATCH * (HANG_AT - 1) and _hangs("data" if get_worker_info() is None else "worker"):
            self.read_block()
        return super().__getitem__(index)

    def read_block(self) -> None:
        if "HANG_WRITES" in os.environ:
            files.replace = lambda *arguments, **options: len(_file().read_bytes())
        _file().read_bytes()


def loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the default loss, or hang."""
    if model.training and next(_losses) == HANG_AT:
        if _hangs("loop"):
            endless_loop()
        if _hangs("collective"):
            receive_what_nobody_sends()
    return next_token_loss(model, batch)


def endless_loop() -> None:
    while _file().exists():
        pass


def receive_what_nobody_sends() -> None:
    distributed.recv(torch.zeros(3), src=0)


class Uploading:
    """A callback that may hang."""

    def on_step_end(self, context: Any) -> None:
        if context.step == HANG_AT and _hangs("callback"):
            self.upload()

    def upload(self) -> None:
        _file().read_bytes()

"""Slow parts of a run that record when they began and ended, for a recount of the run's time.

Each of them sleeps for `SLEEP_S` seconds and appends a line `{pid, what, from, to}` to EVENTS_FILE, by the clock that
all processes of a machine share. The attempt then idles as `paced.loss` does, if HOLD_FILE asks for it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import paced
import torch
from torch import nn

from runner.data.text import PythonText

SLEEP_S = 0.03


def note(what: str, began: float) -> None:
    line = {"pid": os.getpid(), "what": what, "from": began, "to": time.monotonic()}
    with open(os.environ["EVENTS_FILE"], "a") as file:
        file.write(json.dumps(line) + "\n")


def _slow(what: str) -> None:
    began = time.monotonic()
    time.sleep(SLEEP_S)
    note(what, began)


class Text(PythonText):
    """A text source that is slow to read."""

    def __getitems__(self, indices: Any) -> Any:
        _slow("data")
        return super().__getitems__(indices)


def loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> Any:
    """Return the default loss, slowly."""
    _slow("step" if model.training else "evaluation")
    return paced.loss(model, batch)


class Kept:
    """A callback with slow methods and a state that is slow to collect, also in the check at the start."""

    started = False

    def on_start(self, context: Any) -> None:
        _slow("start")
        self.started = True

    def on_evaluation(self, context: Any) -> None:
        _slow("evaluation")

    def on_save(self, context: Any) -> None:
        _slow("save")

    def on_end(self, context: Any) -> None:
        _slow("end")

    def state_dict(self) -> dict[str, Any]:
        _slow("save" if self.started else "start")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def events(path: Path) -> list[dict[str, Any]]:
    """Return all lines of the file."""
    return [json.loads(line) for line in path.read_text().splitlines()]

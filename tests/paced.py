"""The runner's own loss at a pace that a test sets, so that a run is still there when the test disturbs it.

What it returns is the same bits, so a run at any pace is compared with one at full speed. Set by the environment:

- HOLD_FILE: a file with a number (else 0). An attempt that made so many steps idles, HELD_S a step, until the file
  is gone. It still ends its step, saves and leaves when a signal asks for that. A file NAME.reached beside it says
  that it idles. HELD_IN=evaluation: it idles there, after so many batches, and not in training.
- STEP_SLEEP_S, RESTARTED_SLEEP_S: seconds that each step takes longer, the latter in a job that has come back.
- FSYNC_SLEEP_S, EVALUATION_SLEEP_S: seconds that each fsync and each batch of an evaluation takes longer, while
  HOLD_FILE exists.
- FAIL_FILE: while it exists, call `fail_at` and those after it fail, by the word in the file.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runner.models.loss import next_token_loss

# Well within the grace of a preemption, and long beside what a test does between two steps.
HELD_S = float(os.environ.get("HELD_S", "3.0"))
HELD_IN = os.environ.get("HELD_IN", "training")
HOLD = Path(os.environ.get("HOLD_FILE", "/nonexistent"))

_calls = {"training": itertools.count(1), "evaluation": itertools.count(1)}


def loss(model: nn.Module, batch: Mapping[str, torch.Tensor], fail_at: int = 0) -> Any:
    """The mean loss of next tokens; see the module for what the environment adds."""
    where = "training" if model.training else "evaluation"
    call = next(_calls[where])
    time.sleep(_slow_down_s(where))
    if where == HELD_IN:
        _hold(call)
    if fail_at and model.training and call >= fail_at:
        _fail()
    return next_token_loss(model, batch)


def _slow_down_s(where: str) -> float:
    if where == "evaluation":
        return float(os.environ.get("EVALUATION_SLEEP_S", "0")) if HOLD.exists() else 0.0
    seconds = os.environ.get("STEP_SLEEP_S", "0")
    if "SLURM_RESTART_COUNT" in os.environ:
        seconds = os.environ.get("RESTARTED_SLEEP_S", seconds)
    return float(seconds)


def _hold(call: int) -> None:
    end = time.monotonic() + HELD_S
    while time.monotonic() < end:
        try:
            text = HOLD.read_text()
            if call <= (int(text) if text.isdigit() else 0):
                return
            HOLD.with_name(f"{HOLD.name}.reached").touch()
        except FileNotFoundError:
            return
        time.sleep(0.02)


def _fail() -> None:
    fault = Path(os.environ.get("FAIL_FILE", "/nonexistent"))
    if not fault.exists():
        return
    if fault.read_text() == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("failed on purpose")


def _slow_down_fsync(seconds: float) -> None:
    fsync = os.fsync

    def slow_fsync(fd: Any) -> None:
        if HOLD.exists():
            time.sleep(seconds)
        fsync(fd)

    os.fsync = slow_fsync


if "FSYNC_SLEEP_S" in os.environ:
    _slow_down_fsync(float(os.environ["FSYNC_SLEEP_S"]))

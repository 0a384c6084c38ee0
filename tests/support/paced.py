"""Slow down the default loss, so that a run is still alive when a test disturbs it.

It returns bit-identical values, so a run at any pace can be compared with one at full speed. It reads these environment
variables at every call, because an attempt may be forked from a process that has made one already:

- HOLD_FILE: a file with a number of steps (default 0). After that step an attempt idles, a few seconds per step, until
  the file is removed or a signal requests a stop. It then completes its step, saves and exits. A file NAME.reached in
  the same folder shows that it idles. HELD_S: exactly this many seconds per step, for any signals. HELD_IN=evaluation:
  the attempt idles in the evaluation instead of in training, after this number of batches.
- STEP_SLEEP_S, RESTARTED_SLEEP_S: additional seconds per step, the latter in a restarted job.
- FSYNC_SLEEP_S, EVALUATION_SLEEP_S: additional seconds per fsync, until a signal arrives, and per batch of an
  evaluation, while HOLD_FILE exists.
- FAIL_FILE: while it exists, calls from `fail_at` on fail: the file contains `kill` or anything else for an exception.
  FAIL_RANK: on this rank only.
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
from runner.system import files
from runner.system.signals import STOP

HELD_S = 3.0
"""Well within the grace period of a preemption, and long compared with a test's work between two steps."""

_calls = {"training": itertools.count(1), "evaluation": itertools.count(1)}


def loss(model: nn.Module, batch: Mapping[str, torch.Tensor], fail_at: int = 0) -> Any:
    """Return `next_token_loss`, with the pauses and failures that the environment asks for (see the module)."""
    call = pause(model)
    if fail_at and model.training and call >= fail_at:
        _fail()
    return next_token_loss(model, batch)


def pause(model: nn.Module) -> int:
    """Pause without computing a loss, for a custom task. Return the number of the call."""
    where = "training" if model.training else "evaluation"
    call = next(_calls[where])
    time.sleep(_slow_down_s(where))
    if where == os.environ.get("HELD_IN", "training"):
        _hold(call)
    return call


def _hold_file() -> Path:
    return Path(os.environ.get("HOLD_FILE", "/nonexistent"))


def _count_anew() -> None:
    _calls.update({where: itertools.count(1) for where in _calls})


os.register_at_fork(after_in_child=_count_anew)


def _slow_down_s(where: str) -> float:
    if where == "evaluation":
        return float(os.environ.get("EVALUATION_SLEEP_S", "0")) if _hold_file().exists() else 0.0
    seconds = os.environ.get("STEP_SLEEP_S", "0")
    if "SLURM_RESTART_COUNT" in os.environ:
        seconds = os.environ.get("RESTARTED_SLEEP_S", seconds)
    return float(seconds)


def _hold(call: int) -> None:
    hold = _hold_file()
    fixed = "HELD_S" in os.environ
    end = time.monotonic() + float(os.environ.get("HELD_S", HELD_S))
    while time.monotonic() < end and (fixed or not STOP):
        try:
            text = hold.read_text()
            if call <= (int(text) if text.isdigit() else 0):
                return
            hold.with_name(f"{hold.name}.reached").touch()
        except FileNotFoundError:
            return
        time.sleep(0.02)


def _fail() -> None:
    fault = Path(os.environ.get("FAIL_FILE", "/nonexistent"))
    rank = os.environ.get("RANK", "0")
    if not fault.exists() or os.environ.get("FAIL_RANK", rank) != rank:
        return
    if fault.read_text() == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("failed on purpose")


def _slow_down_fsync(seconds: float) -> None:
    fsync = files.fsync_fd

    def slow_fsync(fd: Any) -> None:
        if _hold_file().exists() and not STOP:
            time.sleep(seconds)
        fsync(fd)

    files.fsync_fd = slow_fsync


if "FSYNC_SLEEP_S" in os.environ:
    _slow_down_fsync(float(os.environ["FSYNC_SLEEP_S"]))

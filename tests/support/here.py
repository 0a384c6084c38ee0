"""Run whole commands in this process: a tiny run takes a second or less."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from runs import ROOT

from runner.__main__ import run
from runner.system.signals import STOP, STOP_SIGNALS

OWN_MODEL = [
    *("experiment=smoke", "data.sequence_length=16", "logger=none", "run.threads=1"),
    *("train.steps=6", "eval.every_steps=2", "checkpoint.every_steps=2"),
    "scheduler.total_steps=40",  # so that a run can be made longer
]
SHORT = [*OWN_MODEL, "model.width=16", "model.layers=1"]


def command(*words: object) -> int:
    """Return the exit status of `runner WORDS`. Restore signal handlers and the stop flag."""
    handlers = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    try:
        return run([str(word) for word in words])
    finally:
        STOP.signum = None
        STOP._interrupts = 0
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


def trained(path: Path, *words: object) -> Path:
    """Train a run in `path` to its end, from the root of the clone."""
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        given = OWN_MODEL if "model=own" in words else SHORT
        given = [word for word in given if not ("data=own" in words and word.startswith("data."))]
        status = command(*given, f"run.dir={path}", *words)
    finally:
        os.chdir(before)
    if status:
        pytest.fail(f"the run in {path} ended with status {status}")
    return path


def contents(path: Path) -> dict[str, bytes]:
    """Return the content of every file below `path`, by name."""
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}

"""A recorder of metrics on its own, for a run of ten steps, and loggers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from runner.metrics import Writer, resume_jsonl
from runner.metrics.lineage import Lineage
from runner.metrics.media import Media
from runner.metrics.progress import ProgressBar
from runner.rundir.attempt_log import AttemptLog
from runner.rundir.paths import RunDir
from runner.training.records.recorder import RunRecorder
from runner.training.records.resources import StepMeter


class Bar(ProgressBar):
    """Keeps what was said, and shows nothing."""

    def __init__(self) -> None:
        super().__init__(10)
        self.said: list[str] = []

    def update(self, *figures: Any) -> None: ...

    def say(self, message: str) -> None:
        self.said.append(message)


def recorder_of(run: RunDir, *writers: Writer) -> RunRecorder:
    """A recorder of the run's first attempt, with these writers besides its own records."""
    log = AttemptLog.begin(run, {}, 10, lambda record: "killed")
    metrics, timings = resume_jsonl(run.metrics, 0), resume_jsonl(run.timings, 0)
    return RunRecorder(metrics, timings, list(writers), Bar(), log, StepMeter(torch.device("cpu")), lambda: None)


class Plain:
    """A logger that keeps nothing, and does not ask what run this is."""

    def __init__(self, run: RunDir, step: int, warn: Callable[[str], None]) -> None:
        self.run = run

    def write(self, record: dict[str, Any]) -> None: ...

    def flush(self) -> None: ...

    def media(self, media: Media) -> None: ...

    def close(self) -> None: ...


class Informed(Plain):
    """One that shows what run this is, in a file beside the run directory."""

    def about(self, lineage: Lineage) -> None:
        self.run.path.with_suffix(".about").write_text(f"attempt {lineage.attempt}")


class Clip:
    """Changes weights, and does not say so."""

    def on_step_end(self, context: Any) -> None:
        for parameter in context.model.parameters():
            parameter.clamp_(-1, 1)


class Look:
    """Only looks."""

    def on_step_end(self, context: Any) -> None:
        assert context.step > 0


class DeclaredClip(Clip):
    """Changes weights, and says so."""

    changes_training = True

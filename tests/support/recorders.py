"""A recorder of metrics for a run of ten steps, and loggers to test it with."""

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
    """A progress bar that keeps its messages and shows nothing."""

    def __init__(self) -> None:
        super().__init__(10)
        self.said: list[str] = []

    def update(self, *figures: Any) -> None: ...

    def say(self, message: str) -> None:
        self.said.append(message)


def recorder_of(run: RunDir, *writers: Writer) -> RunRecorder:
    """Return the recorder of the run's first attempt, with these writers in addition to the run's records."""
    log = AttemptLog.begin(run, {}, 10, lambda record: "killed")
    metrics, timings = resume_jsonl(run.metrics, 0), resume_jsonl(run.timings, 0)
    return RunRecorder(metrics, timings, list(writers), Bar(), log, StepMeter(torch.device("cpu")), lambda: None)


class Plain:
    """A logger that keeps nothing and does not ask for the run's metadata."""

    def __init__(self, run: RunDir, step: int, warn: Callable[[str], None]) -> None:
        self.run = run

    def write(self, record: dict[str, Any]) -> None: ...

    def flush(self) -> None: ...

    def media(self, media: Media) -> None: ...

    def close(self) -> None: ...


class Informed(Plain):
    """A logger that writes the run's metadata to a file next to the run directory."""

    def about(self, lineage: Lineage) -> None:
        self.run.path.with_suffix(".about").write_text(f"attempt {lineage.attempt}")


class Clip:
    """A callback that changes weights without declaring it."""

    def on_step_end(self, context: Any) -> None:
        for parameter in context.model.parameters():
            parameter.clamp_(-1, 1)


class Look:
    """A callback that only reads."""

    def on_step_end(self, context: Any) -> None:
        assert context.step > 0


class DeclaredClip(Clip):
    """A callback that changes weights and declares it."""

    changes_training = True

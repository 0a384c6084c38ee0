"""No checkpoint is committed before the metrics up to its step are durable, whatever the disk refused before."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.metrics import resume_jsonl
from runner.rundir.attempt_log import AttemptLog
from runner.rundir.paths import RunDir
from runner.system import clock, files
from runner.system.files import read_lines
from runner.training.recorder import RunRecorder
from runner.training.resources import StepMeter


class Bar:
    """Keeps what was said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def update(
        self, step: int, loss: float, samples_per_s: float, tokens_per_s: float | None, data_wait: float
    ) -> None: ...

    def say(self, message: str) -> None:
        self.said.append(message)

    def close(self) -> None: ...


@pytest.fixture
def recorder(tmp_path: Path) -> RunRecorder:
    run = RunDir(tmp_path)
    log = AttemptLog.begin(run, {}, 10, lambda record: "killed")
    metrics, timings = resume_jsonl(run.metrics, 0), resume_jsonl(run.timings, 0)
    return RunRecorder(metrics, timings, [], Bar(), log, StepMeter(torch.device("cpu")), lambda: None)


def steps(recorder: RunRecorder) -> list[int]:
    return [line["step"] for line in read_lines(recorder.metrics.path)]


def refuse(*_: Any) -> int:
    raise OSError(errno.EIO, "Input/output error")


def record(recorder: RunRecorder, *numbers: int) -> None:
    for number in numbers:
        recorder.step({"step": number, "loss": 1.0}, 0.1, 1)


def test_records_that_had_to_wait_are_durable_before_a_checkpoint_is_committed(
    recorder: RunRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written in the order of their steps, then synced: the checkpoint's step may be the one that had to wait."""
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_fd", refuse)
        record(recorder, 1, 2)
        assert steps(recorder) == []
        assert not recorder.before_save()
    synced: list[list[int]] = []
    real: Callable[[int], None] = files.fsync_fd

    def sync(fd: int) -> None:
        synced.append(steps(recorder))
        real(fd)

    monkeypatch.setattr(files, "fsync_fd", sync)
    assert recorder.before_save()
    assert synced[-1] == [1, 2]


def test_without_a_sync_there_is_no_checkpoint(recorder: RunRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the reason is on the screen and in the status."""
    record(recorder, 1)
    with monkeypatch.context() as patch:
        patch.setattr(files, "fsync_fd", refuse)
        assert not recorder.before_save()
    (warning,) = recorder.log.warnings
    assert "no checkpoint was saved" in warning
    assert isinstance(recorder.bar, Bar)
    assert recorder.bar.said == [f"warning: {warning}"]
    assert recorder.before_save()


@pytest.mark.parametrize("lasts", [False, True])
def test_records_that_still_wait_at_the_end_are_written_or_keep_the_run_unfinished(
    recorder: RunRecorder, monkeypatch: pytest.MonkeyPatch, lasts: bool
) -> None:
    monkeypatch.setattr(clock, "sleep", lambda seconds: None)
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_fd", refuse)
        record(recorder, 1, 2)
        if lasts:
            recorder.close()
    if not lasts:
        recorder.close()
    assert steps(recorder) == ([] if lasts else [1, 2])
    assert (recorder.log.lost_records is not None) == lasts

"""No checkpoint is committed before its metrics are durable, whatever the disk refused before."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recorders import Bar, recorder_of

from runner.rundir.paths import RunDir
from runner.system import clock, files
from runner.system.files import read_lines
from runner.training.records.recorder import RunRecorder


@pytest.fixture
def recorder(tmp_path: Path) -> RunRecorder:
    return recorder_of(RunDir(tmp_path))


def steps(recorder: RunRecorder) -> list[int]:
    return [line["step"] for line in read_lines(recorder.metrics.path)]


def refuse(*_: Any) -> int:
    raise OSError(errno.EIO, "Input/output error")


def record(recorder: RunRecorder, *numbers: int) -> None:
    for number in numbers:
        recorder.step({"step": number, "loss": 1.0}, 0.1, 1)


def test_delayed_records_are_durable_before_a_checkpoint(
    recorder: RunRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Write them in the order of their steps, then sync: the checkpoint's step may be the delayed one."""
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
    """Print the reason and show it in the status."""
    record(recorder, 1)
    with monkeypatch.context() as patch:
        patch.setattr(files, "fsync_fd", refuse)
        assert not recorder.before_save()
    (warning,) = recorder.log.warnings
    assert "no checkpoint was saved" in warning
    assert isinstance(recorder.bar, Bar)
    assert recorder.bar.said == [f"warning: {warning}"]
    assert recorder.before_save()


@pytest.mark.parametrize(("tokens", "expected"), [(None, {"samples_per_s"}), (40, {"samples_per_s", "tokens_per_s"})])
def test_speeds_are_recorded_every_ten_steps(recorder: RunRecorder, tokens: int | None, expected: set[str]) -> None:
    """Record tokens per second only if the data have tokens."""
    for number in range(1, 21):
        recorder.step({"step": number, "loss": 1.0}, 0.5, 4, tokens)
    lines = list(read_lines(recorder.timings.path))
    assert [line["step"] for line in lines] == [10, 20]
    assert all(line["samples_per_s"] == 8 and expected == {key for key in line if "_per_s" in key} for line in lines)


def test_an_evaluation_shows_its_numbers(recorder: RunRecorder) -> None:
    """It shows neither its step nor the results of each source."""
    recorder.evaluation({"step": 3, "eval_loss": 1.25, "eval_mae": 0.5, "eval_loss_by_source": {"a": 1.25}})
    assert isinstance(recorder.bar, Bar)
    assert recorder.bar.said == ["step 3: eval loss 1.2500  eval mae 0.5000"]


@pytest.mark.parametrize("lasts", [False, True])
def test_records_waiting_at_the_end_keep_the_run_unfinished(
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


def test_run_with_unsynced_metrics_is_not_finished(recorder: RunRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last line may be an evaluation without a save after it: a power loss would delete it."""
    record(recorder, 1)
    assert recorder.before_save()
    monkeypatch.setattr(clock, "sleep", lambda seconds: None)
    with monkeypatch.context() as patch:
        patch.setattr(files, "fsync_fd", refuse)
        recorder.evaluation({"step": 1, "eval_loss": 1.0})
        recorder.close()
    assert "metrics.jsonl cannot be written (Input/output error)" in str(recorder.log.lost_records)

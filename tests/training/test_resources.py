"""The figures of a step add up; a profile has its planned steps."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from runner.config.schema import profiled_steps
from runner.rundir.paths import RunDir
from runner.system import clock, distributed
from runner.training.records.profiler import Profiler
from runner.training.records.resources import StepMeter

CPU = torch.device("cpu")


def test_figures_are_means_since_the_last_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def draw() -> int:
        nonlocal now
        now += 0.25
        return 7

    monkeypatch.setattr(clock, "perf_counter", lambda: now)
    meter = StepMeter(CPU)
    for callbacks_s in (0.0, 0.5):
        timed = meter.begin(draw)
        assert timed() + timed() == 14
        distributed.waited.seconds += 1.0
        meter.callbacks(callbacks_s)
        meter.end(4.0)
        distributed.waited.seconds += 100.0  # in an evaluation: not a part of any step
    figures = meter.take()
    assert figures.pop("memory_bytes") > 10**7
    expected = {"step_s": 4.0, "data_wait_s": 0.5, "communication_s": 1.0, "callbacks_s": 0.25, "compute_s": 2.25}
    assert figures == expected
    meter.begin(draw)
    meter.end(2.0)
    assert meter.take()["step_s"] == 2.0
    assert meter.data_wait == 0.1


def steps_in(path: Path) -> list[str]:
    events = json.loads(path.read_text())["traceEvents"]
    return sorted({event["name"] for event in events if event["name"].startswith("step ")})


@pytest.mark.parametrize(
    ("first", "last", "expected"), [(1, 6, ["step 3", "step 4"]), (4, 6, ["step 4"]), (1, 3, ["step 3"]), (5, 6, [])]
)
def test_a_profile_has_its_steps(first: int, last: int, expected: list[str], tmp_path: Path) -> None:
    """Begin attempts at a step of the profile and end them at another: the rest is recorded, or nothing."""
    path = tmp_path / "profile" / "trace.json"
    profiler = Profiler((3, 4), RunDir(tmp_path), path.name, CPU)
    for step in range(first, last + 1):
        profiler.begin(step)
        torch.ones(3) + 1
        profiler.end(step)
    profiler.close()
    assert (steps_in(path) if path.exists() else []) == expected
    assert list(tmp_path.rglob("*.tmp")) == []


def test_a_profile_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "profile").write_text("in the way")
    profiler = Profiler((1, 1), RunDir(tmp_path), "trace.json", CPU)
    profiler.begin(1)
    with caplog.at_level(logging.WARNING, "runner"):
        profiler.end(1)
    assert "training continues" in caplog.text


def test_how_a_profile_is_written() -> None:
    assert profiled_steps("20:25") == (20, 25)
    for text in ("", "20", "20-25", "20:", "-1:3", "1:2:3"):
        assert profiled_steps(text) is None

"""Use the runner from Python: a script trains a run, reads it, and keeps its state."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas
import pytest
from reported import write_run

import runner
from runner import api
from runner.errors import RunDirError, UserError

TINY = ["experiment=smoke", "model.width=16", "run.threads=1", "logger=none", "run.dir=run"]
SCRIPT = f"""
import json, random, signal, sys, threading
import torch
import runner

torch.manual_seed(5)
before = torch.initial_seed(), random.getstate(), signal.getsignal(signal.SIGTERM), torch.get_num_threads()
run = runner.train(*{TINY}, *sys.argv[1:])
assert before == (torch.initial_seed(), random.getstate(), signal.getsignal(signal.SIGTERM), torch.get_num_threads())
assert threading.active_count() == 1
print(json.dumps([run.state, run.step, run.checkpoints, len(run.attempts), len(run.metrics()), str(run.path)]))
print(list(run.evaluations()["step"]), run.load(10).step)
"""


def script(folder: Path, *arguments: str, text: str = SCRIPT) -> subprocess.Popen[str]:
    (folder / "script.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(Path(runner.__file__).parents[1])}
    command = [sys.executable, "script.py", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.slow
def test_script_trains_a_run_and_resumes_it(tmp_path: Path) -> None:
    """Also check that the script keeps its random generators, signal handlers and threads."""
    settings = ["train.steps=12", "eval.every_steps=5", "checkpoint.every_steps=5"]
    for _ in range(2):  # the second time the run is finished
        output, errors = script(tmp_path, *settings).communicate()
        *_, found, evaluated = output.splitlines() or [errors]
        assert json.loads(found) == ["finished", 12, [5, 10, 12], 1, 12, str(tmp_path / "run")], errors
        assert evaluated == "[5, 10, 12] 10"


@pytest.mark.slow
def test_interrupted_call_saves_before_it_raises(tmp_path: Path) -> None:
    process = script(tmp_path, "train.steps=5000", "eval.every_steps=0")
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") > 3) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate()
    assert process.returncode == -signal.SIGINT, errors
    assert "rerun the command to resume" in output
    run = runner.Run(tmp_path / "run")
    assert run.state == "interrupted"
    assert run.checkpoints[-1] == run.step


def test_output_that_cannot_be_shown_is_still_collected() -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    lines: list[str] = []
    api._copy(io.StringIO("one\ntwo\n"), Closed(), lines)
    assert lines == ["one", "two"]


@pytest.mark.slow
def test_run_stops_when_its_script_dies(tmp_path: Path) -> None:
    process = script(tmp_path, "train.steps=100000", "eval.every_steps=0")
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not metrics.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.communicate()  # returns when no process holds the output
    run = runner.Run(tmp_path / "run")
    while run.state == "running" and time.monotonic() < deadline:  # it has closed its files and is about to exit
        time.sleep(0.05)
    assert run.state == "killed"


def test_composition_errors_are_raised_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words, message in (
        (["optimizer.lrr=1"], r"optimizer.lrr=1: no such option in optimizer \(did you mean 'lr'\?\)"),
        (["model=own", "model._target_=__main__.Net"], r"defined in a notebook's cell .* write my_code.Net"),
        (["seed=1,2"], "seed=1,2"),
    ):
        with pytest.raises(UserError, match=message):
            runner.train(*TINY, *words)
    assert list(tmp_path.iterdir()) == []
    assert runner.compose(*TINY, "train.steps=7").train.steps == 7


@pytest.mark.slow
def test_failed_run_raises_with_its_last_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="the loss of step 2 is nan") as error:
        runner.train(*TINY, "optimizer.lr=1e9", "train.clip_norm=null")
    assert error.value.status == 1
    assert runner.Run("run").state == "failed"
    assert "the loss of step 2 is nan" in str(runner.Run("run").reason)


def test_everything_in_a_run_directory_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "deeper" / "b")
    monkeypatch.chdir(tmp_path)
    first, second = runner.runs(tmp_path)
    assert [first.name, second.name] == ["a", "b"]
    metrics = first.metrics()
    assert isinstance(metrics, pandas.DataFrame)
    assert list(metrics["step"]) == sorted(metrics["step"])
    assert len(str(repr(first)).splitlines()) == 3
    assert repr(first).startswith("Run a\n  ")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    columns = first.metrics()
    assert isinstance(columns, dict)
    assert columns["loss"] == list(metrics["loss"])
    assert columns.keys() == set(metrics.columns)
    for path in ("missing", str(tmp_path)):
        with pytest.raises(RunDirError, match="is not a run directory"):
            runner.Run(path)
    with pytest.raises(RunDirError, match="is not a directory"):
        runner.runs("missing")

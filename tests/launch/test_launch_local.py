"""Sweeps on this machine: slots, GPUs, runs that fail, signals that reach the runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.local import LocalLauncher, Sweep, visible_gpus
from launch.rank_processes import RankProcesses

# In place of `python -m runner.training.attempt`: records its environment and how long it ran, and stops at a signal.
# It ends once its time is over and another run has started.
RUN = """
import json, os, pathlib, signal, sys, time
run = pathlib.Path(sys.argv[1])
received = []
for signum in (signal.SIGINT, signal.SIGTERM):
    signal.signal(signum, lambda signum, frame: received.append(signum))
signal.pthread_sigmask(signal.SIG_SETMASK, ())  # an attempt does so once it handles signals
seen = {"start": time.time(), **{k: os.environ.get(k) for k in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")}}
(run / "started").touch()
other = run.parent / (run / "until").read_text() / "started"
end = time.time() + float((run / "seconds").read_text())
while (time.time() < end or not other.exists()) and not received:
    time.sleep(0.02)
(run / "seen").write_text(json.dumps({**seen, "end": time.time(), "received": received}))
sys.exit(75 if received else int((run / "status").read_text()))
"""


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    def run(name: str, seconds: float = 0.2, status: int = 0, until: str | None = None) -> Path:
        (tmp_path / name).mkdir()
        (tmp_path / name / "until").write_text(until or name)
        (tmp_path / name / "seconds").write_text(str(seconds))
        (tmp_path / name / "status").write_text(str(status))
        return tmp_path / name

    return run


def seen(run: Path) -> dict[str, object]:
    value = json.loads((run / "seen").read_text())
    assert isinstance(value, dict)
    return value


COMMAND = [sys.executable, "-c", RUN]


def test_sweep_runs_by_slots_and_survives_a_failure(
    make: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    # Each waits until its neighbor has started: two slots are two runs at once, however long they take to start.
    runs = [make("a", until="b"), make("b", status=3, until="a"), make("c", until="d"), make("d", until="c")]
    (runs[1] / "status.json").write_text(json.dumps({"reason": "the loss is nan"}))
    launcher = LocalLauncher(slots=2, gpus=["4", "7"], command=COMMAND)
    assert launcher.launch(runs, "unused:unused") == 3
    spans = [(float(str(seen(run)["start"])), float(str(seen(run)["end"]))) for run in runs]
    at_once = max(sum(start <= at < end for start, end in spans) for at, _ in spans)
    assert at_once == 2
    # One GPU per slot, and two runs that ran at the same time had different ones.
    devices = [seen(run)["CUDA_VISIBLE_DEVICES"] for run in runs]
    assert set(devices) == {"4", "7"}
    assert devices[0] != devices[1]
    shown = capsys.readouterr()
    assert "exited with status 3" in shown.out
    assert shown.out.count("finished") >= 3
    assert "a: running (0 of 4 are over)" in shown.out, "a line for each change where there is no terminal"
    assert "compare the runs: python -m runner report" in shown.out
    assert shown.err == f"error: b: the loss is nan (its log: {runs[1] / 'logs' / 'local.out'})\n"


def test_cores_are_divided_among_slots(make: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    runs = [make("a", 0), make("b", 0)]
    LocalLauncher(slots=2, command=COMMAND).launch(runs, "unused:unused")
    assert seen(runs[0])["OMP_NUM_THREADS"] == "3"
    monkeypatch.delenv("OMP_NUM_THREADS")
    LocalLauncher(slots=2, command=COMMAND).launch(runs, "unused:unused")
    assert seen(runs[0])["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signal_reaches_the_runs_and_no_further_one_starts(make: Callable[..., Path], signum: int) -> None:
    runs = [make("a", 600), make("b", 600), make("c", 600)]
    code = (
        "import sys; from pathlib import Path; from launch.local import LocalLauncher\n"
        f"command = [sys.executable, '-c', {RUN!r}]\n"
        f"runs = [Path(p) for p in {[str(run) for run in runs]!r}]\n"
        "sys.exit(LocalLauncher(slots=2, command=command).launch(runs, 'unused:unused'))"
    )
    sweep = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2])
    try:
        end = time.monotonic() + 400
        while not all((run / "started").exists() for run in runs[:2]):
            assert time.monotonic() < end
            time.sleep(0.02)
        sweep.send_signal(signum)
        assert sweep.wait(timeout=400) == 75
    finally:
        sweep.kill()
    assert [seen(run)["received"] for run in runs[:2]] == [[signum], [signum]]
    assert not (runs[2] / "started").exists()


def test_signal_during_the_start_of_a_run_reaches_it(
    make: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Sweep._start

    def interrupted(self: Sweep, run_dir: Path, slot: int) -> RankProcesses:
        process = start(self, run_dir, slot)
        while not (run_dir / "started").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)
        return process

    monkeypatch.setattr(Sweep, "_start", interrupted)
    runs = [make("a", 600), make("b", 600)]
    assert LocalLauncher(slots=2, command=COMMAND).launch(runs, "unused:unused") == 75
    assert seen(runs[0])["received"] == [signal.SIGTERM]
    assert not (runs[1] / "started").exists()


def test_errors_of_the_options_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (error,) = LocalLauncher(slots=0).check([tmp_path])
    assert "launcher.slots=0" in error
    (error,) = LocalLauncher(gpus=3).check([tmp_path])
    assert "launcher.gpus=3 must be a list" in error
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert LocalLauncher().check([tmp_path]) == []
    (error,) = LocalLauncher().check([tmp_path, tmp_path / "b"])
    assert "torchrun" in error


def test_the_preview_is_one_command_per_run(make: Callable[..., Path]) -> None:
    runs = [make("a"), make("b")]
    assert LocalLauncher(command=["train"]).preview(runs) == f"train {runs[0]}\ntrain {runs[1]}"
    assert LocalLauncher(command=["train"]).preview([Path("/o/my run")]) == "train '/o/my run'"  # to be pasted


def test_visible_gpus_are_those_of_cuda_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert visible_gpus() == ["2", "5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []
    assert [each.level for each in LocalLauncher(slots=2, gpus=["0"]).examine(None)] == ["warning"]

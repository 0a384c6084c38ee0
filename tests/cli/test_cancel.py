"""`runner cancel` ends jobs and processes, and the run is withdrawn until a user starts it again."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm, row, slurm
from runs import PACED, TINY, Run

from runner.__main__ import run as command
from runner.cli.look import status
from runner.rundir.paths import RunDir
from runner.system.processes import this_process

__all__ = ["slurm"]

SLURM = "launch.slurm.SlurmLauncher"


def make(root: Path, name: str, job: str | None = None, sweep: str = "one", **recorded: object) -> RunDir:
    run = RunDir(root / name)
    run.path.mkdir()
    run.config.write_text("seed: 0\n")
    if recorded:
        run.status.write_text(json.dumps(recorded))
    if job is not None:
        submitted(run, job, sweep)
    return run


def submitted(run: RunDir, job: str, submission: str) -> None:
    record = {"job_id": job, "launcher": SLURM, "submission": submission, "sweep": submission}
    run.job.write_text(json.dumps(record))


def states(root: Path) -> dict[str, str]:
    return {each.run: each.state for each in status.collect(root)[0]}


def script(submission: str) -> str:
    return f"/logs/.submission_file_{submission}-3.sh"


def test_a_call_cancels_a_job_and_its_sweep_only(
    slurm: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = "a" * 32, "b" * 32
    runs = [make(tmp_path, f"run{index}", f"12_{index}", one) for index in range(3)]
    make(tmp_path, "elsewhere", "13", other)
    make(tmp_path, "reused", "14", other)  # Slurm has assigned its id to another user's job
    rows = [row(f"12_{index}", "RUNNING", Command=script(one)) for index in range(3)]
    rows += [row("13", Command=script(other)), row("14", Command=script("c" * 32))]
    slurm.prints("squeue", "".join(rows))
    assert command(["cancel", str(runs[1].path)]) == 0
    assert command(["cancel", "-n", str(runs[1].path), "--sweep"]) == 0
    assert slurm.calls("scancel") == ["scancel 12_1"]
    assert command(["cancel", str(runs[1].path), "--sweep"]) == 0
    assert sorted(slurm.calls("scancel")[1].split()[1:]) == ["12_0", "12_1", "12_2"]
    assert command(["cancel", str(tmp_path / "reused")]) == 0
    assert len(slurm.calls("scancel")) == 2
    assert "withdrawn: cancelled job 12_0; to continue it: python -m runner resume" in capsys.readouterr().out
    slurm.prints("squeue", "".join(row(f"12_{index}", "CANCELLED", Command=script(one)) for index in range(3)))
    expected = {"run0": "withdrawn", "run1": "withdrawn", "run2": "withdrawn"}
    assert {name: word for name, word in states(tmp_path).items() if name in expected} == expected


def test_a_withdrawal_holds_for_one_job_or_one_attempt(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = "a" * 32, "b" * 32
    run = make(tmp_path, "run", "12", first)
    slurm.prints("squeue", row("12", Command=script(first)))
    assert command(["cancel", str(run.path)]) == 0
    slurm.prints("squeue", "")
    assert states(tmp_path) == {"run": "withdrawn"}  # before any attempt
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "/nonexistent")
        assert states(tmp_path) == {"run": "withdrawn"}  # nor does it need Slurm
    run.status.write_text(json.dumps({"state": "cancelled", "attempt": 1, "submission": first}))
    assert states(tmp_path) == {"run": "withdrawn"}  # an attempt of that job had begun by then
    run.status.write_text(json.dumps({"state": "failed", "attempt": 1, "submission": first}))
    assert states(tmp_path) == {"run": "failed"}  # it came to another end
    submitted(run, "13", second)
    run.status.write_text(json.dumps({"state": "cancelled", "attempt": 2, "submission": second}))
    assert states(tmp_path) == {"run": "cancelled"}  # with scancel; this job was not withdrawn
    local = make(tmp_path, "local", state="interrupted", attempt=3)
    assert command(["cancel", str(local.path)]) == 0
    assert states(tmp_path)["local"] == "withdrawn"
    local.status.write_text(json.dumps({"state": "interrupted", "attempt": 4}))
    assert states(tmp_path)["local"] == "interrupted"


def test_runs_that_cannot_be_cancelled_are_named(
    slurm: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Try a run without anything to cancel, one of another machine, an unknown sweep, and a silent scheduler."""
    done = make(tmp_path, "done", state="finished", attempt=1)
    assert command(["cancel", str(done.path)]) == 0
    assert "done: finished, nothing to cancel" in capsys.readouterr().out
    assert command(["cancel", str(done.path), "--sweep"]) == 2
    assert "was not submitted to a scheduler" in capsys.readouterr().err
    away = make(tmp_path, "away", state="running", attempt=1)
    away.lease.mkdir()
    (away.lease / "00000001.json").write_text(json.dumps({**this_process(), "host": "elsewhere"}))
    assert command(["cancel", str(away.path)]) == 1
    assert "on elsewhere may train it, which cannot be told here" in capsys.readouterr().err
    queued = make(tmp_path, "queued", "12", "a" * 32)
    slurm.prints("squeue", row("12", Command=script("a" * 32)))
    slurm.fails("scancel", "scancel: error: Access/permission denied\n")
    assert command(["cancel", str(queued.path)]) == 2
    assert "cannot be cancelled" in capsys.readouterr().err
    assert not queued.withdrawn.exists()
    assert command(["cancel", str(tmp_path / "missing")]) == 2


def test_records_of_others_cancel_nothing(tmp_path: Path) -> None:
    run = make(tmp_path, "run", state="running", attempt=1)
    run.lease.mkdir()
    (run.lease / "00000001.json").write_text(json.dumps(this_process()))
    run.path.chmod(0o777)
    assert command(["cancel", str(run.path)]) == 2  # and this process was sent no signal


@pytest.mark.slow
@pytest.mark.promise("a run on this machine is cancelled, saves, and continues when it is resumed")
def test_a_process_of_this_machine_saves_and_can_be_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path / "run", [*TINY, PACED, "train.steps=20", "checkpoint.every_steps=1000"])
    run.hold_at(7)
    run.start()
    assert run.wait_until(Run.idles)
    assert command(["cancel", str(run.path)]) == 0
    assert f"on {socket.gethostname()}" in capsys.readouterr().out
    run.release()
    assert run.wait()[0] == 75
    assert states(tmp_path) == {"run": "withdrawn"}
    assert [path.name for path in run.checkpoints()][-1] >= "step_00000007"
    assert "resuming at step" in run.finish()
    assert states(tmp_path) == {"run": "finished"}
    assert os.path.exists(run.path / "withdrawn.json")  # void

"""`runner logs` shows the output of the last attempt, wherever it is, and follows it to the end of the run."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm, row, slurm

from runner.__main__ import run as command
from runner.cli.look import logs
from runner.rundir.paths import RunDir

__all__ = ["slurm"]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.logs.mkdir(parents=True)
    made.config.write_text("seed: 0\n")
    return made


def printed(capsys: pytest.CaptureFixture[str], run: RunDir, *words: str) -> list[str]:
    assert command(["logs", str(run.path), *words]) == 0
    return capsys.readouterr().out.splitlines()


def test_logs_begin_with_the_last_attempt(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [f"step {number}" for number in range(5)]
    lines = ["attempt 1 on n1, job 12", *steps, "attempt 2 on n2, job 12", *steps[3:], "half a"]
    (run.logs / "12_0_log.out").write_text("\n".join(lines))
    assert printed(capsys, run) == ["attempt 2 on n2, job 12", "step 3", "step 4", "half a"]
    assert printed(capsys, run, "--lines", "5") == [*lines[-6:]]
    (run.logs / "12_0_log.out").write_text("".join(f"line {number}\n" for number in range(1000)))
    assert printed(capsys, run) == [f"line {number}" for number in range(800, 1000)]


def test_the_file_that_a_rank_wrote_to_last_is_shown(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """Cover several jobs, a task of an array by its link, and a sweep on this machine."""
    elsewhere = run.path.parent / ".slurm-0"
    elsewhere.mkdir()
    (elsewhere / "13_2_0_log.out").write_text("array, rank 0\n")
    (elsewhere / "13_2_3_log.out").write_text("array, rank 3\n")
    for name in ("13_2_0_log.out", "13_2_3_log.out", "14_0_log.out"):  # that of 14 has not started
        (run.logs / name).symlink_to(elsewhere / name)
    (run.logs / "12_3_log.out").write_text("older, rank 3\n")
    os.utime(run.logs / "12_3_log.out", (1, 1))
    assert printed(capsys, run) == ["array, rank 0"]
    assert printed(capsys, run, "--rank", "3") == ["array, rank 3"]
    run.local_log.write_text("sweep\n")
    run.rank_log(3).write_text("sweep, rank 3\n")
    os.utime(run.local_log, (2**32, 2**32))
    assert printed(capsys, run) == ["sweep"]


def test_nothing_in_a_log_controls_the_terminal(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    run.local_log.write_bytes(b"\x1b[32mgreen\x1b[0m \x1b]0;title\x07\n 0%|  |\r50%|# |\r100%|##|\nbytes \xff\n\n")
    assert printed(capsys, run) == ["green \\x1b]0;title\\x07", "100%|##|", "bytes \N{REPLACEMENT CHARACTER}", ""]


def test_following_ends_with_the_run_across_logs(
    slurm: FakeSlurm, run: RunDir, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "LOOK_S", 0.05)
    monkeypatch.setattr(logs, "POLL_S", 0.01)
    monkeypatch.setattr(logs, "PART", 10)  # bytes: a line may be longer
    record = {"job_id": "12", "launcher": "launch.slurm.SlurmLauncher"}
    run.job.write_text(json.dumps(record))
    slurm.prints("squeue", row("12", "PENDING", "Priority"))
    assert command(["logs", str(run.path)]) == 2
    assert "has printed nothing yet, as it is pending: Priority" in capsys.readouterr().err

    def trains() -> None:
        time.sleep(0.2)
        slurm.prints("squeue", row("12", "RUNNING"))
        with (run.logs / "12_0_log.out").open("a") as file:
            for text in ("one\ntw", "o\n", "a line that is longer than what is read at once\n"):
                file.write(text)
                file.flush()
                time.sleep(0.1)
        (run.logs / "13_0_log.out").write_text("the end\n")
        os.utime(run.logs / "13_0_log.out", (2**32, 2**32))
        time.sleep(0.2)
        run.status.write_text(json.dumps({"state": "finished", "job_id": "12"}))
        slurm.prints("squeue", "")

    thread = threading.Thread(target=trains)
    thread.start()
    assert command(["logs", "-f", str(run.path)]) == 0
    thread.join()
    out, err = capsys.readouterr()
    assert out.splitlines()[:2] == ["one", "two"]
    assert "".join(out.splitlines()[2:-1]) == "a line that is longer than what is read at once"
    assert out.splitlines()[-1] == "the end"
    assert "run: pending (Priority" in err
    assert "run: finished" in err


def test_a_missing_log_is_explained(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    run.status.write_text(json.dumps({"state": "finished", "ranks": 2}))
    for words, said in (
        ([], "what a run prints to a terminal is kept nowhere"),
        (["-f"], "no log of rank 0: it is finished"),
        (["--rank", "2"], "had ranks 0 to 1"),
        (["--rank", "-1"], "--rank -1: must be 0 or more"),
        (["--lines", "0"], "--lines 0: must be 1 or more"),
    ):
        assert command(["logs", str(run.path), *words]) == 2
        assert said in capsys.readouterr().err

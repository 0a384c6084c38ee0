"""What `runner.status` says of a run in each of its states, and that it says it without torch."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm, slurm

from runner import status
from runner.lease import Lease
from runner.run_dir import RunDir

__all__ = ["slurm"]

CONFIG = "seed: 0\nlauncher:\n  _target_: launch.slurm.SlurmLauncher\n  partition: low\n"


def make(root: Path, name: str, said: dict[str, object] | None = None, job: str | None = None) -> RunDir:
    run = RunDir(root / name)
    run.path.mkdir(parents=True)
    run.config.write_text(CONFIG)
    if said is not None:
        run.status.write_text(json.dumps(said))
    if job is not None:
        run.job.write_text(json.dumps({"job_id": job}))
    return run


def states(root: Path) -> dict[str, str]:
    return {row.run: row.state for row in status.collect(root)[0]}


def test_a_live_job_is_what_the_queue_says(slurm: FakeSlurm, tmp_path: Path) -> None:
    for index, name in enumerate(("running", "requeued", "pending")):
        make(tmp_path, name, {"state": "requeued", "job_id": "old"} if name != "pending" else None, f"12_{index}")
    slurm.prints("squeue", "12_0|RUNNING|None|1|n1|\n12_1|PENDING|BeginTime|1|n/a|\n12_2|PENDING|Resources|0|n/a|\n")
    rows, remarks = status.collect(tmp_path)
    assert {row.run: row.state for row in rows} == {name: name for name in ("running", "requeued", "pending")}
    assert {row.run: (row.job_id, row.node) for row in rows}["running"] == ("12_0", "n1")
    assert not remarks
    assert len(slurm.calls("squeue")) == 1


def test_a_job_that_gives_its_node_back_leaves_the_last_word_to_the_run(slurm: FakeSlurm, tmp_path: Path) -> None:
    """Slurm calls a job COMPLETING whether it is about to wait again or is gone for good."""
    expected = {"requeued": "requeued", "cancelled": "cancelled", "finished": "finished", "running": "ending"}
    for index, said in enumerate(expected):
        make(tmp_path, said, {"state": said}, f"12_{index}")
    make(tmp_path, "ending", None, "12_9")
    slurm.prints("squeue", "".join(f"12_{index}|COMPLETING|None|1|n1|\n" for index in (0, 1, 2, 3, 9)))
    assert states(tmp_path) == {**expected, "ending": "ending"}


def test_runs_that_no_queue_holds_are_what_they_said_last(slurm: FakeSlurm, tmp_path: Path) -> None:
    for said in ("finished", "failed", "crash loop", "cancelled", "interrupted"):
        make(tmp_path, said, {"state": said}, "12")
    make(tmp_path, "waited", {"state": "requeued"}, "13")
    slurm.prints("squeue", "")
    found = states(tmp_path)
    assert found.pop("waited") == "cancelled"
    assert found == {name: name for name in found}


def test_a_job_that_left_the_queue_before_it_began(slurm: FakeSlurm, tmp_path: Path) -> None:
    make(tmp_path, "cancelled", None, "12")
    broken = make(tmp_path, "failed", None, "13")
    broken.logs.mkdir()
    (broken.logs / "13_0_log.out").write_text("ModuleNotFoundError")
    make(tmp_path, "not started")
    slurm.prints("squeue", "")
    rows = {row.run: row for row in status.collect(tmp_path)[0]}
    assert {name: row.state for name, row in rows.items()} == {name: name for name in rows}
    assert "logs" in str(rows["failed"].cause)


def test_slurm_tells_the_end_of_a_job_that_could_not_tell_it(slurm: FakeSlurm, tmp_path: Path) -> None:
    """Python gone or the disk full at the return, a kill while it was suspended, a cancel before its first word."""
    cases = {
        "returned and failed": ("requeued", "1", "1", "FAILED", "failed"),
        "waited and was cancelled": ("requeued", "2", "2", "CANCELLED", "cancelled"),
        "killed by scancel": ("running", "3", "3", "CANCELLED", "cancelled"),
        "killed on its own": ("running", "4", "4", "FAILED", "killed"),
        "killed here, after a job": ("running", None, "5", "CANCELLED", "killed"),
        "cancelled while Python starts": (None, None, "6", "CANCELLED", "cancelled"),
        "submitted again, failed at once": ("cancelled", "0", "7", "FAILED", "failed"),
        "said why itself": ("crash loop", "8", "8", "FAILED", "crash loop"),
        "done": ("finished", "9", "9", "COMPLETED", "finished"),
    }
    for name, (said, by, job, _, _) in cases.items():
        word: dict[str, object] = {"state": said, "job_id": by, "updated": 100.0, "reason": "its own"}
        run = make(tmp_path, name, word if said else None)
        run.job.write_text(json.dumps({"job_id": job, "submitted": 200.0 if "again" in name else 50.0}))
        run.logs.mkdir()
        (run.logs / f"{job}_0_log.out").write_text("submitit INFO")
        run.metrics.write_text(json.dumps({"step": 7, "loss": 2.5}) + "\n")
    slurm.prints("squeue", "".join(f"{job}|{ended}|None|0|n1|\n" for _, _, job, ended, _ in cases.values()))
    assert states(tmp_path) == {name: case[-1] for name, case in cases.items()}
    rows = {row.run: row for row in status.collect(tmp_path)[0]}
    assert "job 7 ended before it could say why" in str(rows["submitted again, failed at once"].reason)
    assert rows["said why itself"].reason == "its own"
    assert rows["killed here, after a job"].job_id == "5"
    assert rows["killed by scancel"].step == 7


def test_a_silent_scheduler_is_said_and_nothing_is_made_up(slurm: FakeSlurm, tmp_path: Path) -> None:
    make(tmp_path, "waits", {"state": "requeued"}, "12")
    make(tmp_path, "new", None, "13")
    slurm.fails("squeue", "slurm_load_jobs error: Unable to contact slurm controller\n")
    rows, remarks = status.collect(tmp_path)
    assert {row.run: row.state for row in rows} == {"waits": "requeued", "new": "pending"}
    assert "Unable to contact" in remarks[0]


def test_a_run_whose_process_is_gone_is_not_shown_as_running(tmp_path: Path) -> None:
    alive, dead, silent, unheld = (make(tmp_path, name, {"state": "running"}) for name in "adsu")
    lease = Lease.acquire(alive.lease, {}, 5.0)
    try:
        gone = subprocess.Popen(["true"])
        gone.wait()
        for run, host, pid in ((dead, socket.gethostname(), gone.pid), (silent, "elsewhere", 1)):
            run.lease.mkdir()
            (run.lease / "00000001.json").write_text(json.dumps({**lease.holder, "host": host, "pid": pid}))
            (run.lease / "00000001.beat").touch()
        assert states(tmp_path) == {"a": "running", "d": "killed", "s": "running", "u": "killed"}
        long_ago = time.time() - 10 * status.SILENCE_S
        os.utime(silent.lease / "00000001.beat", (long_ago, long_ago))
        assert states(tmp_path)["s"] == "killed"
    finally:
        lease.release()
    assert unheld.path.exists()


def test_a_killed_run_is_shown_at_the_step_that_its_metrics_reached(tmp_path: Path) -> None:
    """What it said of itself is up to two seconds older."""
    run = make(tmp_path, "killed", {"state": "running", "step": 3, "total": 9, "loss": 4.0})
    run.metrics.write_text("".join(json.dumps({"step": step, "loss": 5.0 - step}) + "\n" for step in range(1, 8)))
    (row,) = status.collect(tmp_path)[0]
    assert (row.state, row.step, row.loss) == ("killed", 7, -2.0)


@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_a_broken_status_is_made_up_for_by_the_other_books(tmp_path: Path, content: str) -> None:
    line = {"attempt": 1, "cause": "failed", "reason": "the loss is nan", "steps_lost": 2, "start_step": 0}
    for name in ("finished", "failed", "killed", "not started"):
        run = make(tmp_path, name)
        run.config.write_text(CONFIG + "train:\n  steps: 9\n")
        run.status.write_text(content)
        if name != "not started":
            run.attempts.write_text(json.dumps(line) + "\n")
            run.metrics.write_text(json.dumps({"step": 9, "loss": 2.5}) + "\n")
    RunDir(tmp_path / "finished").finished.write_text(json.dumps({"steps": 9}))
    RunDir(tmp_path / "killed").attempt.write_text(json.dumps({"attempt": 2, "started": 1.0}))
    rows = {row.run: row for row in status.collect(tmp_path)[0]}
    assert {name: row.state for name, row in rows.items()} == {name: name for name in rows}
    assert {(row.step, row.total, row.loss) for name, row in rows.items() if name != "not started"} == {(9, 9, 2.5)}
    assert [rows[name].attempts for name in ("failed", "killed")] == [1, 2]
    assert (rows["failed"].reason, rows["killed"].cause) == ("the loss is nan", "failed")


def test_a_run_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    make(tmp_path, "fine", {"state": "finished"})
    make(tmp_path, "odd").status.mkdir()
    rows = {row.run: row for row in status.collect(tmp_path)[0]}
    assert {name: row.state for name, row in rows.items()} == {"fine": "finished", "odd": "unreadable"}
    assert "status.json cannot be read" in str(rows["odd"].reason)


def test_the_row_has_what_a_person_asks_for(tmp_path: Path) -> None:
    run = make(
        tmp_path / "group",
        "one",
        {"state": "failed", "step": 40, "total": 100, "loss": 2.5, "tokens_per_s": 1234.5, "attempts": 3}
        | {"steps_lost": 2, "cause": "crash", "reason": "no more disk", "job_id": "9", "node": "n1"},
    )
    (run.checkpoints / "step_00000040").mkdir(parents=True)
    long_ago = time.time() - 2.2 * 3600
    os.utime(run.checkpoints / "step_00000040", (long_ago, long_ago))
    done = subprocess.run(
        [sys.executable, "-m", "runner.status", str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "COLUMNS": "200"},
    )
    for word in ("group/one", "failed", "40/100", "2.5000", "1,234", "crash", "9", "n1", "2 h ago", "no more disk"):
        assert word in done.stdout
    listed = subprocess.run(
        [sys.executable, "-m", "runner.status", str(tmp_path), "--json"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent.parent,
    )
    (row,) = json.loads(listed.stdout)
    assert (row["state"], row["step"], row["checkpoint_step"]) == ("failed", 40, 40)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status.main([str(tmp_path / "nothing")]) == 2
    assert "nothing is not a directory" in capsys.readouterr().err
    assert status.main([str(tmp_path), "--watch", "0"]) == 2
    assert "--watch 0" in capsys.readouterr().err
    assert status.main([str(tmp_path)]) == 0
    assert "no runs" in capsys.readouterr().out


def test_status_answers_without_torch_hydra_or_numpy() -> None:
    code = (
        "import sys, runner.status, launch.slurm\nprint([m for m in ('torch', 'hydra', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("seconds", "text"), [(3, "3 s"), (120, "2 min"), (7200, "2 h"), (200_000, "2 d")])
def test_durations_are_short(seconds: float, text: str) -> None:
    assert status.duration(seconds) == text

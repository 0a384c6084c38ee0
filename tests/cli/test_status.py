"""`runner status` shows a run in each of its states, whatever else is in the directory, without torch."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import ClassVar

import pytest
from fake_slurm import FakeSlurm, slurm

from runner import __main__ as entry
from runner.cli import status
from runner.contracts import JobInfo
from runner.errors import UserError
from runner.rundir import submitted_jobs
from runner.rundir.lease import MAX_INTERVAL_S, MISSED_BEATS, Lease, LeaseWatcher
from runner.rundir.paths import RunDir
from runner.system import clock, files
from runner.system.processes import this_process

__all__ = ["slurm"]

SLURM = "launch.slurm.SlurmLauncher"


def make(root: Path, name: str, recorded: dict[str, object] | None = None, job: str | None = None) -> RunDir:
    run = RunDir(root / name)
    run.path.mkdir(parents=True)
    run.config.write_text("seed: 0\n")
    if recorded is not None:
        run.status.write_text(json.dumps(recorded))
    if job is not None:
        run.job.write_text(json.dumps({"job_id": job, "launcher": SLURM}))
    return run


def states(root: Path) -> dict[str, str]:
    return {row.run: row.state for row in status.collect(root)[0]}


def command(*arguments: str) -> str:
    """What the command prints."""
    done = subprocess.run(
        [sys.executable, "-m", "runner", "status", *arguments],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "COLUMNS": "200"},
    )
    return done.stdout


class FakeTime:
    """Stands in for the clock; each sleep passes at once, after `during` was called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, during: Callable[[], object] = lambda: None) -> None:
        self.now = 1000.0
        self.during = during
        monkeypatch.setattr(clock, "monotonic", lambda: self.now)
        monkeypatch.setattr(clock, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.during()


def hold_elsewhere(run: RunDir, **holder: object) -> Path:
    """A lease held on another machine; the file of its heartbeat."""
    run.lease.mkdir()
    described = {**this_process(), "host": "elsewhere", "interval_s": MAX_INTERVAL_S, **holder}
    (run.lease / "00000001.json").write_text(json.dumps(described))
    beat = run.lease / "00000001.beat"
    beat.write_text("1")
    return beat


def test_the_state_of_a_live_job_is_the_one_in_the_queue(slurm: FakeSlurm, tmp_path: Path) -> None:
    for index, name in enumerate(("running", "requeued", "pending")):
        make(tmp_path, name, {"state": "requeued", "job_id": "old"} if name != "pending" else None, f"12_{index}")
    slurm.prints("squeue", "12_0|RUNNING|None|1|n1|\n12_1|PENDING|BeginTime|1|n/a|\n12_2|PENDING|Resources|0|n/a|\n")
    rows, messages = status.collect(tmp_path)
    assert {row.run: row.state for row in rows} == {name: name for name in ("running", "requeued", "pending")}
    assert {row.run: (row.job_id, row.node) for row in rows}["running"] == ("12_0", "n1")
    assert not messages
    assert len(slurm.calls("squeue")) == 1


def test_while_a_job_releases_its_node_the_recorded_state_holds(slurm: FakeSlurm, tmp_path: Path) -> None:
    """Slurm calls a job COMPLETING whether it is about to be requeued or is gone for good."""
    expected = {"requeued": "requeued", "cancelled": "cancelled", "finished": "finished", "running": "ending"}
    for index, recorded in enumerate(expected):
        make(tmp_path, recorded, {"state": recorded}, f"12_{index}")
    make(tmp_path, "ending", None, "12_9")
    slurm.prints("squeue", "".join(f"12_{index}|COMPLETING|None|1|n1|\n" for index in (0, 1, 2, 3, 9)))
    assert states(tmp_path) == {**expected, "ending": "ending"}


def test_runs_in_no_queue_are_in_the_state_they_recorded(slurm: FakeSlurm, tmp_path: Path) -> None:
    for recorded in ("finished", "failed", "crash loop", "cancelled", "interrupted"):
        make(tmp_path, recorded, {"state": recorded}, "12")
    make(tmp_path, "waited", {"state": "requeued"}, "13")
    slurm.prints("squeue", "")
    found = states(tmp_path)
    assert found.pop("waited") == "cancelled"
    assert found == {name: name for name in found}


def test_a_job_that_left_the_queue_before_its_attempt_began(slurm: FakeSlurm, tmp_path: Path) -> None:
    make(tmp_path, "cancelled", None, "12")
    broken = make(tmp_path, "failed", None, "13")
    broken.logs.mkdir()
    (broken.logs / "13_0_log.out").write_text("ModuleNotFoundError")
    make(tmp_path, "not started")
    slurm.prints("squeue", "")
    rows = {row.run: row for row in status.collect(tmp_path)[0]}
    assert {name: row.state for name, row in rows.items()} == {name: name for name in rows}
    assert "logs" in str(rows["failed"].cause)


def test_slurm_supplies_the_end_of_a_job_that_could_not_record_it(slurm: FakeSlurm, tmp_path: Path) -> None:
    """Python gone or the disk full at the restart, killed while suspended, cancelled before its first record."""
    cases = {
        "restarted and failed": ("requeued", "1", "1", "FAILED", "failed"),
        "waited and was cancelled": ("requeued", "2", "2", "CANCELLED", "cancelled"),
        "killed by scancel": ("running", "3", "3", "CANCELLED", "cancelled"),
        "killed on its own": ("running", "4", "4", "FAILED", "killed"),
        "killed here, after a job": ("running", None, "5", "CANCELLED", "killed"),
        "cancelled while Python starts": (None, None, "6", "CANCELLED", "cancelled"),
        "submitted again, failed at once": ("cancelled", "0", "7", "FAILED", "failed"),
        "recorded why": ("crash loop", "8", "8", "FAILED", "crash loop"),
        "done": ("finished", "9", "9", "COMPLETED", "finished"),
        "interrupted here, after a job": ("interrupted", None, "10", "CANCELLED", "interrupted"),
    }
    for name, (recorded, by, job, _, _) in cases.items():
        record: dict[str, object] = {"state": recorded, "job_id": by, "reason": "its own"}
        run = make(tmp_path, name, record if recorded else None, job)
        run.logs.mkdir()
        (run.logs / f"{job}_0_log.out").write_text("submitit INFO")
        run.metrics.write_text(json.dumps({"step": 7, "loss": 2.5}) + "\n")
        if "after a job" in name:  # which had made an attempt
            run.attempts.write_text(json.dumps({"attempt": 1, "job_id": job, "cause": "cancelled"}) + "\n")
    slurm.prints("squeue", "".join(f"{job}|{ended}|None|0|n1|\n" for _, _, job, ended, _ in cases.values()))
    assert states(tmp_path) == {name: case[-1] for name, case in cases.items()}
    rows = {row.run: row for row in status.collect(tmp_path)[0]}
    assert "job 7 ended without recording why" in str(rows["submitted again, failed at once"].reason)
    assert rows["recorded why"].reason == "its own"
    assert rows["killed here, after a job"].job_id == "5"
    assert rows["killed by scancel"].step == 7


def test_a_scheduler_that_does_not_answer_is_reported_and_no_state_is_guessed(slurm: FakeSlurm, tmp_path: Path) -> None:
    make(tmp_path, "waits", {"state": "requeued"}, "12")
    make(tmp_path, "new", None, "13")
    slurm.fails("squeue", "slurm_load_jobs error: Unable to contact slurm controller\n")
    rows, messages = status.collect(tmp_path)
    assert {row.run: row.state for row in rows} == {"waits": "requeued", "new": "pending"}
    (message,) = messages
    assert "Unable to contact" in message


class QueueLauncher:
    """A launcher of a package beside this one."""

    asked: ClassVar[list[Path]] = []

    def jobs(self, run_dirs: list[Path]) -> dict[Path, JobInfo]:
        self.asked.extend(run_dirs)
        return {path: JobInfo("12", "pending") for path in run_dirs}


@pytest.mark.parametrize("name", ["os.abort", "test_status.QueueLauncher", "", "\x1b[2J", ["os.abort"], None])
def test_a_launcher_that_is_not_registered_is_not_imported(slurm: FakeSlurm, tmp_path: Path, name: object) -> None:
    """job.json of a shared directory may name anything; the run's own records still show its state."""
    QueueLauncher.asked.clear()
    make(tmp_path, "job", {"state": "running"}, "12")
    slurm.prints("squeue", "12|RUNNING|None|0|n1|\n")
    run = make(tmp_path, "odd", {"state": "requeued"})
    run.job.write_text(json.dumps({"job_id": "13", "launcher": name}))
    rows, messages = status.collect(tmp_path)
    assert {row.run: row.state for row in rows} == {"job": "running", "odd": "requeued"}
    (message,) = messages
    assert "unknown launcher" in message
    assert message.isprintable()
    assert QueueLauncher.asked == []


def test_a_launcher_in_the_entry_point_group_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point = metadata.EntryPoint("queue", f"{__name__}:QueueLauncher", submitted_jobs.GROUP)
    monkeypatch.setattr(metadata, "entry_points", lambda group: [point] if group == "runner.launchers" else [])
    run = make(tmp_path, "waits")
    run.job.write_text(json.dumps({"job_id": "12", "launcher": f"{__name__}.QueueLauncher"}))
    assert states(tmp_path) == {"waits": "pending"}
    assert QueueLauncher.asked == [run.path]


def test_a_run_whose_process_is_dead_is_killed(tmp_path: Path) -> None:
    alive, dead, unheld = (make(tmp_path, name, {"state": "running"}) for name in ("alive", "dead", "unheld"))
    with Lease.acquire(alive.lease, {}, 5.0) as lease:
        gone = subprocess.Popen(["true"])
        gone.wait()
        dead.lease.mkdir()
        holder = {**lease.holder, "host": socket.gethostname(), "pid": gone.pid}
        (dead.lease / "00000001.json").write_text(json.dumps(holder))
        started = time.monotonic()
        assert states(tmp_path) == {"alive": "running", "dead": "killed", "unheld": "killed"}
        assert time.monotonic() - started < 1  # what this machine knows needs no heartbeat
    assert unheld.path.exists()


@pytest.mark.parametrize("skew_s", [-86_400.0, 0.0, 86_400.0])
def test_a_run_on_another_machine_lives_by_its_heartbeat_whatever_the_clocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skew_s: float
) -> None:
    """Neither the times of files nor wall time are compared with anything."""
    alive, dead = (make(tmp_path, name, {"state": "running", "updated": skew_s}) for name in ("alive", "dead"))
    beats = [hold_elsewhere(run) for run in (alive, dead)]
    others_now = time.time() + skew_s

    def beat() -> None:
        beats[0].write_text(str(fake.now))
        for path in beats:
            os.utime(path, (others_now, others_now))

    fake = FakeTime(monkeypatch, beat)
    beat()
    assert states(tmp_path) == {"alive": "running", "dead": "killed"}
    assert fake.now <= 1000.0 + MISSED_BEATS * MAX_INTERVAL_S + 1  # one wait for both


def test_watching_waits_only_once_and_sees_a_heartbeat_stop_and_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat = hold_elsewhere(make(tmp_path, "run", {"state": "running"}))
    fake = FakeTime(monkeypatch, lambda: beat.write_text(str(fake.now)))
    watcher = LeaseWatcher()
    seen = []
    for now, beats in ((1000.0, True), (1010.0, True), (1012.0, False), (1020.0, False), (1030.0, True)):
        fake.now = max(fake.now, now)
        if beats:
            beat.write_text(str(now))
        before = fake.now
        (row,) = status.collect(tmp_path, watcher)[0]
        seen.append((row.state, fake.now > before))
    assert seen == [
        ("running", True),
        ("running", False),
        ("running", False),  # not silent for long
        ("killed", False),
        ("running", False),
    ]


def test_a_killed_run_is_shown_at_the_last_step_of_its_metrics(tmp_path: Path) -> None:
    """Its status may be two seconds older."""
    run = make(tmp_path, "killed", {"state": "running", "step": 3, "total": 9, "loss": 4.0})
    run.metrics.write_text("".join(json.dumps({"step": step, "loss": 5.0 - step}) + "\n" for step in range(1, 8)))
    (row,) = status.collect(tmp_path)[0]
    assert (row.state, row.step, row.loss) == ("killed", 7, -2.0)


@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_a_broken_status_is_replaced_by_the_other_records(tmp_path: Path, content: str) -> None:
    line = {"attempt": 1, "cause": "failed", "reason": "the loss is nan", "steps_lost": 2, "start_step": 0, "total": 9}
    for name in ("finished", "failed", "killed", "not started"):
        run = make(tmp_path, name)
        run.status.write_text(content)
        if name != "not started":
            run.attempts.write_text(json.dumps(line) + "\n")
            run.metrics.write_text(json.dumps({"step": 9, "loss": 2.5}) + "\n")
    RunDir(tmp_path / "finished").finished.write_text(json.dumps({"steps": 9}))
    RunDir(tmp_path / "killed").attempt.write_text(json.dumps({"attempt": 2, "started": 1.0, "total": 9}))
    rows = {row.run: row for row in status.collect(tmp_path)[0]}
    assert {name: row.state for name, row in rows.items()} == {name: name for name in rows}
    assert {(row.step, row.total, row.loss) for name, row in rows.items() if name != "not started"} == {(9, 9, 2.5)}
    assert [rows[name].attempts for name in ("failed", "killed")] == [1, 2]
    assert (rows["failed"].reason, rows["killed"].cause) == ("the loss is nan", "failed")


NESTED = "[" * 100_000


def fifo(path: Path) -> None:
    os.mkfifo(path)


def link(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def huge(path: Path) -> None:
    path.touch()
    os.truncate(path, files.MAX_RECORD_BYTES + 1)


@pytest.mark.parametrize("damage", [fifo, link, huge, Path.mkdir])
@pytest.mark.parametrize("name", ["status.json", "job.json", "lease/00000001.json"])
def test_a_file_that_cannot_be_read_hides_no_other_run(
    slurm: FakeSlurm, tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    make(tmp_path, "job", None, "12")
    slurm.prints("squeue", "12|RUNNING|None|0|n1|\n")
    run = make(tmp_path, "odd", {"state": "running"}, "13")
    run.lease.mkdir()
    (run.path / name).unlink(missing_ok=True)
    damage(run.path / name)
    rows = {row.run: row for row in status.collect(tmp_path)[0]}
    assert rows["job"].state == "running"
    assert rows["odd"].state == "unreadable"
    assert f"{name} cannot be read" in str(rows["odd"].reason)


WRONG: dict[tuple[str, ...], list[object]] = {
    ("step", "total", "attempts"): ["7", 1.5, [], True],
    ("loss", "tokens_per_s", "updated"): ["7", {}, 10**400],
    ("cause", "reason", "job_id", "node"): [7, ["x"]],
    ("state",): [7, ["running"]],
    ("warnings",): ["text"],
}


@pytest.mark.parametrize(
    "recorded",
    [{"state": "failed", name: value} for names, values in WRONG.items() for name in names for value in values],
)
def test_a_record_of_the_wrong_type_hides_no_other_run(tmp_path: Path, recorded: dict[str, object]) -> None:
    make(tmp_path, "fine", {"state": "finished"})
    make(tmp_path, "odd", recorded)
    rows = {row.run: row for row in status.collect(tmp_path)[0]}
    assert {name: row.state for name, row in rows.items()} == {"fine": "finished", "odd": "unreadable"}
    assert "malformed" in str(rows["odd"].reason)


@pytest.mark.parametrize("name", ["attempts.jsonl", "attempt.json", "finished.json", "metrics.jsonl", "job.json"])
@pytest.mark.parametrize(
    "content",
    [
        *("", "null", "7", "[7]", NESTED, "\xff", "\0"),
        *('{"attempt": "x", "cause": 7}', '{"steps": "x"}', '{"steps": [1]}', '{"step": "x", "loss": "y"}'),
        *('{"step": 1, "loss": []}', '{"job_id": ["x"], "launcher": 7}'),
    ],
)
def test_any_other_record_may_be_malformed(tmp_path: Path, name: str, content: str) -> None:
    make(tmp_path, "fine", {"state": "finished"})
    run = make(tmp_path, "odd", {"state": "running"} if name in ("metrics.jsonl", "job.json") else None)
    (run.path / name).write_text(content + "\n", encoding="latin-1")
    rows, messages = status.collect(tmp_path)
    assert [row.run for row in rows] == ["fine", "odd"]
    assert rows[0].state == "finished"
    status.as_table(rows, messages)


@pytest.mark.parametrize(
    "holder", [{"pid": "x"}, {"restart_count": "x", "job_id": "1"}, {"interval_s": "x"}, {"host": []}]
)
def test_a_malformed_lease_is_watched_for_some_seconds_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holder: dict[str, object]
) -> None:
    hold_elsewhere(make(tmp_path, "odd", {"state": "running"}), **holder)
    FakeTime(monkeypatch)
    assert states(tmp_path) == {"odd": "killed"}


def test_files_and_names_cannot_control_the_terminal(tmp_path: Path) -> None:
    name = os.fsdecode(b"run\x1b[2J\xff[/red]")
    make(tmp_path, name, {"state": "failed", "cause": "\x1b]0;x\x07", "reason": "first\nsecond\x9b", "node": "\u202e"})
    out = command(str(tmp_path))
    assert all(character.isprintable() for line in out.splitlines() for character in line)
    for text in ("run\\x1b[2J\\udcff[/red]", "\\x1b]0;x\\x07", "\\u202e", "first\n  second\\x9b"):
        assert text in out


def test_the_row_has_what_a_person_asks_for(tmp_path: Path) -> None:
    run = make(
        tmp_path / "group",
        "one",
        {"state": "failed", "step": 40, "total": 100, "loss": 2.5, "tokens_per_s": 1234.5, "attempts": 3}
        | {"steps_lost": 2, "cause": "crash", "reason": "no more disk", "job_id": "9", "node": "n1"},
    )
    (run.checkpoints / "step_00000040").mkdir(parents=True)
    saved = datetime(2031, 3, 2, 14, 32)  # the clock of the file system may be ahead of this machine's
    os.utime(run.checkpoints / "step_00000040", (saved.timestamp(),) * 2)
    shown = command(str(tmp_path))
    expected = ("group/one", "failed", "40/100", "2.5000", "1,234", "crash", "9", "n1", "Mar 02 14:32", "no more disk")
    for text in expected:
        assert text in shown
    (row,) = json.loads(command(str(tmp_path), "--json"))
    assert (row["state"], row["step"], row["checkpoint_step"]) == ("failed", 40, 40)
    assert row["checkpoint_time"] == saved.timestamp()


def test_a_checkpoint_of_an_impossible_time_is_shown_nevertheless(tmp_path: Path) -> None:
    run = make(tmp_path, "run", {"state": "finished"})
    (run.checkpoints / "step_00000040").mkdir(parents=True)
    rows, _ = status.collect(tmp_path)
    rows[0].checkpoint_time = 1e18
    status.as_table(rows, [])


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="nothing is not a directory"):
        status.main([str(tmp_path / "nothing")])
    for seconds in ("0", "nan", "inf"):
        with pytest.raises(UserError, match=f"--watch {seconds}: must be more than 0"):
            status.main([str(tmp_path), "--watch", seconds])
    assert entry.run(["status", str(tmp_path / "nothing")]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert status.main([str(tmp_path)]) == 0
    assert "no runs" in capsys.readouterr().out


def test_status_answers_without_torch_hydra_or_numpy() -> None:
    code = "import sys, runner.cli.status, launch.slurm\nprint({'torch', 'hydra', 'numpy'} & sys.modules.keys())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert done.stdout.strip() == "set()"

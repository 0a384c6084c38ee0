"""`runner status` shows a run in each of its states, whatever else is in the directory, without torch."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from fake_slurm import FakeSlurm, row, slurm
from reported import write_run
from rich.console import Console
from rich.live import Live
from rich.text import Text

from launch import requeue
from runner import __main__ as entry
from runner.cli.base.console import Lines, counted, table
from runner.cli.look import status, status_table
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
    """Return the output of the command."""
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
    """A fake clock. Each sleep passes at once, after a call of `during`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, during: Callable[[], object] = lambda: None) -> None:
        self.now = 1000.0
        self.during = during
        monkeypatch.setattr(clock, "monotonic", lambda: self.now)
        monkeypatch.setattr(clock, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.during()


def hold_elsewhere(run: RunDir, **holder: object) -> Path:
    """Hold a lease as another machine does. Return its heartbeat file."""
    run.lease.mkdir()
    described = {**this_process(), "host": "elsewhere", "interval_s": MAX_INTERVAL_S, **holder}
    (run.lease / "00000001.json").write_text(json.dumps(described))
    beat = run.lease / "00000001.beat"
    beat.write_text("1")
    return beat


def test_the_state_of_a_live_job_is_the_one_in_the_queue(slurm: FakeSlurm, tmp_path: Path) -> None:
    for index, name in enumerate(("running", "requeued", "pending")):
        make(tmp_path, name, {"state": "requeued", "job_id": "old"} if name != "pending" else None, f"12_{index}")
    slurm.prints(
        "squeue",
        row("12_0", "RUNNING", restarts=1) + row("12_1", "PENDING", "BeginTime", restarts=1) + row("12_2", "PENDING"),
    )
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
    slurm.prints("squeue", "".join(row(f"12_{index}", "COMPLETING") for index in (0, 1, 2, 3, 9)))
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
    """A task of an array that never started has a link to a log that does not exist."""
    cancelled = make(tmp_path, "cancelled", None, "12_3")
    cancelled.logs.mkdir()
    (cancelled.logs / "12_3_0_log.out").symlink_to("../../.slurm-0/12_3_0_log.out")
    broken = make(tmp_path, "failed", None, "13")
    broken.logs.mkdir()
    (broken.logs / "13_0_log.out").write_text("ModuleNotFoundError")
    make(tmp_path, "not started")
    slurm.prints("squeue", "")
    rows = {row.run: row for row in status.collect(tmp_path)[0]}
    assert {name: row.state for name, row in rows.items()} == {name: name for name in rows}
    assert "logs" in str(rows["failed"].cause)
    assert rows["cancelled"].cause == "left the queue"


def test_slurm_supplies_the_end_that_a_job_did_not_record(slurm: FakeSlurm, tmp_path: Path) -> None:
    """Python died, the disk was full at the restart, or the job was killed while suspended or cancelled early."""
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
    slurm.prints("squeue", "".join(row(job, ended) for _, _, job, ended, _ in cases.values()))
    assert states(tmp_path) == {name: case[-1] for name, case in cases.items()}
    rows = {row.run: row for row in status.collect(tmp_path)[0]}
    assert "job 7 ended without recording why" in str(rows["submitted again, failed at once"].reason)
    assert rows["recorded why"].reason == "its own"
    assert rows["killed here, after a job"].job_id == "5"
    assert rows["killed by scancel"].step == 7


def test_silent_scheduler_is_reported_and_no_state_guessed(slurm: FakeSlurm, tmp_path: Path) -> None:
    make(tmp_path, "waits", {"state": "requeued"}, "12")
    make(tmp_path, "new", None, "13")
    slurm.fails("squeue", "slurm_load_jobs error: Unable to contact slurm controller\n")
    rows, messages = status.collect(tmp_path)
    assert {row.run: row.state for row in rows} == {"waits": "requeued", "new": "pending"}
    (message,) = messages
    assert "Unable to contact" in message


class QueueLauncher:
    """A launcher of a package that is not installed."""

    asked: ClassVar[list[Path]] = []

    def jobs(self, run_dirs: list[Path]) -> dict[Path, JobInfo]:
        self.asked.extend(run_dirs)
        return {path: JobInfo("12", "pending") for path in run_dirs}


@pytest.mark.parametrize("name", ["os.abort", "test_status.QueueLauncher", "", "\x1b[2J", ["os.abort"], None])
def test_a_launcher_that_is_not_registered_is_not_imported(slurm: FakeSlurm, tmp_path: Path, name: object) -> None:
    """job.json of a shared directory may name anything. The run's records still show its state."""
    QueueLauncher.asked.clear()
    make(tmp_path, "job", {"state": "running"}, "12")
    slurm.prints("squeue", row("12", "RUNNING"))
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
        assert time.monotonic() - started < 1  # a process of this machine needs no heartbeat
    assert unheld.path.exists()


@pytest.mark.parametrize("skew_s", [-86_400.0, 0.0, 86_400.0])
def test_run_elsewhere_lives_by_its_heartbeat_not_by_clocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skew_s: float
) -> None:
    """Neither file times nor wall time are compared."""
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


def test_watch_waits_once_and_sees_a_heartbeat_return(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    """status.json may be two seconds older."""
    run = make(tmp_path, "killed", {"state": "running", "step": 3, "total": 9, "loss": 4.0})
    run.metrics.write_text("".join(json.dumps({"step": step, "loss": 5.0 - step}) + "\n" for step in range(1, 8)))
    (row,) = status.collect(tmp_path)[0]
    assert (row.state, row.step, row.loss) == ("killed", 7, -2.0)


@pytest.mark.parametrize("state", ["running", "failed", "interrupted"])
def test_the_step_is_the_newest_of_status_and_metrics(tmp_path: Path, state: str) -> None:
    """The status is written every two seconds; a later step may take minutes."""
    run = make(tmp_path, "run", {"state": state, "step": 12, "total": 99, "loss": 4.0})
    with Lease.acquire(run.lease, {}, 5.0):
        run.metrics.write_text("".join(json.dumps({"step": step, "loss": 0.5}) + "\n" for step in range(1, 23)))
        (row,) = status.collect(tmp_path)[0]
        assert (row.state, row.step, row.loss) == (state, 22, 0.5)
        run.metrics.write_text(json.dumps({"step": 9, "loss": 0.5}) + "\n")  # the end of the file is lost
        (row,) = status.collect(tmp_path)[0]
        assert (row.step, row.loss) == (12, 4.0)


@pytest.mark.parametrize("skew_s", [-86_400.0, 0.0, 86_400.0])
def test_a_live_run_without_a_step_for_minutes_is_pointed_out(slurm: FakeSlurm, tmp_path: Path, skew_s: float) -> None:
    """Only times of the file system are compared, with one another: this machine's clock may be wrong."""
    now = time.time() + skew_s
    jobs = {"trains": 20, "hangs": 12 * 60, "restarted": 12 * 60}
    for index, (name, idle_s) in enumerate(jobs.items()):
        run = make(tmp_path, name, {"state": "running"}, f"12_{index}")
        run.metrics.write_text(json.dumps({"step": 3, "loss": 0.5}) + "\n")
        run.attempt.write_text("{}")
        os.utime(hold_elsewhere(run), (now, now))
        os.utime(run.metrics, (now - idle_s, now - idle_s))
        os.utime(run.attempt, (now - (5 if name == "restarted" else 3600),) * 2)
    slurm.prints("squeue", "".join(row(f"12_{index}", "RUNNING") for index in range(3)))
    rows, messages = status.collect(tmp_path)
    idle = {row.run: row.idle_s for row in rows}
    assert idle == pytest.approx({"hangs": 720, "restarted": 5, "trains": 20}, abs=0.01)
    lines = printed(rows, messages)
    assert "hangs: no step for 12 minutes" in lines
    assert len([line for line in lines if "no step" in line]) == 1


def printed(rows: list[status_table.Row], messages: list[str]) -> list[str]:
    """Return the lines of the table."""
    console = Console(width=1000)
    with console.capture() as captured:
        console.print(status_table.as_table(rows, messages))
    return [line.rstrip() for line in captured.get().splitlines()]


@pytest.mark.parametrize("width", [60, 1000])
def test_the_layout_of_lines_is_that_of_rich(width: int) -> None:
    """Rich needs a second for a thousand runs."""
    rows = [("a", "running", "1/2"), ("日本語", "crash loop", ""), ("long" * 10, "finished", "20/20")]
    styles = ["green", "bold red", ""]

    def drawn(renderable: Any, color: Literal["standard"] | None) -> str:
        console = Console(width=width, force_terminal=color is not None, color_system=color)
        with console.capture() as captured:
            console.print(renderable)
        return captured.get()

    by_rich = table("run", "state", "step")
    by_rich.columns[0].overflow = "fold"
    for (run, state, step), style in zip(rows, styles, strict=True):
        by_rich.add_row(run, Text(state, style), step)
    lines = Lines(("run", "state", "step"), rows, 1, styles)
    assert drawn(lines, None) == drawn(by_rich, None)
    assert "\x1b[1;31mcrash loop\x1b[0m" in drawn(lines, "standard")


@pytest.mark.parametrize(("width", "height"), [(120, 30), (160, 12), (70, 24)])
def test_a_window_shows_runs_that_need_attention_and_why(width: int, height: int) -> None:
    """Show a name with its seed, the whole reason, and the number of other runs, instead of the first rows."""
    name = "smoke-lr0.0003-dropout0.1-width512-temperature0.7-seed{}-9f51ab25"
    rows = [status_table.Row(name.format(seed), "", "finished") for seed in range(300)]
    rows[200] = status_table.Row(name.format(200), "", "failed", reason=" ".join(["word"] * 40) + " end")
    rows[100].state, rows[150].state = "running", "a word of somebody's"
    screen = io.StringIO()
    console = Console(file=screen, width=width, height=height, force_terminal=True, soft_wrap=True)
    with Live(status_table.fitting(rows, []), console=console, auto_refresh=False):
        drawn = re.sub(r"\x1b\[\S*?[a-zA-Z]", "", screen.getvalue()).strip()
    lines = [line.rstrip() for line in drawn.splitlines()]
    assert max(map(len, lines)) <= width
    assert len(lines) <= height
    text = "".join(lines).replace(" ", "")
    assert all(f"seed{seed}-9f51ab25" in text or width == 70 for seed in (100, 150, 200))
    assert "word" * 40 + "end" in text
    assert re.search(r"and \d+ more: \d+ finished", "\n".join(lines))
    assert "samples/s" not in text


def test_runs_are_shown_by_the_settings_that_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Avoid names of sixty characters. In a narrow window the settings stay, and omissions are named."""
    for index, (lr, seed) in enumerate(product((0.1, 0.2), (1, 2, 3))):
        settings = {"optimizer.lr": lr, "seed": seed, "model.embedding_width": 100 * lr, "run.notes": f"note {index}"}
        write_run(tmp_path / f"mixture-cosine-width{100 * lr}-{'x' * 40}-seed{seed}-{index:08x}", settings=settings)
    rows, _ = status.collect(tmp_path)
    rows = status.having(rows, [])
    rows[0].node = "a-node-with-a-long-name"
    assert [row.differs for row in rows[:2]] == [{"seed": 1, "optimizer.lr": 0.1}, {"seed": 2, "optimizer.lr": 0.1}]
    for width in (200, 60):
        console = Console(width=width)
        with console.capture() as captured:
            console.print(status_table.as_table(rows, [], width=width))
        counts, head, *lines = captured.get().splitlines()
        assert counts == "6 runs: 6 finished"
        assert head.split()[:4] == ["run", "seed", "lr", "state"]
        assert max(map(len, lines)) <= width
        assert [line.split()[0][-8:] for line in lines[:6]] == [f"{index:08x}" for index in range(6)]
        assert any(line.startswith("not shown, as the window is narrow: ") for line in lines) == (width == 60)
    assert entry.run(["status", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["differs"] == {"seed": 1, "optimizer.lr": 0.1}


def test_how_long_a_job_has_waited_and_when_it_may_start(slurm: FakeSlurm, tmp_path: Path) -> None:
    make(tmp_path, "waits", None, "12")
    make(tmp_path, "unknown", None, "13")
    starts = datetime(2026, 3, 1, 12, 30, tzinfo=UTC)
    cells = {"StartTime": "2026-03-01T12:30:00", "PendingTime": "720"}
    slurm.prints("squeue", row("12", "PENDING", "Priority", 0, **cells) + row("13", "PENDING", PendingTime="9000"))
    rows, messages = status.collect(tmp_path)
    assert {each.run: (each.waited_s, each.starts) for each in rows} == {
        "waits": (720, starts.timestamp()),
        "unknown": (9000, None),
    }
    lines = printed(rows, messages)
    assert f"12 min, until about {starts.astimezone():%b %d %H:%M}" in "\n".join(lines)


def test_gpu_hours_are_those_of_all_attempts(tmp_path: Path) -> None:
    run = make(tmp_path, "run", {"state": "running", "attempt": 3, "time": {"seconds": {"steps": 1800.0}}})
    attempts = [
        {"attempt": 1, "gpus": 8, "seconds": {"start": 600.0, "steps": 3000.0}},
        {"attempt": 2, "seconds": {"steps": 1e6}},
    ]
    ended = {"start_step": 0, "end_step": 1, "cause": "killed", "checkpoint_step": 0, "steps_lost": 1}
    run.attempts.write_text("".join(json.dumps({**ended, **attempt}) + "\n" for attempt in attempts))
    run.attempt.write_text(json.dumps({"attempt": 3, "gpus": 4}))
    make(tmp_path, "cpu", {"state": "finished"})
    begun = make(tmp_path, "begun", {"state": "running", "attempt": 1})
    begun.attempt.write_text(json.dumps({"attempt": 1, "gpus": 4, "started": 1e9}))  # and nothing is timed yet
    rows, messages = status.collect(tmp_path)
    assert {each.run: each.gpu_hours for each in rows} == {"run": 8 + 2, "cpu": None, "begun": 0}
    assert printed(rows, messages)[0].endswith("; 10.0 GPU-hours")


def test_a_window_keeps_room_for_rows_with_any_notes() -> None:
    rows = [status_table.Row(f"run{number}", "", "failed", reason=f"reason {number}") for number in range(300)]
    screen = io.StringIO()
    console = Console(file=screen, width=100, height=30, force_terminal=True, soft_wrap=True)
    with Live(status_table.fitting(rows, [], 100), console=console, auto_refresh=False):
        drawn = re.sub(r"\x1b\[\S*?[a-zA-Z]", "", screen.getvalue()).strip().splitlines()
    assert len(drawn) <= 30
    assert len([line for line in drawn if re.match(r"run\d+ +failed", line)]) >= 15
    assert "and 293 more notes, without --watch" in drawn[-1]


def test_long_work_reports_its_progress(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Report it every ten seconds, where the output is not a terminal."""
    now = 0.0
    monkeypatch.setattr(clock, "monotonic", lambda: now)
    for _ in counted(range(2000), "composing jobs"):
        now += 0.25 if now < 25 else 0
    assert capsys.readouterr().err.splitlines() == ["composing jobs: 41 of 2,000", "composing jobs: 82 of 2,000"]
    assert list(counted(range(3), "composing jobs")) == [0, 1, 2]
    assert capsys.readouterr().err == ""


def test_reason_to_wait_is_printed_once_for_all_runs(slurm: FakeSlurm, tmp_path: Path) -> None:
    for index in range(5):
        recorded = {"state": "failed", "reason": "an older failure", "restart_count": 0, "job_id": f"12_{index}"}
        make(tmp_path, f"run{index}", recorded, f"12_{index}")
    make(tmp_path, "held", None, "13")
    make(tmp_path, "still", {"state": "running"}, "14")
    waiting = [row(f"12_{index}", "PENDING", "PartitionDown", restarts=1) for index in range(5)]
    slurm.prints("squeue", "".join([*waiting, row("13", "PENDING", "JobHeldUser"), row("14", "SUSPENDED")]))
    rows, messages = status.collect(tmp_path)
    assert {row.run: row.state for row in rows} == {
        **{f"run{index}": "requeued" for index in range(5)},
        "held": "pending",
        "still": "suspended",
    }
    lines = printed(rows, messages)
    assert [line for line in lines if line.startswith("run0, run1, run2 and 2 more: PartitionDown")]
    assert [line for line in lines if line.startswith("held: JobHeldUser") and "scontrol release 13" in line]
    assert not [line for line in lines if "an older failure" in line]
    assert all(row.reason for row in rows if row.run != "still")


def test_reason_of_an_earlier_failure_is_not_the_running_jobs(slurm: FakeSlurm, tmp_path: Path) -> None:
    for index, state in enumerate(("running", "pending", "cancelled")):
        make(tmp_path, state, {"state": "failed", "reason": "loss is NaN", "job_id": "11"}, f"12_{index}")
    make(tmp_path, "crash loop", {"state": "crash loop", "reason": "three failures", "job_id": "12_3"}, "12_3")
    squeue = zip(("RUNNING", "PENDING", "CANCELLED", "COMPLETING"), range(4), strict=True)
    slurm.prints("squeue", "".join(row(f"12_{index}", state) for state, index in squeue))
    rows = status.collect(tmp_path)[0]
    assert {row.run: row.state for row in rows} == {row.run: row.run for row in rows}
    assert [row.reason for row in rows if row.reason] == ["three failures"]


# records of the run since its job was given up -> its state
SINCE: list[tuple[dict[str, object] | None, int | None, str]] = [
    (None, None, "failed"),
    ({"state": "finished", "step": 6, "total": 6}, 6, "finished"),
    ({"state": "finished", "step": 6, "total": 6, "job_id": "12"}, 6, "finished"),
    ({"state": "running", "step": 3, "total": 6}, None, "killed"),
    ({"state": "interrupted", "step": 3, "total": 6}, None, "interrupted"),
    ({"state": "cancelled", "step": 3, "total": 6, "job_id": "13"}, None, "cancelled"),
    ({"state": "requeued", "step": 3, "total": 6, "job_id": "12"}, None, "failed"),
]


@pytest.mark.parametrize(("recorded", "finished", "state"), SINCE)
def test_abandoned_job_does_not_hide_later_work(
    slurm: FakeSlurm, tmp_path: Path, recorded: dict[str, object] | None, finished: int | None, state: str
) -> None:
    run = make(tmp_path, "run", recorded, "12")
    os.utime(run.job, (1.0, 1.0))
    if finished:
        run.finished.write_text(json.dumps({"steps": finished}))
    run.logs.mkdir()
    requeue.starts_file(run.logs, "12").write_text(f"3 {requeue.GIVEN_UP}no space")
    slurm.prints("squeue", "")
    assert states(tmp_path) == {"run": state}
    if recorded:  # the job is newer
        for path in (run.status, run.finished):
            if path.exists():
                os.utime(path, (0.0, 0.0))
        assert states(tmp_path) == {"run": "failed"}


def test_a_run_that_lives_was_not_given_up(slurm: FakeSlurm, tmp_path: Path) -> None:
    run = make(tmp_path, "run", {"state": "running", "step": 3, "total": 6}, "12")
    os.utime(run.status, (0.0, 0.0))
    run.logs.mkdir()
    requeue.starts_file(run.logs, "12").write_text(f"3 {requeue.GIVEN_UP}no space")
    slurm.prints("squeue", "")
    with Lease.acquire(run.lease, {}):
        assert states(tmp_path) == {"run": "running"}


def test_failed_attempt_with_a_requeued_job_has_not_failed(slurm: FakeSlurm, tmp_path: Path) -> None:
    """The job is releasing its node, and has been requeued or may yet be."""
    for index, name in enumerate(("requeued", "ending", "failed")):
        make(tmp_path, name, {"state": "failed", "job_id": f"12_{index}", "restart_count": 1}, f"12_{index}")
    slurm.prints("squeue", row("12_0", "COMPLETING", restarts=2) + row("12_1", "COMPLETING", restarts=1))
    assert states(tmp_path) == {name: name for name in ("requeued", "ending", "failed")}


def test_a_directory_without_a_config_but_with_records_is_shown(tmp_path: Path) -> None:
    make(tmp_path, "fine", {"state": "finished"})
    make(tmp_path, "odd", {"state": "finished"}).config.unlink()
    rows = {row.run: row for row in status.collect(tmp_path)[0]}
    assert (rows["fine"].state, rows["odd"].state) == ("finished", "unreadable")
    assert "config.yaml is missing" in str(rows["odd"].reason)


def test_a_directory_that_cannot_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user may own it. root may read everything, so the refusal is faked."""
    make(tmp_path, "fine", {"state": "finished"})
    (tmp_path / "theirs").mkdir()
    scan = os.scandir

    def refuse(path: str) -> object:
        if str(path).endswith("theirs"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    rows, messages = status.collect(tmp_path)
    assert [row.run for row in rows] == ["fine"]
    assert messages == [f"{tmp_path / 'theirs'} cannot be read (Permission denied)"]


def test_json_has_no_numbers_that_json_does_not_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path, "odd", {"state": "finished", "loss": float("nan"), "tokens_per_s": float("inf")})
    assert status.main([str(tmp_path), "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (shown["loss"], shown["tokens_per_s"]) == (None, None)


CANARY = "raise SystemExit('imported')\n"


@pytest.mark.parametrize("where", ["current directory", "run directory"])
def test_looking_imports_nothing_that_a_run_directory_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    run = make(tmp_path, "run", {"state": "running", "cause": "canary.Canary"})
    folder = tmp_path if where == "current directory" else run.path
    for name in ("canary.py", "sitecustomize.py", "launch_canary.py"):
        (folder / name).write_text(CANARY)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))  # even if it can be found
    run.config.write_text("launcher:\n  _target_: canary.Canary\nmodel:\n  _target_: canary.Canary\n")
    run.job.write_text(json.dumps({"job_id": "12", "launcher": "canary.Canary"}))
    run.code.write_text(json.dumps({"repositories": {str(folder): {"commit": "x"}}, "runner": {"source": "canary"}}))
    run.order.write_text(json.dumps({"kind": "canary.Canary"}))
    run.metrics.write_text(json.dumps({"step": 1, "loss": 1.0}) + "\n")
    run.checkpoint(1).mkdir(parents=True)
    (run.checkpoint(1) / "manifest.json").write_text('{"step": 1}')
    for words in (["status", str(tmp_path)], ["metrics"], ["inspect", "--plan"], ["checkpoints"]):
        arguments = words if len(words) > 1 and words[0] == "status" else [words[0], str(run.path), *words[1:]]
        assert entry.run(arguments) in (0, 1, 2)
        assert "imported" not in "".join(capsys.readouterr())
    assert "canary" not in sys.modules


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
    slurm.prints("squeue", row("12", "RUNNING"))
    run = make(tmp_path, "odd", {"state": "running"}, "13")
    run.lease.mkdir()
    (run.path / name).unlink(missing_ok=True)
    damage(run.path / name)
    rows = {row.run: row for row in status.collect(tmp_path)[0]}
    assert rows["job"].state == "running"
    assert rows["odd"].state == "unreadable"
    assert f"{name} " in str(rows["odd"].reason)


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
    status_table.as_table(rows, messages)


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


def test_a_status_row_is_complete(tmp_path: Path) -> None:
    run = make(
        tmp_path / "group",
        "one",
        {"state": "failed", "step": 40, "total": 100, "loss": 2.5, "tokens_per_s": 1234.5, "attempts": 3}
        | {"steps_lost": 2, "cause": "crash", "reason": "no more disk", "job_id": "9", "node": "n1"},
    )
    run.checkpoint(40).mkdir(parents=True)
    (run.checkpoint(40) / "manifest.json").write_text('{"step": 40, "sha256": ""}')
    saved = datetime(2031, 3, 2, 14, 32)  # the clock of the file system may be ahead of this machine's
    os.utime(run.checkpoints / "step_00000040", (saved.timestamp(),) * 2)
    shown = command(str(tmp_path))
    expected = ("group/one", "failed", "40/100", "2.5000", "1,234", "crash", "9", "n1", "Mar 02 14:32", "no more disk")
    for text in expected:
        assert text in shown
    (row,) = json.loads(command(str(tmp_path), "--json"))
    assert (row["state"], row["step"], row["checkpoint_step"]) == ("failed", 40, 40)
    assert row["checkpoint_time"] == saved.timestamp()


def test_checkpoint_of_an_impossible_time_is_shown(tmp_path: Path) -> None:
    run = make(tmp_path, "run", {"state": "finished"})
    run.checkpoint(40).mkdir(parents=True)
    (run.checkpoint(40) / "manifest.json").write_text('{"step": 40, "sha256": ""}')
    rows, _ = status.collect(tmp_path)
    rows[0].checkpoint_time = 1e18
    status_table.as_table(rows, [])


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
    code = "import sys, runner.cli.look.status, launch.slurm\nprint({'torch', 'hydra', 'numpy'} & sys.modules.keys())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert done.stdout.strip() == "set()"

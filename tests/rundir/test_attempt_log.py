"""The attempt log: how attempts end, which ends stop a run, and that only the holder of the lease writes."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
import types
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from composing import compose
from tiny_attempts import TinyJob

from exactdata.order.batch_shape import BatchShape
from runner.errors import CrashLoopError, ExitStatus, FileError, SupersededError, TimeoutsError, UserError
from runner.rundir.attempt_log import AttemptLog, Finish, ended_attempts, last_record, status_of
from runner.rundir.lease import Lease
from runner.rundir.paths import RunDir
from runner.rundir.time_account import TimeAccount
from runner.system import clock, files
from runner.system.files import read_lines
from runner.system.processes import this_process
from runner.system.signals import STOP, STOP_SIGNALS, StopFlag
from runner.training import attempt as training_attempt
from runner.training.data.epoch_steps import EpochSteps
from runner.training.saving import make_cadence


def begin(run: RunDir, guard: files.Guard | None = None) -> AttemptLog:
    return AttemptLog.begin(RunDir(run.path, guard), {"job_id": "7"}, 100, lambda record: "killed")


def test_status_has_the_time_of_the_newest_checkpoint(tmp_path: Path) -> None:
    """A save that is in progress or failed does not count."""
    run = RunDir(tmp_path)
    log = begin(run)
    assert json.loads(run.status.read_text())["checkpoint_time"] is None
    for step, when in ((10, 1_000.0), (20, 2_000.0)):
        path = run.checkpoints / f"step_{step:08d}"
        path.mkdir(parents=True)
        (path / "manifest.json").write_text(json.dumps({"step": step, "sha256": ""}))
        os.utime(path, (when, when))
    (run.checkpoints / "step_00000030.tmp-1").mkdir()
    log.update(force=True)
    status = json.loads(run.status.read_text())
    assert (status["checkpoint_step"], status["checkpoint_time"]) == (20, 2_000.0)


def test_unlisted_checkpoint_of_another_machine_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing of a network file system may be seconds old, until this machine changes the directory."""
    run, anew, really = RunDir(tmp_path), set[Path](), files.list_dir
    begin(run).update(step=20, force=True)
    (run.checkpoints / "step_00000020").mkdir(parents=True)
    (run.checkpoints / "step_00000020/manifest.json").write_text(json.dumps({"step": 20, "sha256": ""}))
    monkeypatch.setattr(files, "look_anew", anew.add)
    monkeypatch.setattr(
        files, "list_dir", lambda path: [] if path == run.checkpoints and path not in anew else really(path)
    )
    log = begin(run)
    assert log.record["start_step"] == log.earlier[0]["checkpoint_step"] == 20


def test_the_status_counts_each_attempt_once(tmp_path: Path) -> None:
    """Check while the attempt runs and after its end."""
    run = RunDir(tmp_path)
    counted = []
    for _ in range(2):
        log = begin(run)
        log.update(force=True)
        counted.append(json.loads(run.status.read_text())["attempts"])
        log.end("preempted", 0)
        counted.append(json.loads(run.status.read_text())["attempts"])
    assert counted == [1, 1, 2, 2]


def record_ends(run: RunDir, *causes: str) -> None:
    """Record attempts of job 7 that made no progress."""
    for number, cause in enumerate(causes, start=1):
        line = {"attempt": number, "job_id": "7", "start_step": 0, "checkpoint_step": 0, "cause": cause}
        with open(run.attempts, "a") as file:
            file.write(json.dumps(line) + "\n")


@pytest.mark.parametrize(
    ("causes", "max_timeouts", "stops"),
    [
        (["crash"] * 2, None, False),
        (["crash"] * 3, None, True),
        (["crash", "preempted", "crash", "crash"], None, False),
        (["time limit"] * 3, None, True),
        (["time limit"] * 3, 5, False),  # counted separately
        (["crash", "time limit", "crash", "crash"], 5, True),
    ],
)
def test_three_attempts_without_progress_are_a_crash_loop(
    tmp_path: Path, causes: list[str], max_timeouts: int | None, stops: bool
) -> None:
    run = RunDir(tmp_path)
    record_ends(run, *causes)
    log = begin(run)
    if stops:
        with pytest.raises(CrashLoopError, match="in a row"):
            log.check_budgets(max_timeouts)
    else:
        log.check_budgets(max_timeouts)


def test_end_refused_by_the_disk_in_the_status_is_shown(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    log = begin(run)
    log.update(step=4, force=True)
    before = run.status.read_bytes()
    assert status_of(run)["state"] == "running"
    log.end("crash loop", 70, "three in a row")
    run.status.write_bytes(before)
    found = status_of(run)
    assert (found["state"], found["reason"], found["step"]) == ("crash loop", "three in a row", 4)


def test_without_status_other_records_show_the_state(tmp_path: Path) -> None:
    """status.json is written without fsync: after a power loss it may be missing or broken."""
    run = RunDir(tmp_path)
    assert status_of(run) == {}
    log = begin(run)
    run.metrics.write_text('{"step": 4, "loss": 0.5}\n')
    for broken in ("", "{", "[1]"):
        run.status.write_text(broken)
        found = status_of(run)
        assert (found["state"], found["cause"], found["attempts"]) == ("running", None, 1)
        assert (found["job_id"], found["total"], found["step"], found["loss"]) == ("7", 100, 4, 0.5)
    log.update(step=4)
    log.end("preempted", 3)
    log = begin(run)
    log.end("crash", 1, "a bug")
    run.status.unlink()
    found = status_of(run)
    assert (found["state"], found["cause"], found["reason"]) == ("failed", "crash", "a bug")
    assert (found["attempts"], found["steps_lost"]) == (2, 4)
    begin(run)
    run.status.unlink()
    found = status_of(run)
    assert (found["state"], found["cause"], found["attempts"]) == ("running", "crash", 3)
    run.attempt.write_text("{}")
    run.finished.write_text('{"steps": 4}')
    assert status_of(run)["state"] == "finished"


@pytest.mark.parametrize(
    ("content", "steps", "epochs", "finished"),
    [
        ({}, 10, None, False),
        ({"steps": 10}, 10, None, True),
        ({"steps": 10}, 11, None, False),  # it is to train longer
        ({"steps": 10, "epochs": 2.0}, 10, 3.0, True),  # steps decide, where they are known
        ({"steps": 10, "epochs": 2.0}, None, 2.0, True),
        ({"steps": 10, "epochs": 2.0}, None, 2.5, False),
        ({"steps": 10}, None, 2.0, False),
        ({"epochs": 2.0}, None, 2.0, False),  # damaged: no run finishes at step 0
        ({"steps": 10, "epochs": 2.0}, None, None, False),
    ],
)
def test_a_run_is_finished_at_its_steps_or_its_epochs(
    tmp_path: Path, content: dict[str, Any], steps: int | None, epochs: float | None, finished: bool
) -> None:
    """A run that has to train longer is resumed; a finished run is not trained again."""
    run = RunDir(tmp_path)
    run.finished.write_text(json.dumps(content))
    assert Finish.of(run).covers(steps, epochs) == finished


@pytest.mark.parametrize(("saved", "stops"), [(7, True), (8, False)])
@pytest.mark.parametrize("cause", ["crash", "time limit"])
def test_an_attempt_that_saved_a_single_step_made_progress(tmp_path: Path, cause: str, saved: int, stops: bool) -> None:
    """Slow steps are progress, so the run is retried."""
    run = RunDir(tmp_path)
    progress = {"start_step": 7, "checkpoint_step": saved, "steps_lost": 0}
    lines = [{"attempt": number, "job_id": "7", "cause": cause, **progress} for number in (1, 2, 3)]
    run.attempts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    log = begin(run)
    with pytest.raises((CrashLoopError, TimeoutsError)) if stops else nullcontext():
        log.check_budgets(3 if cause == "time limit" else None)


@pytest.mark.parametrize(("saved", "stops"), [(None, True), (1, False)])
def test_last_allowed_time_limit_has_no_new_checkpoint(tmp_path: Path, saved: int | None, stops: bool) -> None:
    """Look at the end of an attempt: one step is progress here, too."""
    run = RunDir(tmp_path)
    record_ends(run, "time limit", "time limit")
    log = begin(run)
    log.check_timeouts(4)  # after the third there may be a fourth
    if saved:
        run.checkpoint(saved).mkdir(parents=True)
        (run.checkpoint(saved) / "manifest.json").write_text(json.dumps({"step": saved, "sha256": ""}))
    with pytest.raises(TimeoutsError, match="3 time limits in a row") if stops else nullcontext():
        log.check_timeouts(3)


@pytest.mark.parametrize(("noted", "cause"), [("preempted", "preempted"), ("interrupted", "killed"), (None, "killed")])
def test_killed_attempt_keeps_its_noted_cause(tmp_path: Path, noted: str | None, cause: str) -> None:
    """When a rank dies, srun signals the others before it kills them. That alone must not hide a crash loop."""
    run = RunDir(tmp_path)
    log = begin(run)
    log.note(**({"cause": noted} if noted else {}))
    assert begin(run).last_cause == cause


class LimitedJob(TinyJob):
    """A job that reaches its time limit before anything is built, every time."""

    auto_restarts = True
    max_timeouts: int | None = 4
    early_signal: int | None = signal.SIGUSR2

    def __init__(self, restart_count: int) -> None:
        super().__init__(restart_count)
        self.requeued = False

    def cause(self, signum: int) -> str:
        return "time limit"

    def requeue_if_needed(self, cause: str) -> str:
        self.requeued = True
        return cause


@pytest.fixture
def flag() -> Any:
    """Yield the stop flag; restore it and the handlers."""
    handlers = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    STOP.signum = None
    yield STOP
    STOP.signum = None
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


def close_listener(flag: StopFlag) -> None:
    """Close the listener of an attempt: here the next attempt runs in the same process."""
    signal.set_wakeup_fd(-1)
    flag.wait_for_listener()
    for end in flag._sockets or ():
        end.close()
    flag._sockets = flag._thread = None


def test_time_limits_without_progress_stop_at_max_timeouts(tmp_path: Path, flag: Any) -> None:
    """Four in a row do, although three other ends would be a crash loop; a new checkpoint resets the count."""
    job = compose([f"run.dir={tmp_path / 'run'}"])
    run = RunDir(job.run_dir)
    run.path.mkdir()
    run.config.write_text(job.text)

    def attempt(number: int) -> bool:
        """Make an attempt. Return whether the job was requeued."""
        flag.signum = None
        limited = LimitedJob(number)
        status = training_attempt.attempt(run.path, limited)
        close_listener(flag)
        assert status == (ExitStatus.INTERRUPTED if limited.requeued else ExitStatus.FAILED)
        return limited.requeued

    assert [attempt(number) for number in range(3)] == [True] * 3
    run.checkpoint(10).mkdir(parents=True)
    (run.checkpoint(10) / "manifest.json").write_text('{"step": 10, "sha256": ""}')
    lines = run.attempts.read_text().splitlines()
    run.attempts.write_text(
        "\n".join([*lines[:-1], json.dumps({**json.loads(lines[-1]), "checkpoint_step": 10})]) + "\n"
    )
    assert [attempt(number) for number in range(3, 7)] == [True, True, True, False]
    status = json.loads(run.status.read_text())
    assert (status["state"], status["cause"]) == ("failed", "timeouts")
    assert "launcher.max_timeouts=4" in status["reason"]


@pytest.mark.parametrize("line", ["garbage", "[1, 2]", '{"a": 1}'])
def test_malformed_record_does_not_block_a_start(tmp_path: Path, line: str) -> None:
    run = RunDir(tmp_path)
    record_ends(run, "crash")
    with open(run.attempts, "a") as file:
        file.write(f"{line}\n")
    run.attempt.write_text(line)
    assert begin(run).record["attempt"] == 2


def test_attempt_whose_cause_cannot_be_noted_ends_in_order(tmp_path: Path) -> None:
    """On a full disk, for example, the cause is kept in memory, and the job is still requeued."""
    run = RunDir(tmp_path)
    log = begin(run)
    run.attempt.unlink()
    run.attempt.mkdir()  # nothing can be written there
    log.announce_end("preempted")
    assert log.record["cause"] == "preempted"
    assert json.loads(run.status.read_text())["state"] == "requeued"


def test_a_cause_noted_after_the_end_changes_nothing(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    log = begin(run)
    log.end("finished", 0)
    log.note(cause="preempted")
    assert json.loads(run.attempt.read_text()) == {}
    assert [line["cause"] for line in read_lines(run.attempts)] == ["finished"]


def test_notes_of_a_thread_at_the_end_leave_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attempt lists its checkpoints while a thread notes a preemption, and the disk refuses the end.

    The noted record was not the one that was closed: the second try at the end used to add its line again.
    """
    run = RunDir(tmp_path)
    log = begin(run)
    newest_step = RunDir.newest_step

    def notes_meanwhile(run: RunDir) -> int:
        log.note(notice="preempted")
        return newest_step(run)

    monkeypatch.setattr(RunDir, "newest_step", notes_meanwhile)
    log.end("crash", 1, "first")
    log.end("crash", 1, "second")
    assert [(line["attempt"], line["notice"], line["reason"]) for line in ended_attempts(run)] == [
        (1, "preempted", "second")
    ]
    assert files.read_object(run.attempt) == {}


def test_warning_of_a_thread_keeps_the_newer_status(tmp_path: Path) -> None:
    """A thread that warned as the attempt ended used to replace its status with "running"."""
    run = RunDir(tmp_path)
    log = begin(run)
    held, ended = threading.Event(), threading.Event()

    def check() -> None:
        if threading.current_thread() is writer:
            held.set()
            ended.wait(0.5)

    log.run = RunDir(tmp_path, files.Guard("test", check))
    writer = threading.Thread(target=log.warn, args=("disk full",))
    writer.start()
    assert held.wait(60)
    log.end("time limit", 75)
    ended.set()
    writer.join()
    status = files.read_object(run.status)
    assert (status["state"], status["warnings"]) == ("requeued", ["disk full"])


@pytest.mark.parametrize("failure", [None, ValueError("a bug"), UserError("a mistake")])
def test_a_superseded_attempt_changes_no_record(
    tmp_path: Path, flag: Any, monkeypatch: pytest.MonkeyPatch, failure: Exception | None
) -> None:
    """The records belong to the newer attempt, however this one ends."""
    job = compose([f"run.dir={tmp_path / 'run'}"])
    run = RunDir(job.run_dir)
    run.path.mkdir()
    run.config.write_text(job.text)

    def superseded(steps: int) -> bool:
        (run.lease / "00000009.json").write_text(json.dumps({**this_process(), "pid": 1}))
        run.attempt.write_text('{"attempt": 2}')
        if failure is not None:
            raise failure
        return True

    session = types.SimpleNamespace(train=superseded, step=5, account=TimeAccount())
    monkeypatch.setattr("runner.training.session.Session.open", lambda *parts: session)
    assert training_attempt.attempt(run.path) == ExitStatus.SUPERSEDED
    assert not run.finished.exists()
    assert not run.attempts.exists()
    assert json.loads(run.attempt.read_text()) == {"attempt": 2}


def files_of(run: RunDir) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in run.path.iterdir() if path.is_file()}


WRITES: dict[str, Callable[[AttemptLog], object]] = {
    "update": lambda log: log.update(step=9, force=True),
    "resumed": lambda log: log.resumed(5),
    "note": lambda log: log.note(cause="preempted"),
    "announce_end": lambda log: log.announce_end("preempted"),
    "end": lambda log: log.end("finished", 0),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_superseded_process_that_wakes_changes_no_record(tmp_path: Path, name: str) -> None:
    run = RunDir(tmp_path)
    with Lease.acquire(run.lease, {"job_id": "7", "restart_count": 0}) as older:
        log = begin(run, older.guard)
        log.update(step=3, loss=2.0)
        with Lease.acquire(run.lease, {"job_id": "7", "restart_count": 1}) as newer:
            begin(run, newer.guard).update(step=4, loss=1.0)
            before = files_of(run)
            with pytest.raises(SupersededError):
                WRITES[name](log)
            log.warn("the disk is full")  # from any thread, so it does not raise
            assert files_of(run) == before


@pytest.mark.parametrize("writes", range(9))
def test_process_superseded_between_writes_stops_at_the_second(tmp_path: Path, writes: int) -> None:
    """Check every write: each one checks the fence."""
    run = RunDir(tmp_path)
    frozen: dict[str, bytes] = {}
    asked = 0

    def check_fence() -> None:
        nonlocal asked
        asked += 1
        if asked > writes:
            frozen.update(files_of(run) if not frozen else {})
            raise SupersededError("superseded")

    def attempt() -> None:
        log = begin(run, files.Guard("lease-00000001", check_fence))
        log.resumed(0)
        log.announce_end("preempted")
        log.end("preempted", 75)

    with pytest.raises(SupersededError):
        attempt()
    temporary = {name for name in frozen if ".tmp-" in name}
    assert files_of(run) == {name: content for name, content in frozen.items() if name not in temporary}


def test_training_does_not_wait_for_the_disk_to_sync_the_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    log = begin(run)
    monkeypatch.setattr(files, "fsync_fd", lambda fd: pytest.fail("fsync"))
    log.update(step=7, loss=1.5, force=True)
    assert json.loads(run.status.read_text())["step"] == 7


def test_the_status_is_written_every_two_seconds_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(tmp_path)
    log = begin(run)
    written = []
    for step in range(1, 9):
        monkeypatch.setattr(clock, "monotonic", lambda now=1e9 + step * 0.8: now)
        log.update(step=step)
        written.append(json.loads(run.status.read_text())["step"])
    assert written == [1, 1, 1, 4, 4, 4, 7, 7]


def test_an_attempt_at_a_finished_run_changes_no_record(tmp_path: Path, flag: Any) -> None:
    """Its last loss and tokens/s stay in the status."""
    job = compose([f"run.dir={tmp_path / 'run'}", "train.steps=10"])
    run = RunDir(job.run_dir)
    run.path.mkdir()
    run.config.write_text(job.text)
    log = begin(run)
    log.update(step=10, loss=2.5, tokens_per_s=100.0)
    log.end("finished", 0)
    run.finished.write_text(json.dumps({"steps": 10}))
    before = files_of(run)
    assert json.loads(before["status.json"])["tokens_per_s"] == 100.0
    assert training_attempt.attempt(run.path) == ExitStatus.FINISHED
    assert files_of(run) == before


@pytest.mark.parametrize(
    "line",
    [
        {"attempt": "1", "cause": "crash"},
        {"attempt": 1, "cause": ["crash"]},
        {"attempt": 1, "cause": "crash", "steps_lost": "x"},
        {"attempt": 1, "cause": "crash", "checkpoint_step": [1]},
    ],
)
def test_an_attempt_of_the_wrong_shape_is_ignored(tmp_path: Path, line: dict[str, Any]) -> None:
    run = RunDir(tmp_path)
    run.attempts.write_text(json.dumps(line) + "\n")
    assert ended_attempts(run) == []


def test_attempt_without_times_does_not_block_the_cadence(tmp_path: Path) -> None:
    whole = {"attempt": 1, "cause": "crash", "started": 0.0, "ended": 50.0}
    config = compose(["checkpoint=adaptive"]).config
    broken: list[dict[str, object]] = [{}, {"started": 5.0}, {"started": 5.0, "ended": "later"}]
    for number, times in enumerate(broken):
        run = RunDir(tmp_path / str(number))
        run.path.mkdir()
        lines = whole, {"attempt": 2, "cause": "crash", **times}
        run.attempts.write_text("".join(json.dumps(line) + "\n" for line in lines))
        cadence = make_cadence(config, begin(run), 0, EpochSteps.of(config, [8], [BatchShape(0, 1, 4)]))
        assert cadence.adaptive is not None
        assert cadence.adaptive._ran_s == 50.0, times


def test_the_last_record_is_that_of_the_last_complete_step(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert last_record(run) == {}
    lines = ['{"step": 1, "loss": 3.0}', '{"step": 2, "loss": 2.0}', '{"step": 2, "eval_loss": 1.0}', '{"step": 3, "lo']
    run.metrics.write_text("\n".join(lines))
    assert last_record(run) == {"step": 2, "loss": 2.0}


def test_a_finished_run_with_missing_metrics_is_marked(
    tmp_path: Path, flag: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    job = compose([f"run.dir={tmp_path / 'run'}", "train.steps=4"])
    run = RunDir(job.run_dir)
    run.path.mkdir()
    run.config.write_text(job.text)
    run.finished.write_text('{"steps": 4}')
    lines = [json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(1, 5)]
    for kept, says in ((4, False), (3, True), (0, True)):
        run.metrics.write_text("".join(lines[:kept]))
        assert training_attempt.attempt(run.path) == ExitStatus.FINISHED
        assert (f"ends at step {kept}" in capsys.readouterr().err) == says


def test_refused_records_are_written_with_the_next_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(tmp_path)
    begin(run).end("preempted", 75)

    def full(*arguments: Any, **options: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", str(run.attempt))

    with monkeypatch.context() as patch:
        patch.setattr(files, "replace", full)
        log = begin(run)
        log.note(cause="preempted")
    assert json.loads(run.attempt.read_text()) == {}
    log.update(force=True)
    assert json.loads(run.attempt.read_text())["cause"] == "preempted"
    assert "cannot be written" in json.loads(run.status.read_text())["warnings"][0]
    monkeypatch.setattr(clock, "sleep", lambda seconds: None)
    with monkeypatch.context() as patch:
        patch.setattr(files, "replace", full)
        with pytest.raises(FileError, match="free space"):
            log.end("preempted", 75)
    log.end("failed", 1)
    assert [(line["attempt"], line["cause"]) for line in ended_attempts(run)] == [(1, "preempted"), (2, "failed")]

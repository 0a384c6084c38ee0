"""The books of a run: what status.json says of its checkpoints, and which ends in a row stop it."""

from __future__ import annotations

import json
import os
import signal
import types
from pathlib import Path
from typing import Any

import pytest

from runner import train
from runner.attempts import AttemptLog
from runner.config import compose
from runner.errors import CrashLoopError, ExitStatus, UserError
from runner.files import append_line, read_lines
from runner.lease import this_process
from runner.run_dir import RunDir
from runner.signals import STOP, STOP_SIGNALS, StopFlag


def opened(run: RunDir, identity: dict[str, Any] | None = None) -> AttemptLog:
    return AttemptLog.begin(run, identity or {"job_id": "7"}, 100, lambda record: "killed")


def test_the_status_has_the_time_of_the_newest_committed_checkpoint(tmp_path: Path) -> None:
    """A save that is under way, or failed, is no newer one."""
    run = RunDir(tmp_path)
    log = opened(run)
    assert json.loads(run.status.read_text())["checkpoint_time"] is None
    for step, when in ((10, 1_000.0), (20, 2_000.0)):
        path = run.checkpoints / f"step_{step:08d}"
        path.mkdir(parents=True)
        os.utime(path, (when, when))
    (run.checkpoints / "step_00000030.tmp-1").mkdir()
    log.update(force=True)
    status = json.loads(run.status.read_text())
    assert (status["checkpoint_step"], status["checkpoint_time"]) == (20, 2_000.0)


def ends(run: RunDir, *causes: str) -> None:
    """Attempts of job 7 that brought nothing."""
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
        (["time limit"] * 3, 5, False),  # they have a budget of their own
        (["crash", "time limit", "crash", "crash"], 5, True),
    ],
)
def test_three_attempts_without_progress_are_a_crash_loop(
    tmp_path: Path, causes: list[str], max_timeouts: int | None, stops: bool
) -> None:
    run = RunDir(tmp_path)
    ends(run, *causes)
    log = opened(run)
    if stops:
        with pytest.raises(CrashLoopError, match="in a row"):
            log.check_crash_loop(max_timeouts)
    else:
        log.check_crash_loop(max_timeouts)


@pytest.mark.parametrize(("noted", "cause"), [("preempted", "preempted"), ("interrupted", "killed"), (None, "killed")])
def test_an_attempt_that_was_killed_is_judged_by_what_the_scheduler_said(
    tmp_path: Path, noted: str | None, cause: str
) -> None:
    """When a rank dies, srun signals the others before it kills them: that alone must not hide a crash loop."""
    run = RunDir(tmp_path)
    log = opened(run)
    log.note(**({"cause": noted} if noted else {}))
    assert opened(run).last_cause == cause


class LimitedJob:
    """A job that is told of its time limit before it could build anything, every time."""

    auto_restarts = True
    max_timeouts: int | None = 4
    early_signal: int | None = signal.SIGUSR2

    def __init__(self, restart_count: int) -> None:
        self.restart_count = restart_count
        self.came_back = False

    def identity(self) -> dict[str, Any]:
        return {"job_id": "7", "restart_count": self.restart_count, "host": "here", "node": "n1"}

    def begun(self) -> None: ...

    def defer(self) -> None: ...

    def cause(self, signum: int) -> str:
        return "time limit"

    def leave(self, cause: str) -> str:
        self.came_back = True
        return cause


@pytest.fixture
def flag() -> Any:
    """The stop flag and the handlers as they were, afterwards."""
    handlers = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    STOP.signum = None
    yield STOP
    STOP.signum = None
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


def forget(flag: StopFlag) -> None:
    """Close what an attempt listens with until its process ends; here the next attempt is made in the same one."""
    signal.set_wakeup_fd(-1)
    flag.settle()
    for end in flag._bytes or ():
        end.close()
    flag._bytes = flag._thread = None


def test_time_limits_without_progress_stop_the_run_at_their_budget(tmp_path: Path, flag: Any) -> None:
    """Four in a row, though three other ends would be a crash loop; a new checkpoint on the way begins anew."""
    job = compose([f"run.dir={tmp_path / 'run'}"])
    run = RunDir(job.run_dir)
    run.path.mkdir()
    run.config.write_text(job.text)

    def attempt(number: int) -> bool:
        """Whether the job came back."""
        flag.signum = None
        limited = LimitedJob(number)
        status = train.attempt(run.path, limited)
        forget(flag)
        assert status == (ExitStatus.INTERRUPTED if limited.came_back else ExitStatus.FAILED)
        return limited.came_back

    assert [attempt(number) for number in range(3)] == [True] * 3
    (run.checkpoints / "step_00000010").mkdir(parents=True)
    lines = run.attempts.read_text().splitlines()
    run.attempts.write_text(
        "\n".join([*lines[:-1], json.dumps({**json.loads(lines[-1]), "checkpoint_step": 10})]) + "\n"
    )
    assert [attempt(number) for number in range(3, 7)] == [True, True, True, False]
    status = json.loads(run.status.read_text())
    assert (status["state"], status["cause"]) == ("failed", "timeouts")
    assert "launcher.max_timeouts=4" in status["reason"]


@pytest.mark.parametrize("line", ["garbage", "[1, 2]", '{"a": 1}'])
def test_a_damaged_book_hinders_no_attempt(tmp_path: Path, line: str) -> None:
    run = RunDir(tmp_path)
    ends(run, "crash")
    with open(run.attempts, "a") as file:
        file.write(f"{line}\n")
    run.attempt.write_text(line)
    assert opened(run).record["attempt"] == 2


def test_a_cause_that_cannot_be_noted_does_not_keep_an_attempt_from_leaving(tmp_path: Path) -> None:
    """As on a full disk: the record holds it, and the job still goes back into the queue after that."""
    run = RunDir(tmp_path)
    log = opened(run)
    run.attempt.unlink()
    run.attempt.mkdir()  # nothing can be written there
    log.leaving("preempted")
    assert log.record["cause"] == "preempted"
    assert json.loads(run.status.read_text())["state"] == "requeued"


def test_a_line_that_was_cut_short_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / "attempts.jsonl"
    path.write_text('{"attempt": 1}\n{"attempt": 2, "cau')
    append_line(path, {"attempt": 3})
    append_line(path, {"attempt": 4})
    assert list(read_lines(path)) == [{"attempt": 1}, {"attempt": 3}, {"attempt": 4}]


def test_a_cause_that_is_heard_after_the_end_changes_nothing(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    log = opened(run)
    log.end("finished", 0)
    log.note(cause="preempted")
    assert not run.attempt.exists()
    assert [line["cause"] for line in read_lines(run.attempts)] == ["finished"]


@pytest.mark.parametrize("failure", [None, ValueError("a bug"), UserError("a mistake")])
def test_an_attempt_that_was_succeeded_leaves_the_books_alone(
    tmp_path: Path, flag: Any, monkeypatch: pytest.MonkeyPatch, failure: Exception | None
) -> None:
    """However it ends: they are the newer one's."""
    job = compose([f"run.dir={tmp_path / 'run'}"])
    run = RunDir(job.run_dir)
    run.path.mkdir()
    run.config.write_text(job.text)

    def succeeded(steps: int) -> bool:
        (run.lease / "00000009.json").write_text(json.dumps({**this_process(), "pid": 1}))
        run.attempt.write_text('{"attempt": 2}')
        if failure is not None:
            raise failure
        return True

    session = types.SimpleNamespace(train=succeeded, step=5)
    monkeypatch.setattr("runner.session.Session.open", lambda *parts: session)
    assert train.attempt(run.path) == ExitStatus.SUPERSEDED
    assert not run.finished.exists()
    assert not run.attempts.exists()
    assert json.loads(run.attempt.read_text()) == {"attempt": 2}

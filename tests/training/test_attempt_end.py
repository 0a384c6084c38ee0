"""The end of an attempt on a full disk, after a newer attempt took over, or if the process cannot exit."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_attempts import STEPS, TinyJob, TinySession, tiny_attempts, training_to
from torch._C._distributed_c10d import HashStore

from runner.errors import ExitStatus, SupersededError, TrainingError, UserError
from runner.rundir.attempt_log import AttemptLog, ended_attempts
from runner.rundir.lease import Lease
from runner.rundir.paths import RunDir
from runner.system import files, processes
from runner.system.distributed import World
from runner.system.signals import STOP
from runner.training import attempt as training_attempt
from runner.training.ranks import peers
from runner.training.ranks.peer_watch import PeerWatch


class Requeued(TinyJob):
    """A job that is restarted unless a rank records its verdict; it notes each request."""

    def __init__(self, restart_count: int = 0) -> None:
        super().__init__(restart_count)
        self.told: list[str] = []

    def yield_verdict(self, reason: str | None = None) -> bool:
        self.told.append(f"yield {reason}")
        return True

    def record_verdict(self) -> None:
        self.told.append("verdict")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    path = tmp_path / "run"
    path.mkdir()
    return RunDir(path)


@pytest.mark.parametrize(("code", "passes"), [(errno.ENOSPC, True), (errno.EPERM, False)])
def test_disk_with_room_for_one_record_fails_no_run_for_good(code: int, passes: bool, run: RunDir) -> None:
    write = files.write_json

    def refuse(path: Path, *arguments: Any, **options: Any) -> None:
        if path == run.order:
            raise OSError(code, os.strerror(code), str(path))
        write(path, *arguments, **options)

    job = Requeued()
    with tiny_attempts() as patch:
        patch.setattr(files, "write_json", refuse)
        assert training_attempt.attempt(run.path, job) == ExitStatus.FAILED
    assert (f"yield {run.order} cannot be written ({os.strerror(code)})" in job.told[0]) == passes
    assert json.loads(run.status.read_text())["state"] == ("requeued" if passes else "failed")
    with tiny_attempts():
        assert training_attempt.attempt(run.path, Requeued(1)) == ExitStatus.FINISHED


@pytest.mark.parametrize("module", ["runner.config.frozen", "runner.training.session"])
def test_a_module_that_cannot_be_imported_fails_no_run_for_good(
    module: str, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment may be on a file system that works again at the next start."""
    job = Requeued()
    with tiny_attempts():
        monkeypatch.setitem(sys.modules, module, None)
        assert training_attempt.attempt(run.path, job) == ExitStatus.FAILED
        assert job.told[0].startswith(f"yield ModuleNotFoundError: import of {module} halted")
        monkeypatch.undo()
        assert training_attempt.attempt(run.path, Requeued(1)) == ExitStatus.FINISHED


class Submitted(Requeued):
    """A requeued job whose submission is known."""

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "submission": "s"}


def test_earlier_start_trains_nothing_after_a_later_one(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """A later command, such as a prune of checkpoints, has held the lease since."""
    job = Submitted(0)
    with tiny_attempts():
        assert training_attempt.attempt(run.path, Submitted(1)) == ExitStatus.FINISHED
        Lease.acquire(run.lease).release()
        before = run.attempts.read_bytes(), run.status.read_bytes()
        run.finished.unlink()
        assert training_attempt.attempt(run.path, job) == ExitStatus.SUPERSEDED
        assert "continued by a later start of job 7 (restart 1)" in capsys.readouterr().err
        assert job.told == ["verdict"]  # the batch script is not to requeue it
        assert (run.attempts.read_bytes(), run.status.read_bytes()) == before
        assert training_attempt.attempt(run.path, Submitted(2)) == ExitStatus.FINISHED


@pytest.mark.parametrize("named", [True, False])
def test_a_run_with_its_completion_mark_has_not_failed(
    named: bool, run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    """Let the disk refuse the mark, before or after it has its name: the records state what others see afterwards."""
    write = files.write_json

    def refuse(path: Path, *arguments: Any, **options: Any) -> None:
        if path != run.finished:
            return write(path, *arguments, **options)
        if named and not run.finished.exists():  # the sync of its directory fails, and then whatever is tried
            write(path, *arguments, **options)
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    with tiny_attempts() as patch:
        patch.setattr(files, "write_json", refuse)
        status = training_attempt.attempt(run.path, TinyJob(0))
    assert status == (ExitStatus.FINISHED if named else ExitStatus.FAILED)
    recorded = json.loads(run.status.read_text())
    assert [line["cause"] for line in ended_attempts(run)] == [recorded["cause"]] == ["finished" if named else "failed"]
    assert recorded["state"] == recorded["cause"]
    assert any("finished.json" in warning for warning in recorded["warnings"]) == named
    assert (f"warning: {run.finished} may be lost at a power failure" in capsys.readouterr().err) == named
    with tiny_attempts():
        assert training_attempt.attempt(run.path, TinyJob(1)) == ExitStatus.FINISHED
    assert json.loads(run.status.read_text())["state"] == "finished"


def test_run_is_finished_once_its_last_checkpoint_is_durable(run: RunDir) -> None:
    """The last save counts even if the sync of its name failed; a power loss may then delete it."""
    sync, synced = files.fsync_dir, list[Path]()

    def refuse(directory: Path) -> None:
        if directory == run.checkpoints and run.checkpoint(STEPS).is_dir():
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(directory))

    with tiny_attempts() as patch:
        patch.setattr(files, "fsync_dir", refuse)
        assert training_attempt.attempt(run.path, TinyJob(0)) == ExitStatus.FAILED
    assert not run.finished.exists()

    def record(directory: Path) -> None:
        sync(directory)
        synced.append(directory)

    with tiny_attempts() as patch:
        patch.setattr(files, "fsync_dir", record)
        assert training_attempt.attempt(run.path, TinyJob(1)) == ExitStatus.FINISHED
    assert run.checkpoints in synced


def test_a_bug_in_a_users_code_is_a_crash_with_its_traceback(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that it neither ends this process like a kill, nor lets the watch of the other ranks record another end."""
    end, done = AttemptLog.end, list[str]()

    def raises(session: TinySession, steps: int) -> bool:
        raise LookupError("a bug in the model")

    def recorded(log: AttemptLog, *arguments: Any) -> None:
        done.append("recorded")
        end(log, *arguments)

    with tiny_attempts() as patch:
        patch.setattr(TinySession, "train", raises)
        patch.setattr(PeerWatch, "stop", lambda watch: done.append("not watched"))
        patch.setattr(AttemptLog, "end", recorded)
        assert training_attempt.attempt(run.path, TinyJob(0)) == ExitStatus.FAILED
    assert done[:2] == ["not watched", "recorded"]
    (line,) = ended_attempts(run)
    assert line["cause"] == "crash"
    assert re.fullmatch(rf"LookupError: a bug in the model \({__file__}, line \d+\)", line["reason"])
    assert json.loads(run.status.read_text())["state"] == "failed"
    printed = capsys.readouterr().err
    assert "Traceback" in printed
    assert "in raises" in printed
    assert printed.endswith(f"error: {line['reason']}\n"), (
        "its own line, and not one of the runner's, is what to look at"
    )


def test_refusals_before_the_records_open_are_printed(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the message, nothing would explain the failure of the process."""

    def make(world: World) -> ExitStatus:
        raise OSError(errno.EIO, "Input/output error", str(run.lease))

    assert training_attempt.carry_out(run.path, TinyJob(0), make) == ExitStatus.FAILED
    assert capsys.readouterr().err == f"error: Input/output error: {run.lease} (run directory {run.path})\n"


@pytest.mark.parametrize(
    ("error", "requeued", "reported"),
    [
        (LookupError("a bug"), False, True),
        (UserError("a mistake"), False, True),
        (TrainingError("the loss is nan"), False, False),  # every rank knows of it without a report
        (UserError("a full disk"), True, False),  # the job is restarted, and has not failed
    ],
)
def test_the_others_learn_why_a_rank_fails_the_job(
    error: Exception, requeued: bool, reported: bool, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise they could only name a rank that does not answer."""
    store = HashStore()
    monkeypatch.setattr(peers, "store_is_gone", lambda timeout_s: False)
    monkeypatch.setattr(peers, "connect", lambda timeout_s: store)
    attempt: Any = training_attempt._Attempt.__new__(training_attempt._Attempt)
    attempt.world, attempt.requeued = World(1, 2), requeued
    attempt._tell_ranks(error, str(error))
    assert peers.read_report(store) == (f"rank 1 failed: {error}" if reported else None)


def test_disk_error_at_checkpoints_fails_no_finished_run(run: RunDir) -> None:
    end, newest_step, refused = AttemptLog.end, RunDir.newest_step, [False]

    def refuse(run: RunDir) -> int:
        if refused.pop():
            refused.append(False)
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(run.checkpoints))
        refused.append(False)
        return newest_step(run)

    def refused_end(log: AttemptLog, *arguments: Any) -> None:
        refused[0] = True
        end(log, *arguments)

    with tiny_attempts() as patch:
        patch.setattr(RunDir, "newest_step", refuse)
        patch.setattr(AttemptLog, "end", refused_end)
        assert training_attempt.attempt(run.path, TinyJob(0)) == ExitStatus.FINISHED
    assert [line["cause"] for line in ended_attempts(run)] == ["finished"]


@pytest.mark.parametrize("refused", [1, 2, 3])
def test_disk_error_at_checkpoints_makes_no_crash_of_a_signal(
    refused: int, run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fail at the beginning of the end, at its record, and after that is written."""
    newest_step, looks = RunDir.newest_step, itertools.count()

    def refuse(run: RunDir) -> int:
        if next(looks) == refused:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(run.checkpoints))
        return newest_step(run)

    job = Requeued()
    job.early_signal = signal.SIGTERM
    with tiny_attempts() as patch:
        patch.setattr(STOP, "signum", None)
        patch.setattr(RunDir, "newest_step", refuse)
        assert training_attempt.attempt(run.path, job) == ExitStatus.INTERRUPTED
    assert next(looks) > refused
    assert [line["cause"] for line in ended_attempts(run)] == ["interrupted"]
    printed = capsys.readouterr()
    assert "stopped before the first step" in printed.out
    assert printed.err == ""


@pytest.mark.parametrize(
    ("restarts", "then"), [(False, "rerun the command to resume"), (True, "the requeued job resumes")]
)
def test_signal_before_a_resumed_run_trains_leaves_it_saved(
    run: RunDir, capsys: pytest.CaptureFixture[str], restarts: bool, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TinyJob, "auto_restarts", restarts)
    job = TinyJob(1)
    job.early_signal = signal.SIGTERM
    with tiny_attempts() as patch:
        patch.setattr(STOP, "signum", None)
        assert training_attempt.attempt(run.path, TinyJob(0)) == ExitStatus.FINISHED
        with training_to(2 * STEPS):
            assert training_attempt.attempt(run.path, job) == ExitStatus.INTERRUPTED
    assert f": saved at step {STEPS}; {then}" in capsys.readouterr().out


def test_the_verdict_is_recorded_before_the_process_may_be_ended(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Requeued()
    monkeypatch.setattr(training_attempt, "leave_ranks", lambda status: job.told.append("leave"))
    with tiny_attempts():
        training_attempt.attempt(run.path, job)
    assert job.told == ["verdict", "leave"]


@pytest.mark.parametrize("superseded", [False, True])
def test_a_rank_without_peers_ends_with_its_status(
    superseded: bool, run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cover a system without a timer that would end the process."""
    done: list[Any] = []

    def no_timer(seconds: int, status: int) -> None:
        raise OSError(errno.EAGAIN, "cannot create a timer")

    class Log:
        def end(self, *arguments: Any) -> None:
            if superseded:
                raise SupersededError("a newer attempt holds the lease")
            done.append("recorded")

        def update(self, **changes: Any) -> None:
            done.append(changes["state"])

    class Held:
        def release(self) -> None:
            done.append("released")

    monkeypatch.setattr(processes, "end_after", no_timer)
    monkeypatch.setattr(processes, "end_now", done.append)
    attempt: Any = training_attempt._Attempt.__new__(training_attempt._Attempt)
    attempt.world, attempt.job, attempt.run = World(), Requeued(), run
    attempt.session, attempt.log, attempt.lease = None, Log(), Held()
    attempt._ends = threading.Lock()
    attempt._end_from_watch("rank 1 hangs")
    recorded = [] if superseded else ["recorded", "requeued"]
    assert done == [*recorded, "released", ExitStatus.SUPERSEDED if superseded else ExitStatus.FAILED]
    assert "rank 1 hangs" in capsys.readouterr().err


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("restarted", [False, True])
def test_a_hang_is_recorded_with_its_stacks(
    restarted: bool, refused: bool, run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Print the stacks if the disk accepts no more data."""
    ended: list[int] = []
    write = files.write_atomic

    def refuse(path: Path, *arguments: Any, **options: Any) -> None:
        if path.parent == run.hang:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, *arguments, **options)

    monkeypatch.setattr(processes, "end_after", lambda seconds, status: None)
    monkeypatch.setattr(processes, "end_now", ended.append)
    if refused:
        monkeypatch.setattr(files, "write_atomic", refuse)
    attempt: Any = training_attempt._Attempt.__new__(training_attempt._Attempt)
    attempt.world, attempt.job, attempt.run = World(), Requeued() if restarted else TinyJob(0), run
    attempt.session, attempt.lease, attempt._ends = None, None, threading.Lock()
    attempt.log = AttemptLog.begin(run, {"job_id": "7"}, 9, lambda record: "killed")
    attempt._end_from_watch("rank 1 is in a step", "hang", {0: "stacks of 0", 1: "stacks of 1"})
    assert ended == [ExitStatus.FAILED]
    (line,) = ended_attempts(run)
    assert line["cause"] == "hang"
    assert line["reason"] == f"rank 1 is in a step; stacks of all threads: {run.hang}/attempt1-rank*.txt"
    assert json.loads(run.status.read_text())["state"] == ("requeued" if restarted else "stuck")
    if refused:
        assert "stacks of 1" in capsys.readouterr().err
    else:
        assert [run.stacks(1, rank).read_text() for rank in range(2)] == ["stacks of 0", "stacks of 1"]


def test_a_hang_is_recorded_before_the_loggers_are_closed(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A logger may hang as well, until the process is ended."""
    at_close: list[dict[str, Any]] = []
    monkeypatch.setattr(processes, "end_after", lambda seconds, status: None)
    monkeypatch.setattr(processes, "end_now", lambda status: None)
    attempt: Any = training_attempt._Attempt.__new__(training_attempt._Attempt)
    attempt.world, attempt.job, attempt.run = World(), TinyJob(0), run
    attempt.lease, attempt._ends = None, threading.Lock()
    attempt.log = AttemptLog.begin(run, {"job_id": "7"}, 9, lambda record: "killed")
    recorder = SimpleNamespace(close=lambda: at_close.extend(ended_attempts(run)))
    attempt.session = SimpleNamespace(recorder=recorder)
    attempt._end_from_watch("rank 1 hangs", "hang")
    assert [line["cause"] for line in at_close] == ["hang"]


def test_the_command_of_an_attempt_takes_one_run_directory(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(processes, "end_with_parent", lambda: None)
    run.config.write_text("")
    path, missing = str(run.path), str(run.path / "elsewhere")
    for arguments, found in ([], "nothing"), ([missing], missing), ([path, path], f"{path} {path}"):
        assert training_attempt.main(arguments) == ExitStatus.USAGE
        assert capsys.readouterr().err == f"error: expected one run directory with a config.yaml, got {found}\n"
    with tiny_attempts():
        assert training_attempt.main([path]) == ExitStatus.FINISHED


def test_ranks_are_left_although_there_is_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[int] = []

    def no_timer(seconds: int, status: int) -> None:
        raise OSError(errno.EAGAIN, "cannot create a timer")

    monkeypatch.setattr(peers, "current_ranks", lambda: (0, 2))
    monkeypatch.setattr(processes, "end_after", no_timer)
    monkeypatch.setattr(World, "stop", lambda world: stopped.append(world.size))
    peers.leave_ranks(0)
    assert stopped == [2]

"""Custody of a run: moving, removing or packing a run requires all of its leases, so that no process uses it."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest
from disk import tree_of

from runner.contracts import JobInfo
from runner.errors import LockedError, RunDirError, UserError
from runner.rundir import custody as module
from runner.rundir import submitted_jobs
from runner.rundir.custody import check_idle, custody, run_at
from runner.rundir.lease import Lease, read_holder
from runner.rundir.paths import RunDir
from runner.system import files, processes

HOLD = """
import sys
from pathlib import Path
from runner.rundir.lease import Lease
Lease.acquire(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return made(tmp_path / "outputs" / "a-12345678")


def made(path: Path) -> RunDir:
    """Make a directory that custody accepts as a run."""
    run = RunDir(path)
    run.checkpoint(3).mkdir(parents=True)
    run.config.write_text("seed: 1\n")
    run.code.write_text("{}")
    return run


@pytest.fixture(params=["lease", "submission"])
def holder(request: pytest.FixtureRequest, run: RunDir) -> Iterator[subprocess.Popen[str]]:
    """Start another process that trains or submits the run."""
    command = [sys.executable, "-c", HOLD, str(run.path / request.param)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_live_run_is_left_alone_until_its_process_has_ended(run: RunDir, holder: subprocess.Popen[str]) -> None:
    before = sorted(path for path in tree_of(run.path) if not path.endswith(".beat"))
    with pytest.raises(LockedError, match=f"in use by process {holder.pid}"):
        check_idle(run)
    assert sorted(path for path in tree_of(run.path) if not path.endswith(".beat")) == before
    with pytest.raises(LockedError, match=f"in use by process {holder.pid}"), custody(run):
        pytest.fail("custody of a live run")
    holder.kill()
    holder.wait()
    with custody(run) as held:
        assert held.run.path == run.path


def test_a_holder_of_another_machine_is_waited_for(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a heartbeat the holder is gone after the timeout. The user learns the reason for the wait."""
    monkeypatch.setattr(module, "TIMEOUT_S", 0.3)
    run.lease.mkdir()
    stale = {"pid": 12, "host": "elsewhere", "start_time": 1, "boot_id": "b", "interval_s": 0.05}
    (run.lease / "00000004.json").write_text(json.dumps(stale))
    reported: list[str] = []
    check_idle(run)  # it cannot tell, and does not wait
    with custody(run, reported.append):
        found = read_holder(run.lease)
        assert found is not None
        assert found[0] == 5
    assert reported == ["process 12 on elsewhere held this run last; waiting up to 0 s for its heartbeat"]


def test_no_process_can_begin_while_custody_is_held(run: RunDir) -> None:
    """Try both an attempt and a command that submits the run."""
    with custody(run):
        for lease in (run.lease, run.submission):
            with pytest.raises(LockedError):
                Lease.acquire(lease)
        with pytest.raises(LockedError), custody(run):
            pytest.fail("two at once")
    for lease in (run.lease, run.submission):
        Lease.acquire(lease).release()


def test_run_moved_while_waiting_for_leases_is_not_remade(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise two commands would both report success, and one would have moved an empty directory."""
    elsewhere = run.path.with_name("b-12345678")

    def look(found: RunDir, is_run: Callable[[RunDir], bool] = module.is_run) -> bool:
        there = is_run(found)
        if there:
            run.path.rename(elsewhere)  # after the look whether it is a run
        return there

    monkeypatch.setattr(module, "is_run", look)
    with pytest.raises(RunDirError, match="was moved or removed meanwhile"), custody(run):
        pytest.fail("custody of nothing")
    assert not run.path.exists()
    assert RunDir(elsewhere).config.exists()


def test_the_leases_move_along_and_are_released_there(run: RunDir) -> None:
    """The next attempt, perhaps on another machine, then need not wait for a heartbeat."""
    target = run.path.with_name("b-12345678")
    with custody(run) as held:
        held.move(target)
        assert held.run.path == target
        assert not run.path.exists()
        with pytest.raises(LockedError):
            Lease.acquire(RunDir(target).lease)
    for lease in (RunDir(target).lease, RunDir(target).submission):
        found = read_holder(lease)
        assert found is not None
        assert found[1]["released"]
    assert not run.path.exists()


def test_the_message_names_the_place_of_an_unrestorable_run(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new name cannot be synced, and another process takes the run over before it is renamed back."""
    target = run.path.with_name("b-12345678")

    def taken_over(directory: Path) -> None:
        (RunDir(target).lease / "00000009.json").write_text("{}")
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(directory))

    with custody(run) as held:
        monkeypatch.setattr(files, "fsync_dir", taken_over)
        with pytest.raises(OSError, match=f"Input/output error; it is {target} now"):
            held.move(target)
    assert not run.path.exists()


@pytest.mark.parametrize("is_open", [True, False])
def test_files_open_in_a_stopped_trainer_are_not_moved(run: RunDir, is_open: bool) -> None:
    """The trainer appends when it wakes, before it can notice that its lease is gone."""
    holder = {**processes.this_process(), "host": "elsewhere", "open": is_open}
    run.lease.mkdir()
    run.appender.write_text(json.dumps(holder))
    run.metrics.write_text('{"step": 1}\n')
    target = run.path.with_name("b-12345678")
    with open(run.metrics, "a") as held_open:
        with custody(run) as held:
            held.move(target)
        held_open.write('{"step": 2}\n')
    moved = RunDir(target).metrics.read_text()
    assert (moved == '{"step": 1}\n') == is_open
    with custody(RunDir(target)):
        pass
    assert RunDir(target).metrics.read_text() == moved


def test_concurrent_removal_is_not_renamed_back(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run `rm` twice at once: the second mistakes the renamed run for a leftover of a killed `rm`."""
    target, rename = run.path.with_name(".a-12345678.removed-1-00000000"), files.rename

    def deleted(source: Path, to: Path) -> None:
        rename(source, to)
        shutil.rmtree(to)

    with custody(run) as held:
        monkeypatch.setattr(files, "rename", deleted)
        held.move(target)
        monkeypatch.undo()
    assert list(run.path.parent.iterdir()) == []


class TestQueue:
    class Slurm:
        state = "pending"

        def jobs(self, runs: list[Path]) -> dict[Path, JobInfo]:
            if self.state == "silent":
                raise OSError("squeue does not answer")
            return {run: JobInfo("12", self.state) for run in runs}

    @pytest.fixture
    def submitted(self, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> RunDir:
        run.job.write_text(json.dumps({"job_id": "12", "launcher": "launch.slurm.SlurmLauncher"}))
        point = metadata.EntryPoint("fake", f"{__name__}:TestQueue.Slurm", submitted_jobs.GROUP)
        monkeypatch.setattr(submitted_jobs, "_known_launcher", lambda name: point)
        return run

    @pytest.mark.parametrize("state", ["pending", "running", "ending", "requeued", "suspended"])
    def test_a_run_with_a_job_is_left_alone(
        self, submitted: RunDir, state: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(self.Slurm, "state", state)
        with pytest.raises(LockedError, match=f"has job 12 in the queue .{state}"), custody(submitted):
            pytest.fail("custody of a queued run")
        with pytest.raises(LockedError, match="runner cancel"):
            check_idle(submitted)

    def test_an_ended_job_does_not_block_custody(self, submitted: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(self.Slurm, "state", "completed")
        check_idle(submitted)
        with custody(submitted):
            pass

    def test_a_scheduler_that_is_silent_decides_nothing(
        self, submitted: RunDir, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(self.Slurm, "state", "silent")
        with pytest.raises(UserError, match=r"cannot tell whether .* is queued .*or remove job\.json"):
            check_idle(submitted)


class TestWhatIsNoRun:
    def test_a_config_directory_is_not_touched(self, tmp_path: Path) -> None:
        """Such a directory has a config.yaml, like a run."""
        conf = tmp_path / "conf"
        (conf / "model").mkdir(parents=True)
        (conf / "config.yaml").write_text("defaults: [model]\n")
        before = tree_of(conf)
        with pytest.raises(RunDirError, match="is not a run directory"):
            run_at(conf)
        assert tree_of(conf) == before

    def test_a_directory_of_runs_nothing_and_a_file(self, run: RunDir) -> None:
        for path in (run.path.parent, run.path / "nowhere", run.config, Path("/")):
            with pytest.raises(RunDirError, match="is not a run directory"):
                run_at(path)

    def test_a_link_to_a_run_is_named(self, run: RunDir, tmp_path: Path) -> None:
        """Moving or removing it would affect the link but hold the leases of its target."""
        (tmp_path / "link").symlink_to(run.path)
        with pytest.raises(RunDirError, match=f"is a link: pass the run directory itself, {run.path}"):
            run_at(tmp_path / "link")

    def test_a_run_with_runs_in_it_is_refused(self, run: RunDir) -> None:
        """The leases of the inner runs are not held, so they may be live."""
        inner = made(run.path / "more" / "b-87654321")
        with pytest.raises(RunDirError, match=f"has another run in it .{inner.path}"):
            run_at(run.path)

    def test_a_path_with_dots_is_the_run(self, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(run.path)
        assert run_at(Path()).path == run.path
        assert run_at(Path(os.path.join("..", run.path.name, "."))).path == run.path


def test_a_job_is_found_by_opening_its_file_and_not_by_a_look(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a network file system a machine may miss another machine's new file for seconds."""
    assert submitted_jobs.launcher_of(run) is None
    run.job.write_text('{"launcher": "launch.slurm.SlurmLauncher"}')

    def missing(path: object, **_: object) -> object:
        raise FileNotFoundError(2, "No such file or directory", str(path))

    monkeypatch.setattr(files, "stat", missing)
    assert submitted_jobs.launcher_of(run) == "launch.slurm.SlurmLauncher"
    run.job.write_text("[]")
    assert submitted_jobs.launcher_of(run) == submitted_jobs.NONE

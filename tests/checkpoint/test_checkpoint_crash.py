"""Killed, failing or frozen at every single change to the file system that a commit makes."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Toy, manager, names
from faults import failing, intercepted, killed, signaled

from runner.checkpoint import commit
from runner.checkpoint import directory as checkpoint_dir
from runner.errors import SupersededError
from runner.rundir.lease import Lease


class Scene:
    """A run in which everything happens at once: two valid checkpoints, a corrupt newest one, a leftover.

    `act` loads (sweeps, sets aside), saves step 3 and deletes step 1.
    """

    def __init__(self, directory: Path) -> None:
        self.template = directory / "template"
        self.digests: dict[int, str] = {}
        toy = Toy()
        saving = manager(self.template)
        for step in (1, 2, 3):
            toy.train()
            self.digests[step] = toy.digest()
            toy.save(saving)
        os.truncate(self.template / "step_00000003" / "train_state.pt", 100)
        (self.template / "step_00000003.tmp-1-77").mkdir()
        (self.template / "step_00000003.tmp-1-77" / "part").write_text("x")
        self.third = toy

    def copy(self, to: Path) -> Path:
        return Path(shutil.copytree(self.template, to, dirs_exist_ok=True))

    def act(self, directory: Path, **options: Any) -> bool:
        other = Toy(seed=1)
        working = manager(directory, keep_last=2, **options)
        working.load(other.model, other.optimizer)
        return self.third.save(working)

    def check(self, directory: Path, case: object) -> int:
        """Check that the newest checkpoint is intact bit for bit and that saving works; return its step."""
        toy = Toy(seed=2)
        loading = manager(directory, keep_last=2)
        state = loading.load(toy.model, toy.optimizer)
        assert state is not None, case
        step = int(state["step"])
        assert step in (2, 3), case
        assert toy.digest() == self.digests[step], case
        assert not checkpoint_dir.leftovers(directory), case
        toy.step = 4
        assert toy.save(loading), (case, loading.last_error)
        assert loading.newest().step == 4, case  # type: ignore[union-attr]
        return step


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    made = Scene(tmp_path_factory.mktemp("scene"))
    made.act(made.copy(tmp_path_factory.mktemp("warm")))  # imports happen before anything is counted
    return made


@pytest.fixture
def fast(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory if possible: hundreds of commits need not wait for a disk."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


@pytest.fixture
def small_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are written in blocks of 1 KiB, so that there are many more calls to break."""
    monkeypatch.setattr(commit, "BLOCK_BYTES", 1024)


def calls_of(scene: Scene, directory: Path) -> list[tuple[str, str, str]]:
    run = scene.copy(directory)
    with intercepted() as trace:
        assert scene.act(run)
    return trace.calls


def forked(action: Callable[[], object]) -> int:
    """Run `action` in a forked child that exits without cleaning up; return its pid."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            action()
            status = 0
        except SupersededError:
            status = 74
        finally:
            os._exit(status)
    return pid


def test_the_order_of_a_commit_survives_a_power_loss(scene: Scene, tmp_path: Path) -> None:
    """Each file is fsynced after its last write, then their directory, all before the rename; then the parent.

    The manifest is written last.
    """
    calls = calls_of(scene, tmp_path)
    rename = next(n for n, (call, _, new) in enumerate(calls) if call == "replace" and new.endswith("step_00000003"))
    temporary = calls[rename][1]
    last: dict[str, tuple[int, str]] = {}
    for number, (call, path, _) in enumerate(calls[:rename]):
        if path.startswith(temporary) and call in ("open", "write", "fsync"):
            last[path] = (number, call)
    files = {path: number for path, (number, call) in last.items() if call == "fsync"}
    assert files.keys() == last.keys()
    assert sorted(Path(path).name for path in files if path != temporary) == [
        ".metadata",
        "__0_0.distcp",
        "manifest.json",
        "train_state.pt",
    ]
    order = sorted(files, key=lambda path: files[path])
    assert [Path(path).name for path in order[-2:]] == ["manifest.json", Path(temporary).name]
    assert calls[rename + 1][:2] == ("fsync", str(tmp_path))
    deletion = next(n for n, (call, path, _) in enumerate(calls) if call == "replace" and path.endswith("00000001"))
    assert deletion > rename + 1


@pytest.mark.slow
def test_the_disk_is_full_at_each_call(scene: Scene, fast: Path, caplog: pytest.LogCaptureFixture) -> None:
    """ENOSPC at every single change: logged, nothing lost, and the next save works."""
    for number in range(len(calls_of(scene, fast / "count"))):
        fail_at(scene, fast / str(number), number, errno.ENOSPC, caplog)


@pytest.mark.slow
@pytest.mark.usefixtures("small_writes")
@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.EROFS, errno.EDQUOT])
def test_the_disk_fails_otherwise_at_each_call(
    scene: Scene, fast: Path, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(len(calls_of(scene, fast / "count"))):
        fail_at(scene, fast / str(number), number, code, caplog)


def fail_at(scene: Scene, directory: Path, number: int, code: int, caplog: pytest.LogCaptureFixture) -> None:
    run = scene.copy(directory)
    caplog.clear()
    before = {path.name: path.stat().st_mtime_ns for path in (run / "step_00000002").iterdir()}
    with intercepted(failing(number, code)) as trace:
        committed = scene.act(run)
    case = (number, os.strerror(code), trace.calls[number], list(caplog.messages))
    assert caplog.messages, case
    assert (run / "step_00000003").exists() or not committed, case
    assert {path.name: path.stat().st_mtime_ns for path in (run / "step_00000002").iterdir()} == before, case
    assert scene.check(run, case) == 3 if committed else scene.check(run, case), case
    shutil.rmtree(run)


@pytest.mark.slow
@pytest.mark.usefixtures("small_writes")
@pytest.mark.parametrize("when", ["before", "middle", "after"])
def test_killed_at_each_call(scene: Scene, fast: Path, when: str) -> None:
    """SIGKILL before, in the middle of and after every single change."""
    calls = calls_of(scene, fast / "count")
    steps = set()
    for number, call in enumerate(calls):
        if when == "middle" and call[0] != "write":
            continue
        run = scene.copy(fast / str(number))

        def act(run: Path = run, number: int = number) -> None:
            with intercepted(killed(number, when)):
                scene.act(run)

        _, status = os.waitpid(forked(act), 0)
        assert os.WIFSIGNALED(status), (number, call)
        assert os.WTERMSIG(status) == signal.SIGKILL, (number, call)
        steps.add(scene.check(run, (number, when, call)))
        shutil.rmtree(run)
    assert steps == ({2, 3} if when != "middle" else {2})


@pytest.mark.slow
@pytest.mark.usefixtures("small_writes")
def test_a_process_frozen_at_each_call_commits_nothing_after_it_was_superseded(scene: Scene, fast: Path) -> None:
    """The older attempt is stopped at every single change of its save; a newer one takes the lease, loads and saves.

    When the older one wakes up, it commits nothing. It may finish deleting what both would delete.
    """
    begin = next(n for n, (call, _, _) in enumerate(calls_of(scene, fast / "count")) if call == "mkdir")
    for number in range(begin, len(calls_of(scene, fast / "again"))):
        run = scene.copy(fast / str(number) / "checkpoints")
        pid = forked(lambda run=run, number=number: older(scene, run, number))  # type: ignore[misc]
        _, status = os.waitpid(pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), number
        with Lease.acquire(run.parent / "lease", {"job_id": "1", "restart_count": 1}, 5.0) as lease:
            scene.act(run, check_fence=lease.check_fence, fence=lease.fence)
            before = names(run)
            manifest = (run / "step_00000003" / "manifest.json").read_bytes()
            os.kill(pid, signal.SIGCONT)
            _, status = os.waitpid(pid, 0)
        case = (number, status, before)
        assert os.WEXITSTATUS(status) in (0, 74), case
        assert names(run) in (before, [name for name in before if name != "step_00000001"]), case
        assert (run / "step_00000003" / "manifest.json").read_bytes() == manifest, case
        scene.check(run, case)
        shutil.rmtree(run)


def older(scene: Scene, run: Path, number: int) -> None:
    """Save under the first fencing number, and stop in the middle."""
    lease = Lease.acquire(run.parent / "lease", {"job_id": "1", "restart_count": 0}, 5.0)
    assert lease._thread is not None
    lease._stop.set()  # no heartbeat among the counted calls
    lease._thread.join()
    with intercepted(signaled(number, signal.SIGSTOP, "before")):
        scene.act(run, check_fence=lease.check_fence, fence=lease.fence)

"""Records are truncated in place only where no other process can write to them; no kill loses any."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import faults
import pytest
from tiny_attempts import STEPS, attempt, contents, tiny_attempts, training_to

from runner.checkpoint.files.directory import Directory
from runner.checkpoint.files.store import Fence
from runner.errors import ExitStatus, SupersededError
from runner.metrics import resume_records
from runner.metrics.tensorboard import TensorBoard
from runner.rundir.appender import announce, nobody_appends, withdraw
from runner.rundir.lease import Lease
from runner.rundir.paths import RunDir
from runner.system import files, processes


@contextmanager
def held(path: Path) -> Iterator[RunDir]:
    """Make a run directory and hold its lease."""
    with Lease.acquire(RunDir(path).lease, None, 5.0) as lease:
        yield RunDir(path, lease.guard)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    with held(tmp_path) as run:
        yield run


def announced_by(run: RunDir, **entries: Any) -> None:
    announce(run)
    files.write_json(run.appender, {**files.read_object(run.appender), **entries})


@pytest.fixture
def dead() -> dict[str, Any]:
    """Return the identity of a killed process of this machine."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    state = processes.state_of(process.pid)
    process.kill()
    process.wait()
    process.communicate()
    assert state is not None
    return {"pid": process.pid, "start_time": state[1]}


def test_dead_or_closed_records_append_nothing(run: RunDir, dead: dict[str, Any]) -> None:
    announce(run)
    assert not nobody_appends(run)
    withdraw(run)
    assert nobody_appends(run)
    announced_by(run, **dead)
    assert nobody_appends(run)
    announced_by(run, start_time="7")  # another process has the PID of the dead one now
    assert nobody_appends(run)


@pytest.mark.parametrize(
    "other",
    [
        {"host": "node2"},
        {"boot_id": "another"},  # a copy of this machine's image
        {"pid_namespace": "pid:[1]"},  # a container on it
        {"boot_id": None},
        {"pid": None},
        {"open": None},
    ],
)
def test_an_uncertain_process_may_still_append(run: RunDir, dead: dict[str, Any], other: dict[str, Any]) -> None:
    """The machine may only have lost the network, or the last writes are still on their way to the file system."""
    announced_by(run, **{**({} if "open" in other else dead), **other})
    assert not nobody_appends(run)


@pytest.mark.parametrize("content", [None, "", "{", "[]", "{}"])
def test_records_without_an_announcement_may_be_open(run: RunDir, content: str | None) -> None:
    if content is not None:
        run.appender.write_text(content)
    assert not nobody_appends(run)


def test_records_without_a_lease_may_be_open(run: RunDir) -> None:
    withdraw(run)
    assert not nobody_appends(RunDir(run.path))


def test_a_superseded_process_announces_nothing(run: RunDir) -> None:
    withdraw(run)
    before = run.appender.read_bytes()
    (run.lease / "00000009.json").write_text("{}")
    with pytest.raises(SupersededError):
        announce(run)
    assert run.appender.read_bytes() == before


MAKERS: dict[str, Callable[[RunDir], object]] = {
    "announce": announce,
    "withdraw": withdraw,
    "stacks of a hang": lambda run: run.make_dirs(run.hang),
    "events of TensorBoard": lambda run: TensorBoard(run).open(),
    "save": lambda run: Directory(run.checkpoints, Fence(1, guard_of(run).check)).prepare(),
}


def guard_of(run: RunDir) -> files.Guard:
    assert run.guard is not None
    return run.guard


@pytest.mark.parametrize("maker", MAKERS)
def test_waking_process_makes_no_directory_of_a_moved_run(tmp_path: Path, maker: str) -> None:
    """A stray directory there could be taken for a run."""
    with held(tmp_path / "run") as run:
        run.path.rename(tmp_path / "elsewhere")
        with pytest.raises(SupersededError):
            MAKERS[maker](run)
        assert not run.path.exists()


def lines(first: int, last: int) -> bytes:
    return b"".join(b'{"step": %d, "loss": %d}\n' % (step, 2 * step) for step in range(first, last + 1))


def write(run: RunDir, first: int, last: int) -> None:
    """Write the records of an attempt from the checkpoint before step `first`."""
    writers = resume_records(run, first - 1)
    for writer in writers:
        for step in range(first, last + 1):
            writer.write({"step": step, "loss": 2 * step})
        writer.close()
    withdraw(run)


def test_records_truncated_in_place_stay_the_same_file(run: RunDir) -> None:
    """`tail -f` and other tools can continue. A file with a second name stays as it is under that name."""
    write(run, 1, 900)
    inode, size = run.metrics.stat().st_ino, run.metrics.stat().st_size
    write(run, 801, 900)
    assert (run.metrics.stat().st_ino, run.metrics.stat().st_size) == (inode, size)
    files.link(run.metrics, run.path / "backup.jsonl")
    write(run, 11, 20)
    assert run.metrics.stat().st_ino != inode
    assert (run.path / "backup.jsonl").stat().st_size == size


def test_truncation_in_place_survives_a_power_failure(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise lines that were cut off could reappear among the new lines."""
    write(run, 1, 9)
    synced: list[tuple[int, int]] = []

    def note(fd: int) -> None:
        found = os.fstat(fd)
        synced.append((found.st_ino, found.st_size))

    monkeypatch.setattr(files, "fsync_fd", note)
    writers = resume_records(run, 6)
    kept = [(path.stat().st_ino, len(lines(1, 6))) for path in (run.metrics, run.timings)]
    assert set(kept) <= set(synced)
    for writer in writers:
        writer.close()


def test_only_the_end_of_the_records_is_read(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    write(run, 1, 30_000)
    read: list[int] = []
    real = files.read_at

    def read_at(fd: int, size: int, at: int) -> bytes:
        read.append(size)
        return real(fd, size, at)

    monkeypatch.setattr(files, "read_at", read_at)
    monkeypatch.setattr(files, "copy_range", lambda *args: pytest.fail("copied"))
    write(run, 29_901, 30_000)
    assert sum(read) == 2 * files.TAIL_BYTES
    assert run.metrics.stat().st_size > 10 * files.TAIL_BYTES


@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("in_place", [True, False])
def test_killed_anywhere_while_it_truncates(
    tmp_path: Path, in_place: bool, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Send SIGKILL before a change: the next attempt has the lines up to its checkpoint, and each new line once."""
    monkeypatch.setattr(files, "fsync_fd", lambda fd: None)
    killed, at = True, 0
    while killed:
        path = tmp_path / str(at)
        path.mkdir()
        with held(path) as run:
            write(run, 1, 9)
            if not in_place:
                announced_by(run, host="node2")
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            with held(path) as run, faults.intercepted(faults.killed(at)):
                write(run, 7, 12)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        killed = status == -signal.SIGKILL
        assert killed or status == 0
        with held(path) as run:
            write(run, 5, 12)
        assert run.metrics.read_bytes() == run.timings.read_bytes() == lines(1, 12)
        at += stride
    assert at > 12


@pytest.fixture
def quick() -> Iterator[None]:
    with tiny_attempts():
        yield


@pytest.mark.usefixtures("quick")
def test_end_of_another_command_does_not_touch_the_attempt(tmp_path: Path) -> None:
    """Moving a run acquires its lease as well. An attempt frozen before that still has the records open."""
    assert attempt(tmp_path) == ExitStatus.FINISHED
    with held(tmp_path) as run:
        frozen, _ = resume_records(run, STEPS)
    with held(tmp_path):
        pass
    with training_to(2 * STEPS):
        assert attempt(tmp_path, restart_count=1) == ExitStatus.FINISHED
    before = contents(tmp_path)
    frozen.write({"step": STEPS + 1, "loss": 9.0})
    assert contents(tmp_path) == before
    assert [json.loads(line)["step"] for line in before["metrics.jsonl"].splitlines()] == list(range(1, 2 * STEPS + 1))

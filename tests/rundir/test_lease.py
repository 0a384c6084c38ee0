"""The lease: a live holder keeps it, a dead one is replaced at once, a frozen one is fenced off."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from runner.errors import LockedError, SupersededError, UserError
from runner.rundir.lease import Heart, Lease, LeaseWatcher, heartbeat_file, liveness, read_carried, read_holder
from runner.rundir.paths import RunDir
from runner.system import clock, files
from runner.system.processes import state_of, this_process

HOLD = """
import sys, time
from pathlib import Path
from runner.rundir.lease import Lease
lease = Lease.acquire(Path(sys.argv[1]), {}, float(sys.argv[2]))
print(lease.fence, flush=True)
time.sleep(600)
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "run" / "lease"


@pytest.fixture
def other(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Start another process that holds the lease."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory), "0.6"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "1\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


class FakeTime:
    """A fake clock. Each sleep passes at once, after a call of `during_sleep`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.during_sleep: Callable[[], object] = lambda: None

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.during_sleep()


@pytest.fixture
def fake_time(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    made = FakeTime()
    monkeypatch.setattr(clock, "monotonic", lambda: made.now)
    monkeypatch.setattr(clock, "sleep", made.sleep)
    return made


def held_by(directory: Path, fence: int = 4, **holder: Any) -> None:
    """Write the lease file of another process."""
    directory.mkdir(parents=True)
    described = {**this_process(), "host": "elsewhere", "interval_s": 0.05, **holder}
    (directory / f"{fence:08d}.json").write_text(json.dumps(described))


def test_numbers_increase_and_a_released_lease_is_free_at_once(directory: Path) -> None:
    for fence in (1, 2, 3):
        with Lease.acquire(directory, {}, 60.0) as lease:
            assert lease.fence == fence
            lease.check_fence()
        lease.release()
    left = {path.name for path in directory.iterdir()}
    # Released at once, it may not have beaten yet.
    assert {"00000003.json"} <= left <= {"00000003.json", "00000003.beat"}


def test_a_process_knows_its_boot() -> None:
    """Cloned machines share everything else that distinguishes a local holder from a remote one."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    assert this_process()["boot_id"] == (boot.read_text().strip() if boot.exists() else None)


def test_a_live_holder_keeps_the_lease_and_is_named(directory: Path, other: subprocess.Popen[str]) -> None:
    with pytest.raises(LockedError, match=rf"in use by process {other.pid} on ") as caught:
        Lease.acquire(directory, {}, 0.6)
    assert "\n" not in str(caught.value)
    assert other.poll() is None


def test_a_newcomer_can_wait_for_a_live_holder(directory: Path, other: subprocess.Popen[str]) -> None:
    messages: list[str] = []

    def kill(text: str) -> None:
        messages.append(text)
        other.kill()

    with Lease.acquire(directory, {}, 0.6, wait_s=600.0, report=kill) as lease:
        assert lease.fence == 2
    assert f"in use by process {other.pid}" in messages[0]
    assert "waiting up to 600 s" in messages[0]


@pytest.mark.parametrize(("wait_s", "stop"), [(0.0, False), (600.0, True)])
def test_the_wait_for_a_live_holder_ends(
    directory: Path, other: subprocess.Popen[str], wait_s: float, stop: bool
) -> None:
    with pytest.raises(LockedError, match=rf"in use by process {other.pid} on "):
        Lease.acquire(directory, {}, 0.6, wait_s=wait_s, asked_to_stop=lambda: stop)


def test_a_process_cannot_acquire_the_lease_twice(directory: Path) -> None:
    with Lease.acquire(directory, {}, 0.3), pytest.raises(LockedError):
        Lease.acquire(directory, {}, 0.3)


def test_a_killed_holder_is_replaced_at_once(directory: Path, other: subprocess.Popen[str]) -> None:
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # not reaped: a zombie is dead too
    with Lease.acquire(directory, {}, 3600.0) as lease:
        assert lease.fence == 2


def test_frozen_holder_is_replaced_and_fenced_off(directory: Path, other: subprocess.Popen[str]) -> None:
    other.send_signal(signal.SIGSTOP)
    while (state := state_of(other.pid)) and state[0] != "T":
        time.sleep(0.01)
    messages: list[str] = []
    with Lease.acquire(directory, {}, 0.6, report=messages.append) as lease:
        assert lease.fence == 2
        assert len(messages) == 1
        assert "waiting up to" in messages[0]
        other.send_signal(signal.SIGCONT)
        while psutil.Process(other.pid).num_threads() > 1:  # its next heartbeat finds that it is superseded
            time.sleep(0.01)
        lease.check_fence()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENFILE])
def test_unreadable_sign_is_no_sign_that_a_holder_is_gone(
    directory: Path, fake_time: FakeTime, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Cover the heartbeat of a holder on another host, and the state of a process of this machine."""
    held_by(directory, host="elsewhere" if code == errno.EIO else this_process()["host"], pid=1, start_time="5")
    unreadable = directory / "00000004.beat" if code == errno.EIO else Path("/proc/1/stat")
    read = files.read_regular

    def refuse(path: str | Path, **options: Any) -> bytes:
        if Path(path) == unreadable:
            raise OSError(code, os.strerror(code), str(path))
        return read(path, **options)

    monkeypatch.setattr(files, "read_regular", refuse)
    with pytest.raises(UserError, match=os.strerror(code)):
        Lease.acquire(directory, {}, 30.0)


def test_the_older_holder_finds_that_it_is_superseded(directory: Path) -> None:
    older = Lease.acquire(directory, {"job_id": "9", "restart_count": 0}, 60.0)
    newer = Lease.acquire(directory, {"job_id": "9", "restart_count": 1}, 60.0)
    with pytest.raises(
        SupersededError, match=r"held by process \d+ on .*, job 9 \(number 2\); this process was number 1"
    ):
        older.check_fence()
    older.release()
    newer.check_fence()
    newer.release()


def test_removing_the_lease_stops_its_holder(directory: Path) -> None:
    lease = Lease.acquire(directory, {}, 60.0)
    for path in directory.iterdir():
        path.unlink()
    with pytest.raises(SupersededError, match="nobody"):
        lease.check_fence()
    lease.release()


@pytest.mark.parametrize("jump_s", [0.0, 100.0])
def test_delayed_newcomer_spares_a_live_holder(directory: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float) -> None:
    """A newcomer that was stopped while it waited finds its timeout over, although the holder is alive."""
    held_by(directory, host=this_process()["host"])
    now = 0.0

    def monotonic() -> float:
        nonlocal now
        now += jump_s
        return now

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(clock, "monotonic", monotonic)
    monkeypatch.setattr(clock, "sleep", sleep)
    with pytest.raises(LockedError):
        Lease.acquire(directory, {}, 30.0)


def test_a_heartbeat_during_a_delay_of_the_newcomer_counts(directory: Path, fake_time: FakeTime) -> None:
    held_by(directory)

    def delayed_beat() -> None:
        (directory / "00000004.beat").write_text("1")
        fake_time.now += 100.0

    fake_time.during_sleep = delayed_beat
    with pytest.raises(LockedError):
        Lease.acquire(directory, {}, 30.0)


def test_a_holder_on_another_host_is_watched_until_its_heartbeat(directory: Path, fake_time: FakeTime) -> None:
    held_by(directory, job_id="5")
    fake_time.during_sleep = lambda: (directory / "00000004.beat").write_text(str(fake_time.now))
    with pytest.raises(LockedError, match="on elsewhere, job 5"):
        Lease.acquire(directory, {}, 30.0)


def test_silent_holder_elsewhere_is_replaced_after_the_timeout(directory: Path, fake_time: FakeTime) -> None:
    """Measure it by the newcomer's clock."""
    held_by(directory)
    with Lease.acquire(directory, {}, 30.0) as lease:
        assert lease.fence == 5
    assert 30.0 <= fake_time.now < 31.0


@pytest.mark.parametrize("content", ['{"pid": 1', "[]", '{"pid": "x"}', '{"pid": 1, "restart_count": "x"}'])
def test_holder_with_an_incomplete_file_is_replaced(directory: Path, fake_time: FakeTime, content: str) -> None:
    directory.mkdir(parents=True)
    (directory / "00000007.json").write_text(content)
    with Lease.acquire(directory, {}, 5.0) as lease:
        assert lease.fence == 8
    assert fake_time.now >= 5.0


OWN: dict[str, Any] = {
    "host": "a", "pid": 1, "boot_id": "b", "machine_id": "m", "pid_namespace": "n", "job_id": "7", "restart_count": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("holder", "verdict"),
    [
        ({"released": True}, "gone"),
        ({"restart_count": 1, "host": "z"}, "gone"),
        ({"restart_count": None, "host": "z"}, "gone"),
        ({"restart_count": 2, "host": "z"}, "unknown"),
        ({"restart_count": 3, "host": "z"}, "unknown"),
        ({"job_id": "8", "restart_count": 0, "host": "z"}, "unknown"),
        ({"submission": "s", "restart_count": 1, "host": "z"}, "unknown"),  # an earlier job with the same id
        ({"job_id": None, "host": "z"}, "unknown"),
        ({"job_id": None, "pid_namespace": "other"}, "unknown"),
        ({"job_id": None, "boot_id": "other"}, "unknown"),  # restarted, or a clone of the same image
        ({"job_id": None, "pid": 2**22 + 1}, "gone"),
        ({"job_id": None, "pid": os.getpid(), "start_time": "0"}, "gone"),
    ],
)
def test_liveness_without_waiting(holder: dict[str, Any], verdict: str) -> None:
    assert liveness({**OWN, "start_time": "5", **holder}, OWN) == verdict


@pytest.mark.parametrize("released", [False, True])
def test_earlier_start_never_takes_a_later_ones_lease(directory: Path, fake_time: FakeTime, released: bool) -> None:
    """The earlier start wakes on a node that was cut off, after Slurm has started the job on another one."""
    held_by(directory, job_id="7", submission="s", restart_count=2, released=released)
    said = r"continued by a later start of job 7 \(restart 2\): this one \(restart 1\) ends, and requeues nothing"
    with pytest.raises(SupersededError, match=said):
        Lease.acquire(directory, {"job_id": "7", "submission": "s", "restart_count": 1}, 5.0)
    assert read_holder(directory) == (4, json.loads((directory / "00000004.json").read_text()))
    for other in ({"job_id": "7", "submission": "t"}, {"job_id": "7"}, {"job_id": "8", "submission": "s"}):
        shutil.rmtree(directory)
        held_by(directory, job_id="7", submission="s", restart_count=2, released=released)
        with Lease.acquire(directory, {**other, "restart_count": 1}, 5.0) as lease:
            assert lease.fence == 5


def test_a_running_process_of_this_machine_is_alive() -> None:
    assert liveness(this_process(), {**this_process(), "pid": 1}) == "alive"


@pytest.mark.slow
def test_only_a_single_newcomer_wins(directory: Path) -> None:
    """Let ten processes race for a lease whose holder is dead."""
    held_by(directory, host=this_process()["host"], pid=2**22 + 1)
    command = [sys.executable, "-c", HOLD, str(directory), "30"]
    racers = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=Path(__file__).parents[2]
        )
        for _ in range(10)
    ]
    try:
        won = [
            racer.stdout.readline() for racer in racers if racer.stdout
        ]  # the winner keeps the lease, the others exit
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate()
    assert sorted(won) == [""] * 9 + ["5\n"]


def test_the_holder_can_be_read(directory: Path) -> None:
    assert read_holder(directory) is None
    with Lease.acquire(directory, {"job_id": "3"}, 60.0):
        found = read_holder(directory)
        assert found is not None
        assert (found[0], found[1]["job_id"], found[1]["pid"]) == (1, "3", os.getpid())


def test_a_directory_that_cannot_be_written_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be used for the lease") as caught:
        Lease.acquire(tmp_path / "file" / "lease", {}, 1.0)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="timeout"):
        Lease.acquire(tmp_path / "lease", {}, 0.0)


def test_a_full_disk_leaves_no_incomplete_lease_behind(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An incomplete file would look like a holder of unknown state, and others would wait for it."""

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "write_fd", full)
    with pytest.raises(UserError, match="No space left"):
        Lease.acquire(directory, {}, 1.0)
    assert list(directory.iterdir()) == []


def test_a_lease_released_on_a_full_disk_is_free_at_once(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk has no room for a new file. A holder that lives on would block all processes, including itself."""

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    lease = Lease.acquire(directory, {}, 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_fd", full)
        lease.release()
        with pytest.raises(UserError, match=r"No space left on device\); free some space there"):
            Lease.acquire(directory, {}, 1.0)
    with Lease.acquire(directory, {}, 1.0) as again:
        assert again.fence == lease.fence + 1


def test_unreleased_lease_is_free_once_the_disk_works(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that evaluates one checkpoint after another would wait for its earlier lease forever."""

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    lease = Lease.acquire(directory, {}, 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_fd", broken)
        patch.setattr(files, "write_at", broken)
        lease.release()
        with pytest.raises(LockedError):
            Lease.acquire(directory, {}, 1.0)
    with Lease.acquire(directory, {}, 1.0, wait_s=60.0) as again:
        assert again.fence == lease.fence + 1


def test_a_late_heartbeat_of_a_superseded_holder_leaves_nothing(directory: Path) -> None:
    """Stop it after it has opened its heartbeat file, which its successor has already swept."""
    held_by(directory, fence=2)
    older = Lease(directory, 1, {**this_process(), "interval_s": 0.05}, threading.Event())
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    older._beat()
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before


def test_process_stopped_with_a_used_number_is_superseded(directory: Path) -> None:
    """Another process created and swept the file of its number before it creates the file."""
    held_by(directory, fence=5)
    late = Lease(directory, 4, this_process(), threading.Event())
    with pytest.raises(SupersededError, match="number 5"):
        late._claim()
    assert [path.name for path in directory.iterdir()] == ["00000005.json"]


def test_temporary_files_of_a_killed_holder_are_swept(directory: Path) -> None:
    Lease.acquire(directory, {}, 60.0).release()
    temporary = [directory.parent / "metrics.jsonl.tmp-lease-00000001-7-7", directory / "1.tmp-lease-00000001-7-7"]
    others = directory.parent / "config.yaml.tmp-submission-00000001-7-7"
    for path in (*temporary, others):
        path.touch()
    with Lease.acquire(directory, {}, 60.0):
        assert not any(path.exists() for path in temporary)
        assert others.exists()


def test_old_holders_file_is_gone_before_its_writes_are_sought(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system may show an old list of numbers; later writes of the old holder are not found."""
    older = Lease.acquire(directory, {}, 60.0)
    older.release()
    sweep, swept = files.sweep, []

    def observed(folder: Path, lease: str, below: int) -> None:
        assert not (directory / f"{older.fence:08d}.json").exists()
        swept.append(folder)
        sweep(folder, lease, below)

    monkeypatch.setattr(files, "sweep", observed)
    Lease.acquire(directory, {}, 60.0).release()
    assert swept == [directory, directory.parent]


def test_submission_removes_an_earlier_ones_leftovers(directory: Path) -> None:
    """A stopped submission could replace records of an attempt (see `runner.rundir.appender`)."""
    submission = RunDir(directory.parent).submission
    Lease.acquire(submission).release()  # there is no such directory yet
    directory.mkdir()
    left, others = (directory / f"appender.json.tmp-{lease}-00000001-7-7" for lease in ("submission", "lease"))
    left.touch()
    others.touch()
    Lease.acquire(submission).release()
    assert not left.exists()
    assert others.exists()


@pytest.mark.parametrize("leftover", ["metrics.jsonl.tmp-lease-00000001-7-7", "00000001.json"])
def test_unsweepable_leftover_blocks_the_lease(leftover: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file might belong to a process that wakes up and renames it, or takes its number for the highest.

    The latter can happen where a network file system shows an old list of the numbers.
    """
    Lease.acquire(directory, {}, 60.0).release()
    (directory.parent / "metrics.jsonl.tmp-lease-00000001-7-7").touch()
    remove = files.remove

    def refused(path: Path) -> None:
        if path.name == leftover:
            raise OSError(errno.EIO, "Input/output error")
        remove(path)

    with monkeypatch.context() as patch:
        patch.setattr(files, "remove", refused)
        with pytest.raises(UserError, match="Input/output error"):
            Lease.acquire(directory, {}, 60.0)
    Lease.acquire(directory, {}, 60.0).release()  # at once


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_heartbeats_payload_outlives_its_holder(directory: Path) -> None:
    """Commands may hold the lease briefly between a killed attempt and the next, which closes its record."""
    lease = Lease.acquire(directory, {}, 60.0)
    for value in ("long" * 100, "short"):  # written over the longer one
        lease.carried = lambda value=value: {"left": value}  # type: ignore[misc]
        wait_for(lambda value=value: read_carried(directory) == {"left": value})  # type: ignore[misc]
    lease._stop.set()  # killed: it is never released
    (directory / "00000001.json").write_text(json.dumps({**lease.holder, "released": True}))
    for _ in range(3):
        with Lease.acquire(directory, {}, 60.0) as passing:
            assert passing.carried() == {"left": "short"}
            wait_for((directory / f"{passing.fence:08d}.beat").exists)
    assert read_carried(directory) == {"left": "short"}


@pytest.mark.parametrize("text", ["", "7", "00000000000000000007 [1]", '7 {"a": 1', "7 \x00\xff", "7 " + "[" * 100_000])
def test_unreadable_heartbeat_carries_nothing(directory: Path, text: str) -> None:
    held_by(directory, released=True)
    (directory / "00000004.beat").write_text(text)
    with Lease.acquire(directory, {}, 60.0) as lease:
        assert lease.carried() == {}


@pytest.mark.parametrize("age_s", [5.0, 60.0, 500.0, 1e6])
def test_knowledge_of_a_killed_holder_is_half_a_percent_old(directory: Path, age_s: float) -> None:
    """The attempt's duration is known that exactly, and an old process writes no more often than needed."""
    with Lease.acquire(directory, {}, 60.0) as lease:
        pause = lease._pause_s(age_s)
    assert pause <= min(0.005 * age_s, 2.0)
    assert pause >= 0.02
    assert (pause == 2.0) == (age_s >= 500)


def test_a_thread_beats_for_many_leases_with_few_open_files(tmp_path: Path) -> None:
    """A submitting sweep holds a lease for each run, which may be more than the allowed open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    threads = threading.active_count()

    def beats(lease: Lease) -> str:
        return heartbeat_file(lease.directory, lease.fence).read_text()

    with Heart() as heart, ExitStack() as held:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
        try:
            leases = [
                held.enter_context(Lease.acquire(tmp_path / f"run{number}" / "submission", {}, 0.6, heart=heart))
                for number in range(60)
            ]
            first = [beats(lease) for lease in leases]
            assert threading.active_count() == threads + 1
            while any(beats(lease) == before for lease, before in zip(leases, first, strict=True)):
                time.sleep(0.02)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        leases[0].release()
        last, other = beats(leases[0]), beats(leases[1])
        while beats(leases[1]) == other:
            time.sleep(0.02)
        assert beats(leases[0]) == last
    assert threading.active_count() == threads
    assert all(read_holder(lease.directory)[1]["released"] for lease in leases)  # type: ignore[index]


def test_a_heartbeat_that_the_disk_refuses_is_made_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Heart() as heart, monkeypatch.context() as patch:

        def refuse(*_: object) -> None:
            raise OSError(errno.EIO, "Input/output error")

        patch.setattr(files, "overwrite", refuse)
        lease = Lease.acquire(tmp_path / "lease", {}, 0.6, heart=heart)
        time.sleep(0.05)
        assert heartbeat_file(lease.directory, lease.fence).read_text() == ""
        patch.undo()
        deadline = time.monotonic() + 60
        while not heartbeat_file(lease.directory, lease.fence).read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_a_lease_that_was_taken_over_does_not_beat_any_more(tmp_path: Path) -> None:
    with Heart() as heart:
        older = Lease.acquire(tmp_path / "lease", {}, 0.6, heart=heart)
        (tmp_path / "lease" / "00000009.json").write_text("{}")
        while heartbeat_file(older.directory, older.fence).exists():
            time.sleep(0.02)
        with pytest.raises(SupersededError):
            older.check_fence()


def test_a_command_that_only_looks_sees_whether_a_holder_lives(tmp_path: Path) -> None:
    """A local process is judged at once. A lease that was released, or never acquired, has no holder."""
    watcher = LeaseWatcher()
    assert not watcher.is_alive(tmp_path / "lease")
    with Lease.acquire(tmp_path / "lease", {"job_id": "7", "restart_count": 0}):
        assert watcher.is_alive(tmp_path / "lease")
    assert not watcher.is_alive(tmp_path / "lease")


def test_lease_numbers_continue_after_eight_nines(tmp_path: Path) -> None:
    """A process that can write there must not be able to stop a run for good by a high number."""
    (tmp_path / "99999999.beat").write_text('1 {"carried": true}')
    for name in ("99999999.json", "9" * 19 + ".json", "\u00b2.json"):
        (tmp_path / name).write_text("{}")
    for number in (10**8, 10**8 + 1):
        with Lease.acquire(tmp_path, timeout_s=0.1) as lease:
            assert lease.fence == number
            lease.check_fence()
            wait_for(heartbeat_file(tmp_path, number).exists)
        assert read_carried(tmp_path) == {"carried": True}
    assert not (tmp_path / "99999999.json").exists()

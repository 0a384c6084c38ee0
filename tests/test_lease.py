"""One holder of a run directory: the living is left alone, the dead is succeeded at once, the frozen is fenced off."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from runner.errors import LockedError, SupersededError, UserError
from runner.lease import Lease, current, judge, process_state, this_process

HOLD = """
import sys, time
from pathlib import Path
from runner.lease import Lease
lease = Lease.acquire(Path(sys.argv[1]), {}, float(sys.argv[2]))
print(lease.fence, flush=True)
time.sleep(600)
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "run" / "lease"


@pytest.fixture
def other(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the directory."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory), "0.6"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "1\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def held_by(directory: Path, fence: int = 4, **holder: Any) -> None:
    """A lease file of some other process."""
    directory.mkdir(parents=True)
    whole = {**this_process(), "host": "elsewhere", "interval_s": 0.05, **holder}
    (directory / f"{fence:08d}.json").write_text(json.dumps(whole))


def test_numbers_rise_and_a_released_one_is_succeeded_at_once(directory: Path) -> None:
    for fence in (1, 2, 3):
        with Lease.acquire(directory, {}, 60.0) as lease:
            assert lease.fence == fence
            lease.check()
        lease.release()
    assert sorted(path.name for path in directory.iterdir()) == ["00000003.beat", "00000003.json"]


def test_a_living_holder_is_left_alone_and_named(directory: Path, other: subprocess.Popen[str]) -> None:
    with pytest.raises(LockedError, match=rf"in use by process {other.pid} on ") as caught:
        Lease.acquire(directory, {}, 0.6)
    assert "\n" not in str(caught.value)
    assert other.poll() is None


def test_a_living_holder_may_be_waited_for(directory: Path, other: subprocess.Popen[str]) -> None:
    told: list[str] = []

    def leave(text: str) -> None:
        told.append(text)
        other.kill()

    with Lease.await_turn(directory, {}, 0.6, 600.0, asked_to_stop=bool, report=leave) as lease:
        assert lease.fence == 2
    assert f"in use by process {other.pid}" in told[0]
    assert "waiting up to 600 s" in told[0]


@pytest.mark.parametrize(("wait_s", "stop"), [(0.0, False), (600.0, True)])
def test_the_wait_for_a_living_holder_ends(
    directory: Path, other: subprocess.Popen[str], wait_s: float, stop: bool
) -> None:
    with pytest.raises(LockedError, match=rf"in use by process {other.pid} on "):
        Lease.await_turn(directory, {}, 0.6, wait_s, asked_to_stop=lambda: stop)


def test_the_same_process_cannot_take_it_twice(directory: Path) -> None:
    with Lease.acquire(directory, {}, 0.3), pytest.raises(LockedError):
        Lease.acquire(directory, {}, 0.3)


def test_a_killed_holder_is_succeeded_at_once(directory: Path, other: subprocess.Popen[str]) -> None:
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # not reaped: a zombie is dead too
    with Lease.acquire(directory, {}, 3600.0) as lease:
        assert lease.fence == 2


def test_a_frozen_holder_is_succeeded_after_the_timeout_and_fenced_off(
    directory: Path, other: subprocess.Popen[str]
) -> None:
    other.send_signal(signal.SIGSTOP)
    while (state := process_state(other.pid)) and state[0] != "T":
        time.sleep(0.01)
    told: list[str] = []
    with Lease.acquire(directory, {}, 0.6, report=told.append) as lease:
        assert lease.fence == 2
        assert len(told) == 1
        assert "waiting up to" in told[0]
        other.send_signal(signal.SIGCONT)
        while psutil.Process(other.pid).num_threads() > 1:  # it would beat again, and finds that it is succeeded
            time.sleep(0.01)
        lease.check()


def test_the_older_one_hears_that_it_was_succeeded(directory: Path) -> None:
    older = Lease.acquire(directory, {"job_id": "9", "restart_count": 0}, 60.0)
    newer = Lease.acquire(directory, {"job_id": "9", "restart_count": 1}, 60.0)
    with pytest.raises(
        SupersededError, match=r"held by process \d+ on .*, job 9 \(number 2\); this process was number 1"
    ):
        older.check()
    older.release()
    newer.check()
    newer.release()


def test_a_removed_lock_stops_its_holder(directory: Path) -> None:
    lease = Lease.acquire(directory, {}, 60.0)
    for path in directory.iterdir():
        path.unlink()
    with pytest.raises(SupersededError, match="nobody"):
        lease.check()
    lease.release()


@pytest.mark.parametrize("jump_s", [0.0, 100.0])
def test_a_living_holder_is_left_alone_by_a_newcomer_that_was_held_up(directory: Path, jump_s: float) -> None:
    """Stopped or starved while it waits, the newcomer finds its patience over: the holder lives nevertheless."""
    held_by(directory, host=this_process()["host"])
    now = [0.0]

    def clock() -> float:
        now[0] += jump_s
        return now[0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    with pytest.raises(LockedError):
        Lease.acquire(directory, {}, 30.0, clock=clock, sleep=sleep)


def test_a_beat_that_comes_while_a_newcomer_is_held_up_counts(directory: Path) -> None:
    held_by(directory)
    now = [0.0]

    def sleep(seconds: float) -> None:
        (directory / "00000004.beat").write_text("1")
        now[0] += 100.0

    with pytest.raises(LockedError):
        Lease.acquire(directory, {}, 30.0, clock=lambda: now[0], sleep=sleep)


def test_another_host_is_watched_until_it_beats(directory: Path) -> None:
    held_by(directory, job_id="5")
    beats = iter(range(100))

    def sleep(seconds: float) -> None:
        (directory / "00000004.beat").write_text(str(next(beats)))

    with pytest.raises(LockedError, match="on elsewhere, job 5"):
        Lease.acquire(directory, {}, 30.0, sleep=sleep)


def test_another_host_that_does_not_beat_is_succeeded_by_the_watchers_own_clock(directory: Path) -> None:
    held_by(directory)
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    with Lease.acquire(directory, {}, 30.0, clock=lambda: now[0], sleep=sleep) as lease:
        assert lease.fence == 5
    assert 30.0 <= now[0] < 31.0


def test_a_file_that_was_cut_short_is_waited_for_and_succeeded(directory: Path) -> None:
    directory.mkdir(parents=True)
    (directory / "00000007.json").write_text('{"pid": 1')
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    with Lease.acquire(directory, {}, 5.0, clock=lambda: now[0], sleep=sleep) as lease:
        assert lease.fence == 8
    assert now[0] >= 5.0


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
        ({"job_id": None, "host": "z"}, "unknown"),
        ({"job_id": None, "pid_namespace": "other"}, "unknown"),
        ({"job_id": None, "boot_id": "old"}, "gone"),
        ({"job_id": None, "boot_id": "old", "machine_id": "twin"}, "unknown"),
        ({"job_id": None, "pid": 2**22 + 1}, "gone"),
        ({"job_id": None, "pid": os.getpid(), "start_time": "0"}, "gone"),
    ],
)
def test_what_can_be_said_without_waiting(holder: dict[str, Any], verdict: str) -> None:
    assert judge({**OWN, "start_time": "5", **holder}, OWN) == verdict


def test_a_process_that_runs_here_is_alive() -> None:
    assert judge(this_process(), {**this_process(), "pid": 1}) == "alive"


@pytest.mark.slow
def test_of_many_newcomers_one_wins(directory: Path) -> None:
    """Ten processes race for a directory whose holder is dead."""
    held_by(directory, host=this_process()["host"], pid=2**22 + 1)
    command = [sys.executable, "-c", HOLD, str(directory), "30"]
    racers = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=Path(__file__).parents[1]
        )
        for _ in range(10)
    ]
    try:
        won = [racer.stdout.readline() for racer in racers if racer.stdout]  # the winner holds on, the others end
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate()
    assert sorted(won) == [""] * 9 + ["5\n"]


def test_who_holds_it_can_be_asked(directory: Path) -> None:
    assert current(directory) is None
    with Lease.acquire(directory, {"job_id": "3"}, 60.0):
        found = current(directory)
        assert found is not None
        assert (found[0], found[1]["job_id"], found[1]["pid"]) == (1, "3", os.getpid())


def test_a_directory_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be used as the lock") as caught:
        Lease.acquire(tmp_path / "file" / "lease", {}, 1.0)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="timeout"):
        Lease.acquire(tmp_path / "lease", {}, 0.0)


def test_a_lease_that_a_full_disk_cut_short_is_not_left_behind(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be a holder of whom nobody knows anything, and be waited for."""

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("runner.lease.os.write", full)
    with pytest.raises(UserError, match="No space left"):
        Lease.acquire(directory, {}, 1.0)
    assert list(directory.iterdir()) == []

"""One holder of a run directory at a time, and a number that tells the holders apart.

Each incarnation of a run takes the next number by creating the file of that number exclusively; the
highest number is the holder. A heartbeat shows that it is alive. A newcomer takes over at once when the
holder is known to be gone, waits for a heartbeat when it cannot know, and is refused when the holder
lives. An older incarnation that wakes up finds a higher number and must stop writing: see `Lease.check`.

Clocks of different machines are never compared: a watcher looks whether the beat *changes*.
Nothing here imports torch, numpy or hydra.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.errors import LockedError, SupersededError, UserError
from runner.files import fsync_dir, read_json, write_json

DYING_S = 1.0
"""A process that was just killed may need this long to be gone."""
TURN_POLL_S = 0.2
"""Pause between two looks at a holder that lives."""

_NUMBERED = re.compile(r"(\d{8})\.json")


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _link(path: str) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None


def process_state(pid: int) -> tuple[str, str] | None:
    """(state letter, start time) of a process of this machine, or None if there is none.

    From /proc/<pid>/stat, fields 3 and 22 (proc(5)); the name in between may hold anything, so the
    fields are counted from its closing bracket.
    """
    stat = _read(f"/proc/{pid}/stat")
    if stat is None:
        return None
    fields = stat.rpartition(")")[2].split()
    return fields[0], fields[19]


def this_process() -> dict[str, Any]:
    """What tells this process from any other, on this machine and elsewhere."""
    state = process_state(os.getpid())
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "start_time": state[1] if state else None,
        "boot_id": _read("/proc/sys/kernel/random/boot_id"),
        "machine_id": _read("/etc/machine-id"),
        "pid_namespace": _link("/proc/self/ns/pid"),
    }


def judge(holder: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """`gone`, `alive` or `unknown`: what newcomer `own` can say of `holder` without waiting.

    Gone: released; the same job with a lower restart count; this machine, and the process is dead or
    was before the last boot. Unknown (the heartbeat decides): another machine, or stopped here.
    """
    if holder.get("released"):
        return "gone"
    job, restarts = holder.get("job_id"), holder.get("restart_count")
    if job is not None and job == own.get("job_id") and (restarts or 0) < (own.get("restart_count") or 0):
        return "gone"
    same_host = holder.get("host") == own.get("host")
    if not same_host or holder.get("pid_namespace") != own.get("pid_namespace"):
        return "unknown"
    if holder.get("boot_id") != own.get("boot_id"):
        same_machine = own.get("machine_id") and holder.get("machine_id") == own.get("machine_id")
        return "gone" if same_machine else "unknown"
    process = process_state(int(holder["pid"]))
    if process is None or process[1] != holder.get("start_time") or process[0] in "ZXx":
        return "gone"
    return "unknown" if process[0] in "Tt" else "alive"


def name_of(holder: Mapping[str, Any]) -> str:
    """`process 12 on node3, job 99`, for messages."""
    job = f", job {holder['job_id']}" if holder.get("job_id") else ""
    return f"process {holder.get('pid', '?')} on {holder.get('host', 'an unknown host')}{job}"


def current(directory: Path) -> tuple[int, dict[str, Any]] | None:
    """(fence, holder) of the highest number, or None; a holder that is being written is {}."""
    fence = _highest(directory)
    if fence == 0:
        return None
    holder = read_json(directory / f"{fence:08d}.json")
    return fence, holder if isinstance(holder, dict) else {}


def _highest(directory: Path) -> int:
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return 0
    return max((int(match[1]) for name in names if (match := _NUMBERED.fullmatch(name))), default=0)


@dataclass
class Lease:
    """A held run directory. Make one with `Lease.acquire`."""

    directory: Path
    fence: int
    holder: dict[str, Any]
    interval_s: float
    _stop: threading.Event
    _thread: threading.Thread | None = None

    @classmethod
    def acquire(
        cls,
        directory: Path,
        holder: Mapping[str, Any] | None = None,
        timeout_s: float = 60.0,
        *,
        report: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> Lease:
        """Take the directory, or say who has it.

        Args:
            directory: where the numbers are kept; made if missing.
            holder: what to say of this process besides host, pid and the like, which are filled in:
                `job_id` and `restart_count` decide between incarnations of one job.
            timeout_s: how long a holder that cannot be judged may go without a heartbeat.
            report: told, once, that there is something to wait for.

        Raises:
            LockedError: the holder is alive.
            UserError: the directory cannot be written.
        """
        if not timeout_s > 0:
            raise UserError(f"lease timeout of {timeout_s} s: give more than 0")
        own = {**this_process(), **(holder or {})}
        own["interval_s"] = max(min(timeout_s / 6, 5.0), 0.05)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            while True:
                found = current(directory)
                if found is not None:
                    _wait_until_free(directory, found, own, timeout_s, report, clock, sleep)
                fence = (found[0] if found else 0) + 1
                if _create(directory, fence, own):
                    break
        except OSError as error:
            raise UserError(
                f"{directory} cannot be used as the lock of the run ({error.strerror or error}); "
                "make the run directory writable or choose another with run.dir"
            ) from error
        lease = cls(directory, fence, own, own["interval_s"], threading.Event())
        lease._sweep()
        lease._thread = threading.Thread(target=lease._beat, name="lease", daemon=True)
        lease._thread.start()
        return lease

    @classmethod
    def await_turn(
        cls,
        directory: Path,
        holder: Mapping[str, Any] | None,
        timeout_s: float,
        wait_s: float,
        *,
        asked_to_stop: Callable[[], object],
        report: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> Lease:
        """`acquire`, but a holder that lives is given `wait_s` seconds to leave.

        Raises:
            LockedError: it lives on, or this process was asked to stop meanwhile.
            UserError: the directory cannot be written.
        """
        deadline, told = clock() + wait_s, False
        while True:
            try:
                return cls.acquire(directory, holder, timeout_s, report=report, clock=clock, sleep=sleep)
            except LockedError as error:
                if asked_to_stop() or clock() >= deadline:
                    raise
                if report is not None and not told:
                    report(f"{str(error).partition(';')[0]}: waiting up to {wait_s:.0f} s for it")
                    told = True
            sleep(TURN_POLL_S)

    def check(self) -> None:
        """Call before every commit.

        Raises:
            SupersededError: a newer incarnation holds the directory, or this number is gone.
        """
        found = current(self.directory)
        if found is not None and found[0] == self.fence and self._is_mine(found[1]):
            return
        who = f"{name_of(found[1])} (number {found[0]})" if found else "nobody: the lock was removed"
        raise SupersededError(
            f"{self.directory.parent} is now held by {who}; this process was number {self.fence} "
            "and stops without writing"
        )

    def release(self) -> None:
        """Let the next one in at once. Harmless when superseded or called twice."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5)
        with contextlib.suppress(OSError, SupersededError):
            self.check()
            write_json(self._file("json"), {**self.holder, "released": True})

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def _is_mine(self, holder: Mapping[str, Any]) -> bool:
        return all(holder.get(key) == self.holder[key] for key in ("host", "pid", "start_time", "boot_id"))

    def _file(self, suffix: str) -> Path:
        return self.directory / f"{self.fence:08d}.{suffix}"

    def _sweep(self) -> None:
        """Remove the files of lower numbers; only the highest counts."""
        for name in os.listdir(self.directory):
            head, _, rest = name.partition(".")
            if head.isdigit() and int(head) < self.fence and rest in ("json", "beat"):
                with contextlib.suppress(OSError):
                    os.unlink(self.directory / name)

    def _beat(self) -> None:
        """Rewrite a counter in place, so that a full disk does not stop it."""
        count = 0
        while not self._stop.wait(self.interval_s if count else 0):
            count += 1
            with contextlib.suppress(OSError):
                if _highest(self.directory) > self.fence:
                    return  # superseded: what its successor swept is not made again
                fd = os.open(self._file("beat"), os.O_WRONLY | os.O_CREAT, 0o644)
                try:
                    os.write(fd, b"%020d" % count)
                finally:
                    os.close(fd)


def _create(directory: Path, fence: int, holder: Mapping[str, Any]) -> bool:
    """Make the file of number `fence`, whole and on disk; False if somebody else was first."""
    try:
        fd = os.open(directory / f"{fence:08d}.json", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    try:
        os.write(fd, json.dumps(dict(holder), indent=2).encode() + b"\n")
        os.fsync(fd)
    except OSError:  # a full disk: an empty file would be a holder of whom nobody knows anything
        (directory / f"{fence:08d}.json").unlink()
        raise
    finally:
        os.close(fd)
    fsync_dir(directory)
    return True


def _pulse(directory: Path, fence: int) -> tuple[str | None, str | None]:
    """Whatever changes while the holder lives: its beat, and its own words (being written, released)."""
    stem = f"{directory}/{fence:08d}"
    return _read(f"{stem}.beat"), _read(f"{stem}.json")


def _wait_until_free(
    directory: Path,
    found: tuple[int, dict[str, Any]],
    own: Mapping[str, Any],
    timeout_s: float,
    report: Callable[[str], None] | None,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> None:
    """Return when the holder is gone; raise LockedError when it shows that it lives."""
    fence, holder = found
    patience = max(timeout_s, 3 * float(holder.get("interval_s") or 0.0))
    first, started = _pulse(directory, fence), clock()
    told = False
    while True:
        verdict = judge(holder, own) if "pid" in holder else "unknown"
        if verdict == "gone":
            return
        waited = clock() - started
        beating = _pulse(directory, fence) != first and "pid" in holder
        if beating or (verdict == "alive" and waited >= min(DYING_S, patience)):
            raise LockedError(
                f"{directory.parent} is in use by {name_of(holder)}; "
                "wait for it, stop it, or choose another directory with run.dir or run.name"
            )
        if waited >= patience:  # asked last: this process may have been stopped or starved for as long
            return
        if verdict == "unknown" and report is not None and not told:
            report(f"{name_of(holder)} held this run last; waiting up to {patience:.0f} s for a sign of life")
            told = True
        sleep(min(patience / 20, 0.1))
        holder = read_json(directory / f"{fence:08d}.json") or holder

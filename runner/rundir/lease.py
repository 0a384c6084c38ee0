"""Let one process at a time work on a run directory, ordered by fencing numbers.

A process acquires the lease by exclusively creating the file for the next number. The process with the highest number
is the holder. A heartbeat shows that the holder is alive, and stores a record that outlives it. A new process takes
over immediately from a holder that is known to be gone. If it cannot know, it watches the heartbeat. If the holder is
alive, the new process is refused. A superseded process that wakes up finds a higher number and must not write: see
`Lease.guard`.

Clocks of different machines are never compared: a watcher checks whether the heartbeat *changes*. Nothing here imports
torch, numpy or hydra.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from runner.contracts import Job, is_same_job
from runner.errors import LockedError, RunDirError, StoppedError, SupersededError, UserError
from runner.rundir.paths import RunDir
from runner.system import clock, files, processes
from runner.system.signals import STOP

MAX_INTERVAL_S = 2.0
"""The longest time between two heartbeats."""
MIN_INTERVAL_S, INTERVAL_SHARE = 0.02, 0.004
"""A young process beats more often: a killed process's last record is then at most this share of its life old."""
MISSED_BEATS = 3
"""A holder that misses this many heartbeats is shown as dead. A newcomer takes over only after that and after
`run.lease_timeout_s`."""
DYING_S = 1.0
"""A process that was just killed may exist for this long."""
MAX_CHANGES = 100
"""How often the holder may change during a wait for the lease, before the lease is reported as in use."""
POLL_S = 0.2
"""Pause between two checks of another holder."""
JOB_WAIT_S = 300.0
"""How long a queued job waits for the previous holder. Longer than a save and Slurm's KillWait, and shorter than the
other ranks wait for rank 0."""

_NUMBERED = re.compile(r"([0-9]{8,18})\.(json|beat)")


def is_later_start(record: Mapping[str, Any], job: Mapping[str, Any]) -> bool:
    """Check whether a record is from a later start of `job`.

    Return False without a submission, because ids are reused.
    """
    if job.get("submission") is None or not is_same_job(record, job):
        return False
    restarts = record.get("restart_count")  # anybody may have edited the attempt log
    return isinstance(restarts, int) and restarts > (job.get("restart_count") or 0)


def end_of_earlier_start(run_dir: Path, later: Mapping[str, Any], job: Mapping[str, Any]) -> SupersededError:
    """Return the error that ends a start of a job that finds the record of a later start."""
    return SupersededError(
        f"{run_dir} was continued by a later start of job {job['job_id']} (restart {later['restart_count']}): this one "
        f"(restart {job.get('restart_count') or 0}) ends, and requeues nothing"
    )


def liveness(holder: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """Return `gone`, `alive` or `unknown`: what the process `own` can know about `holder` without waiting.

    `gone` means that the holder released the lease, is an earlier start of the same job, or ran on this machine since
    its last boot and is dead. `unknown` means that the heartbeat must decide. The holder is on a different machine or
    from a different boot (machines cloned from one image share host name and machine id), is suspended (SIGSTOP) on
    this machine, or its file is incomplete.

    Raises:
        OSError: the state of the process cannot be read now, see `processes.state_of`.
    """
    if holder.get("released"):
        return "gone"
    if "pid" not in holder:
        return "unknown"
    is_earlier = (holder.get("restart_count") or 0) < (own.get("restart_count") or 0)
    if holder.get("job_id") is not None and is_same_job(holder, own) and is_earlier:
        return "gone"
    if any(holder.get(key) != own.get(key) for key in ("host", "pid_namespace", "boot_id")):
        return "unknown"
    process = processes.state_of(holder["pid"])
    if processes.is_over(process, holder.get("start_time")):
        return "gone"
    return "unknown" if process is not None and process[0] in "Tt" else "alive"


def describe_holder(holder: Mapping[str, Any]) -> str:
    """Describe a holder for messages: `process 12 on node3, job 99`."""
    job = f", job {holder['job_id']}" if holder.get("job_id") else ""
    return f"process {holder.get('pid', '?')} on {holder.get('host', 'an unknown host')}{job}"


def read_holder(directory: Path) -> tuple[int, dict[str, Any]] | None:
    """Return (fence, holder) for the highest number, or None. If the holder's file is incomplete, holder is {}.

    Raises:
        OSError: the directory or the holder's file cannot be read.
    """
    fence = _highest(directory)
    return (fence, _read(directory, fence)) if fence else None


def is_continued(directory: Path, job: Mapping[str, Any]) -> bool:
    """Check whether the process that took the lease from a job continues the run in place of the job.

    Return False for a process that is not a job, such as a command that prunes checkpoints while the job is suspended.
    Return False for an earlier start of the same job too, because Slurm ends it.

    Args:
        directory: the directory of the numbered files.
        job: identifies the job (`job_id`, `submission`, `restart_count`).
    """
    try:
        found = read_holder(directory)
    except OSError:
        return False  # the next start of the job finds out
    if found is None:
        return True  # the run was moved or removed
    holder = found[1]
    is_later = (holder.get("restart_count") or 0) > (job["restart_count"] or 0)
    return holder.get("job_id") is not None and (not is_same_job(holder, job) or is_later)


def _highest(directory: Path) -> int:
    try:
        names = files.list_dir(directory)
    except FileNotFoundError:
        return 0
    except NotADirectoryError:
        if files.exists(directory):
            raise
        return 0  # a parent directory in the path is a file
    return max((number for number, kind, _ in _numbered(names) if kind == "json"), default=0)


def _numbered(names: Iterable[str]) -> Iterator[tuple[int, str, str]]:
    """Yield each file's number, kind (`json` or `beat`) and name."""
    for name in names:
        if match := _NUMBERED.fullmatch(name):
            yield int(match[1]), match[2], name


def _file(directory: Path, fence: int, suffix: str) -> Path:
    return directory / f"{fence:08d}.{suffix}"


def heartbeat_file(directory: Path, fence: int) -> Path:
    """Return the file that the holder with this number keeps rewriting while it is alive."""
    return _file(directory, fence, "beat")


def _read(directory: Path, fence: int) -> dict[str, Any]:
    holder = files.read_object(_file(directory, fence, "json"))
    restarts = holder.get("restart_count")
    valid = isinstance(holder.get("pid"), int) and (restarts is None or isinstance(restarts, int))
    return holder if valid else {}


def _patience(holder: Mapping[str, Any]) -> float:
    """Return the number of seconds in which a holder would have missed MISSED_BEATS heartbeats."""
    interval = holder.get("interval_s")
    valid = isinstance(interval, (int, float)) and 0 < interval <= MAX_INTERVAL_S
    return MISSED_BEATS * (interval if valid and interval else MAX_INTERVAL_S)


def _heartbeat(directory: Path, fence: int) -> tuple[str | None, str | None]:
    """Read the two files that change while the holder is alive: its counter and its record.

    The record changes when it is completed or released.

    Raises:
        OSError: a file cannot be read now. Do not treat this as a missed heartbeat.
    """
    beat, holder = (files.read_if_there(_file(directory, fence, suffix)) for suffix in ("beat", "json"))
    return beat, holder


def read_carried(directory: Path) -> dict[str, Any]:
    """Read the JSON object stored with the last heartbeat. Return {} if there is none or it cannot be read."""
    with contextlib.suppress(OSError):
        for _, kind, name in sorted(_numbered(files.list_dir(directory)), reverse=True):
            # Read one line. The rest of a longer, older line may follow it.
            text = (kind == "beat" and files.read_small(directory / name)) or ""
            with contextlib.suppress(ValueError, RecursionError):
                found = json.loads(text.partition("\n")[0].partition(" ")[2])
                if isinstance(found, dict):
                    return found
    return {}


@dataclass
class Lease:
    """A held lease. Acquire one with `Lease.acquire`.

    Attributes:
        carried: returns the JSON object to store with each heartbeat; called in the heartbeat's thread. By default it
            returns the previous holder's last object.
    """

    directory: Path
    fence: int
    holder: dict[str, Any]
    _stop: threading.Event
    carried: Callable[[], dict[str, Any]] = dict
    _thread: threading.Thread | None = None
    _heart: Heart | None = None

    @classmethod
    def acquire(
        cls,
        directory: Path,
        holder: Mapping[str, Any] | None = None,
        timeout_s: float = 60.0,
        *,
        wait_s: float = 0.0,
        asked_to_stop: Callable[[], object] = lambda: False,
        report: Callable[[str], None] | None = None,
        heart: Heart | None = None,
        within: Path | None = None,
    ) -> Lease:
        """Acquire the lease kept in `directory`.

        Args:
            directory: the directory of the numbered files; created if missing.
            holder: entries that describe this process. Host, pid and others are added. `job_id`,
                `submission` and `restart_count` order the starts of one job.
            timeout_s: how long a holder whose liveness is unknown may go without a heartbeat.
            wait_s: how long a live holder may take to release the lease.
            asked_to_stop: ends every wait for another holder when it returns true.
            report: called with a message when this process has to wait.
            heart: thread that writes heartbeats for several leases. If None, the lease starts its own thread.
            within: the directory of an existing run. It is not created: if the run is moved or removed during the wait,
                no new run may begin in its place.

        Raises:
            RunDirError: `within` is gone.
            LockedError: the holder is alive.
            StoppedError: `asked_to_stop` ended the wait for a sign of life.
            SupersededError: this process was suspended for so long that it has already lost the lease, or a later start
                of its job has held it.
            UserError: the directory cannot be written.
        """
        if not timeout_s > 0:
            raise UserError(f"lease timeout of {timeout_s} s: must be more than 0")
        interval_s = max(min(timeout_s / 6, MAX_INTERVAL_S), 0.05)
        own = {**processes.this_process(), **(holder or {}), "interval_s": interval_s}
        deadline, reported = clock.monotonic() + wait_s, False
        while True:
            try:
                return cls._take(directory, own, timeout_s, asked_to_stop, report, heart, within)
            except LockedError as error:
                if asked_to_stop() or clock.monotonic() >= deadline:
                    raise
                if report is not None and not reported:
                    report(f"{str(error).partition(';')[0]}: waiting up to {wait_s:.0f} s for it")
                    reported = True
            except OSError as error:
                if within is not None and isinstance(error, FileNotFoundError):
                    raise RunDirError(f"{within} was moved or removed meanwhile: rerun the command") from None
                full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                remedy = "free some space there" if full else "make the run directory writable"
                raise UserError(
                    f"{directory} cannot be used for the lease of the run ({error.strerror or error}); {remedy}"
                ) from error
            clock.sleep(POLL_S)

    @classmethod
    def _take(
        cls,
        directory: Path,
        own: dict[str, Any],
        timeout_s: float,
        asked_to_stop: Callable[[], object],
        report: Callable[[str], None] | None,
        heart: Heart | None,
        within: Path | None,
    ) -> Lease:
        if within is None:
            files.make_dirs(directory)
        else:
            files.make_dirs_in(within, directory)
        for changes in count():
            fence, holder = read_holder(directory) or (0, {"released": True})
            if not _wait_until_gone(directory, fence, holder, own, timeout_s, asked_to_stop, report):
                if changes < MAX_CHANGES:
                    continue
                raise LockedError(f"{directory.parent} is in use by one process after the other; rerun the command")
            lease = cls(directory, fence + 1, own, threading.Event())
            if lease._claim():
                break
        inherited = read_carried(directory)
        lease.carried = lambda: inherited
        if heart is None:
            lease._thread = threading.Thread(target=lease._beat, name="lease", daemon=True)
            lease._thread.start()
        else:
            lease._heart = heart
            heart.add(lease)
        try:
            lease._sweep()
        except OSError:
            lease.release()
            raise
        return lease

    @property
    def guard(self) -> files.Guard:
        """Return the right to replace files of the run directory, which every write into it needs."""
        return files.Guard(f"{self.directory.name}-{self.fence:08d}", self.check_fence)

    def check_fence(self) -> None:
        """Check that this process still holds the lease. A write needs more than this: see `guard`.

        Raises:
            SupersededError: a newer process holds the lease, or the file for this number is gone.
            OSError: the directory cannot be read.
        """
        found = read_holder(self.directory)
        if found is not None and found[0] == self.fence and self._is_mine(found[1]):
            return
        who = f"{describe_holder(found[1])} (number {found[0]})" if found else "nobody: the lease was removed"
        raise SupersededError(
            f"{self.directory.parent} is now held by {who}; this process was number {self.fence} "
            "and stops without writing"
        )

    def release(self) -> None:
        """Release the lease immediately, or as soon as the disk permits.

        Do nothing if superseded or already released.
        """
        self.end_heartbeat()
        try:
            self._write_released()
        except SupersededError:
            pass
        except OSError:
            if self._heart is None:  # a process that stays alive would block all others, and itself
                threading.Thread(target=self._release_later, name="release", daemon=True).start()

    def end_heartbeat(self) -> None:
        """Stop the heartbeat and close its file. The lease stays held until enough heartbeats are missed."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5)
        if self._heart is not None:
            self._heart.remove(self)

    def _release_later(self) -> None:
        with contextlib.suppress(SupersededError):
            while True:
                clock.sleep(self.holder["interval_s"])
                with contextlib.suppress(OSError):
                    return self._write_released()

    def moved(self, directory: Path) -> None:
        """Use `directory` as the lease's directory after a rename of the run."""
        self.directory = directory

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def _is_mine(self, holder: Mapping[str, Any]) -> bool:
        return all(holder.get(key) == self.holder[key] for key in ("host", "pid", "start_time", "boot_id"))

    def _write_released(self) -> None:
        mine, released = _file(self.directory, self.fence, "json"), {**self.holder, "released": True}
        try:
            files.write_json(mine, released, guard=self.guard)
        except OSError:
            # A full disk has no room for a new file.
            self.check_fence()
            fd = files.open_fd(mine, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                files.overwrite(fd, json.dumps(released, indent=2).encode() + b"\n")
            finally:
                files.close_fd(fd)

    def _claim(self) -> bool:
        """Create the file for this number. Return False if a different process has the number.

        Raises:
            SupersededError: this process was suspended, and other processes have taken this number or a higher one.
        """
        mine = _file(self.directory, self.fence, "json")
        try:
            files.create(mine, json.dumps(self.holder, indent=2).encode() + b"\n")
        except FileExistsError:
            return False
        if _highest(self.directory) > self.fence:  # a newer holder may have swept this number before it was created
            files.remove(mine)
            self.check_fence()
        return True

    def _sweep(self) -> None:
        """Remove the files of lower numbers, then their temporary files, so that no late rename can succeed.

        The order matters on a network file system. An older holder on a different machine may see an outdated listing,
        but it looks up its own file, which is removed before its temporary file. Files just created by this machine
        appear only if the directory is read again.

        Raises:
            OSError: the file system refuses to remove a file with which an older holder might still write.
        """
        for number, kind, name in _numbered(files.list_dir(self.directory)):
            if number < self.fence:
                refusals = OSError if kind == "beat" else FileNotFoundError  # an old heartbeat does no harm
                with contextlib.suppress(refusals):
                    files.remove(self.directory / name)
        for folder in (self.directory, self.directory.parent):
            self._sweep_temporary(folder)
        run = RunDir(self.directory.parent)
        if self.directory == run.submission:  # the submission of a branch writes `appender` there
            with contextlib.suppress(FileNotFoundError):
                self._sweep_temporary(run.lease)

    def _sweep_temporary(self, folder: Path) -> None:
        with contextlib.suppress(PermissionError):  # another user's: nothing that this lease guards is there
            files.look_anew(folder)
        files.sweep(folder, self.directory.name, self.fence)

    def _beat(self) -> None:
        """Rewrite a counter in place, so that a full disk does not stop it, until this process is superseded."""
        count, fd, began = 0, -1, processes.began()
        while not self._stop.wait(self._pause_s(clock.monotonic() - began) if count else 0):
            count += 1
            try:
                if fd < 0:
                    fd = self._open_beat()
                if not self._wrote_beat(fd, count):
                    break
            except OSError:
                fd = _closed(fd)  # reopened: the file server may have been restarted
        _closed(fd)

    def _wrote_beat(self, fd: int, count: int) -> bool:
        """Write the heartbeat counter. Return False if superseded."""
        if _highest(self.directory) != self.fence:  # checked after opening, which may have recreated
            files.remove(_file(self.directory, self.fence, "beat"))  # the file that the successor has swept
            return False
        files.overwrite(fd, b"%020d %s\n" % (count, json.dumps(self.carried()).encode()))
        return True

    def _beats_once(self, count: int) -> bool:
        """Write one heartbeat and close its file. Return False if superseded."""
        fd = -1
        try:
            fd = self._open_beat()
            return self._wrote_beat(fd, count)
        except OSError:
            return True
        finally:
            _closed(fd)

    def _pause_s(self, age_s: float) -> float:
        return float(min(self.holder["interval_s"], max(MIN_INTERVAL_S, INTERVAL_SHARE * age_s)))

    def _open_beat(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return files.open_fd(_file(self.directory, self.fence, "beat"), flags, 0o644)


class Heart:
    """A thread that writes heartbeats for many leases, such as a large sweep's. Use it as a context manager.

    It keeps no file open. Its leases store no records, so heartbeats may be rare.
    """

    def __init__(self) -> None:
        self._leases: dict[Path, Lease] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="leases", daemon=True)

    def __enter__(self) -> Heart:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join(timeout=5)

    def add(self, lease: Lease) -> None:
        """Start writing heartbeats for a lease."""
        with self._lock:
            self._leases[lease.directory] = lease
            lease._beats_once(1)

    def remove(self, lease: Lease) -> None:
        """Stop writing heartbeats for a lease."""
        with self._lock:
            self._leases.pop(lease.directory, None)

    def _run(self) -> None:
        count, pause_s = 1, MIN_INTERVAL_S
        while not self._stop.wait(pause_s):
            count += 1
            with self._lock:
                held = list(self._leases.items())
            for directory, lease in held:
                with self._lock:
                    if directory in self._leases and not lease._beats_once(count):
                        del self._leases[directory]
            pause_s = min((float(lease.holder["interval_s"]) for _, lease in held), default=MIN_INTERVAL_S)


def _closed(fd: int) -> int:
    """Close a file descriptor, unless it is -1. Return -1."""
    with contextlib.suppress(OSError):
        if fd >= 0:
            files.close_fd(fd)
    return -1


def _wait_until_gone(
    directory: Path,
    fence: int,
    holder: dict[str, Any],
    own: Mapping[str, Any],
    timeout_s: float,
    asked_to_stop: Callable[[], object],
    report: Callable[[str], None] | None,
) -> bool:
    """Wait until the holder is gone. Return False if another process has taken the lease after it.

    Raises:
        LockedError: the holder is alive.
        SupersededError: the holder is, or was, a later start of the waiting job.
        StoppedError: a stop was requested before this was known.
    """
    patience = max(timeout_s, _patience(holder))
    first, started = _heartbeat(directory, fence), clock.monotonic()
    reported = waiting = False
    while True:
        if is_later_start(holder, own):
            raise end_of_earlier_start(directory.parent, holder, own)
        if (verdict := liveness(holder, own)) == "gone":
            return True
        if waiting and _highest(directory) > fence:  # the successor has removed the files that show life
            return False
        waiting = True
        waited = clock.monotonic() - started
        beating = _heartbeat(directory, fence) != first and "pid" in holder
        if beating or (verdict == "alive" and waited >= min(DYING_S, patience)):
            raise LockedError(f"{directory.parent} is in use by {describe_holder(holder)}; wait for it, or stop it")
        if waited >= patience:  # checked last: this process may have been suspended for that long
            return True
        if verdict == "unknown" and asked_to_stop():
            raise StoppedError(f"{directory.parent} may be in use by {describe_holder(holder)}; rerun the command")
        if verdict == "unknown" and report is not None and not reported:
            report(f"{describe_holder(holder)} held this run last; waiting up to {patience:.0f} s for its heartbeat")
            reported = True
        clock.sleep(min(patience / 20, 0.1))
        holder = _read(directory, fence) or holder


def acquire_for_job(run: RunDir, job: Job, timeout_s: float, report: Callable[[str], None]) -> Lease:
    """Acquire the lease of `run` for an attempt in `job`; call on rank 0.

    A job that the scheduler restarts waits for a live holder: the previous job may still be saving when this one starts
    on another node, for example after scancel.

    Raises:
        LockedError: a different process holds the lease and is alive; for a restarted job, even after JOB_WAIT_S.
        RunDirError: the run was moved or removed.
        StoppedError: a signal arrived while the job waited. The job was requeued if the cause requires that.
        SupersededError: a later start of this job has held the lease: Slurm requeued the job, as its node was cut off.
        UserError: the run directory cannot be written.
    """
    wait_s = JOB_WAIT_S if job.auto_restarts else 0.0
    try:
        return Lease.acquire(
            run.lease,
            job.identity(),
            timeout_s,
            wait_s=wait_s,
            asked_to_stop=lambda: STOP,
            report=report,
            within=run.path,
        )
    except (LockedError, StoppedError) as error:
        if STOP.signum is None or not job.auto_restarts:
            raise
        cause = job.requeue_if_needed(job.cause(STOP.signum))
        raise StoppedError(f"{str(error).partition(';')[0]}; {cause} ({STOP.name}) while waiting for it") from None


@dataclass
class _Seen:
    """The last heartbeat seen, since when (monotonic), and whether the holder is alive (None if undecided)."""

    heartbeat: tuple[str | None, str | None]
    since: float
    alive: bool | None


class LeaseWatcher:
    """Determine for read-only commands whether holders are alive, remembering heartbeats between calls.

    Args:
        patience_s: seconds without a new heartbeat after which a holder is dead, if longer than its three intervals.
    """

    def __init__(self, patience_s: float = 0.0) -> None:
        self._patience_s = patience_s
        self._own = processes.this_process()
        self._seen: dict[Path, _Seen] = {}

    def is_alive(self, directory: Path) -> bool:
        """Check whether the holder of the lease in `directory` is alive. Return False while undecided, see `wait`.

        Raises:
            OSError: the directory or the holder's file cannot be read.
        """
        fence, holder = read_holder(directory) or (0, {"released": True})
        verdict = liveness(holder, self._own)
        if verdict != "unknown":
            self._seen.pop(directory, None)
            return verdict == "alive"
        now = clock.monotonic()  # taken before reading, because this process may be suspended during the read
        heartbeat = _heartbeat(directory, fence)
        seen = self._seen.setdefault(directory, _Seen(heartbeat, now, None))
        if heartbeat != seen.heartbeat:
            seen = self._seen[directory] = _Seen(heartbeat, now, True)
        elif now - seen.since >= max(_patience(holder), self._patience_s):
            seen.alive = False
        return bool(seen.alive)

    def wait(self) -> bool:
        """Watch all undecided holders until the state of each is decided. Return whether there were any."""
        undecided = [directory for directory, seen in self._seen.items() if seen.alive is None]
        waited = bool(undecided)
        while undecided:
            clock.sleep(POLL_S)
            for directory in undecided:
                try:
                    self.is_alive(directory)
                except OSError:
                    self._seen.pop(directory, None)  # the next `is_alive` raises it
            undecided = [path for path in undecided if path in self._seen and self._seen[path].alive is None]
        return waited

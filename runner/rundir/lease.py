"""The lease: one process at a time works on a run directory, and a fencing number orders those that did.

A process acquires the lease by creating the file of the next number exclusively; the highest number is the holder's. A
heartbeat shows that the holder is alive, and carries a record that outlives it. A newcomer takes over at once from a
holder that is known to be gone, watches the heartbeat where it cannot know, and is refused if the holder is alive. A
superseded process that wakes up finds a higher number and must not write: see `Lease.guard`.

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
"""A young process beats more often: what is known of one that is killed is then at most this share of its life old."""
MISSED_BEATS = 3
"""A holder that misses this many heartbeats is shown as dead; a newcomer takes over only after `run.lease_timeout_s`,
and not before that."""
DYING_S = 1.0
"""A process that was just killed may exist for this long."""
MAX_CHANGES = 100
"""Holders that may come and go while somebody waits for the lease, before it is said to be in use."""
POLL_S = 0.2
"""Pause between two looks at another holder."""
JOB_WAIT_S = 300.0
"""How long a queued job waits for the previous holder: longer than a save and Slurm's KillWait, and shorter than the
other ranks wait for rank 0."""

_NUMBERED = re.compile(r"([0-9]{8,18})\.(json|beat)")


def is_later_start(record: Mapping[str, Any], job: Mapping[str, Any]) -> bool:
    """Whether a record is of a later start of `job`; without a submission, nobody can tell that from a reused id."""
    if job.get("submission") is None or not is_same_job(record, job):
        return False
    restarts = record.get("restart_count")  # of an attempt log that anybody may have edited
    return isinstance(restarts, int) and restarts > (job.get("restart_count") or 0)


def end_of_earlier_start(run_dir: Path, later: Mapping[str, Any], job: Mapping[str, Any]) -> SupersededError:
    """What ends a start of a job that finds the record of a later one."""
    return SupersededError(
        f"{run_dir} was continued by a later start of job {job['job_id']} (restart {later['restart_count']}): this one "
        f"(restart {job.get('restart_count') or 0}) ends, and requeues nothing"
    )


def liveness(holder: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """`gone`, `alive` or `unknown`: what the process `own` can tell about `holder` without waiting.

    Gone: it released the lease; it is the same job with a lower restart count; or it ran on this machine, in this boot,
    and the process is dead. Unknown (the heartbeat decides): on another machine; of another boot, since machines that
    were cloned from one image share host name and machine id; stopped (SIGSTOP) on this one; its file is incomplete.

    Raises:
        OSError: this machine does not tell now, see `processes.state_of`.
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
    """`process 12 on node3, job 99`, for messages."""
    job = f", job {holder['job_id']}" if holder.get("job_id") else ""
    return f"process {holder.get('pid', '?')} on {holder.get('host', 'an unknown host')}{job}"


def read_holder(directory: Path) -> tuple[int, dict[str, Any]] | None:
    """(fence, holder) of the highest number, or None; a holder whose file is incomplete is {}.

    Raises:
        OSError: the directory or the holder's file cannot be read.
    """
    fence = _highest(directory)
    return (fence, _read(directory, fence)) if fence else None


def is_continued(directory: Path, job: Mapping[str, Any]) -> bool:
    """Whether whoever has taken the lease in `directory` from a job carries the run on in its stead.

    False for a process that is no job, such as a command that prunes checkpoints while the job is suspended, and for an
    earlier start of the same job: Slurm ends it.

    Args:
        directory: where the numbers are.
        job: what the job is known by (`job_id`, `submission`, `restart_count`).
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
        return 0  # a part of the path above it is a file
    return max((number for number, kind, _ in _numbered(names) if kind == "json"), default=0)


def _numbered(names: Iterable[str]) -> Iterator[tuple[int, str, str]]:
    """Yield the number of each file of a holder, its kind (`json` or `beat`), and its name."""
    for name in names:
        if match := _NUMBERED.fullmatch(name):
            yield int(match[1]), match[2], name


def _file(directory: Path, fence: int, suffix: str) -> Path:
    return directory / f"{fence:08d}.{suffix}"


def heartbeat_file(directory: Path, fence: int) -> Path:
    """The file that the holder with this number rewrites as long as it is alive."""
    return _file(directory, fence, "beat")


def _read(directory: Path, fence: int) -> dict[str, Any]:
    holder = files.read_object(_file(directory, fence, "json"))
    restarts = holder.get("restart_count")
    valid = isinstance(holder.get("pid"), int) and (restarts is None or isinstance(restarts, int))
    return holder if valid else {}


def _patience(holder: Mapping[str, Any]) -> float:
    """Seconds after which a heartbeat that has not changed was missed often enough."""
    interval = holder.get("interval_s")
    valid = isinstance(interval, (int, float)) and 0 < interval <= MAX_INTERVAL_S
    return MISSED_BEATS * (interval if valid and interval else MAX_INTERVAL_S)


def _heartbeat(directory: Path, fence: int) -> tuple[str | None, str | None]:
    """What changes while the holder is alive: its counter, and its file (still incomplete, released).

    Raises:
        OSError: it cannot be told, which must not pass for a heartbeat that was missed.
    """
    beat, holder = (files.read_if_there(_file(directory, fence, suffix)) for suffix in ("beat", "json"))
    return beat, holder


def read_carried(directory: Path) -> dict[str, Any]:
    """The JSON object that the last heartbeat carried; empty if there is none, or nobody can read it."""
    with contextlib.suppress(OSError):
        for _, kind, name in sorted(_numbered(files.list_dir(directory)), reverse=True):
            # One line; after it may be the rest of a longer one.
            text = (kind == "beat" and files.read_small(directory / name)) or ""
            with contextlib.suppress(ValueError, RecursionError):
                found = json.loads(text.partition("\n")[0].partition(" ")[2])
                if isinstance(found, dict):
                    return found
    return {}


@dataclass
class Lease:
    """A lease that is held. Make one with `Lease.acquire`.

    Attributes:
        carried: what each heartbeat carries, a JSON object; called in the thread of the heartbeat. At first what the
            last one of the previous holder carried, which a holder that sets nothing passes on.
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
            directory: where the numbers are; created if missing.
            holder: describes this process beyond host, pid and the like, which are filled in: `job_id`, `submission`
                and `restart_count` order the starts of one job.
            timeout_s: how long a holder of unknown liveness may go without a heartbeat.
            wait_s: how long a live holder may take to release the lease.
            asked_to_stop: ends every wait for another holder when true.
            report: receives a message when there is something to wait for.
            heart: beats for this lease and others; without one, it has a thread of its own.
            within: the run directory, of a run that is there already. It is not created: whoever waited for its lease
                while it was moved or removed must not begin another one in its place.

        Raises:
            RunDirError: `within` is gone.
            LockedError: the holder is alive.
            StoppedError: `asked_to_stop` ended the wait for a sign of life.
            SupersededError: this process was stopped for so long that it has lost the lease already, or a later start
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
        """The right to replace files of the run directory, which every write into it must be given."""
        return files.Guard(f"{self.directory.name}-{self.fence:08d}", self.check_fence)

    def check_fence(self) -> None:
        """Whether this process still holds the lease. A write needs more than this: see `guard`.

        Raises:
            SupersededError: a newer process holds the lease, or the file of this number is gone.
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
        """Let the next process in at once, or once the disk permits it. Does nothing if superseded or called before."""
        self.end_heartbeat()
        try:
            self._write_released()
        except SupersededError:
            pass
        except OSError:
            if self._heart is None:  # a process that lives on would block everybody, itself included
                threading.Thread(target=self._release_later, name="release", daemon=True).start()

    def end_heartbeat(self) -> None:
        """Leave no file of the lease open; it is held until its heartbeat was missed."""
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
        """The directory of the lease has been renamed to `directory`, with the run that it is in."""
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
        """Create the file of this number; False if another process has the number.

        Raises:
            SupersededError: this process was stopped meanwhile, and others have taken this number or a higher one.
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
        """Remove what lower numbers left: their own files, then their temporary ones: no late rename can succeed.

        In this order: on a network file system an older holder on another machine may see an old list of the numbers,
        but its own file is looked up, and is gone before what it was writing is. What it has created just now is on
        this machine's list only if that is made anew.

        Raises:
            OSError: the file system refuses to remove something that an older holder might still write with.
        """
        for number, kind, name in _numbered(files.list_dir(self.directory)):
            if number < self.fence:
                refusals = OSError if kind == "beat" else FileNotFoundError  # nobody relies on an old heartbeat
                with contextlib.suppress(refusals):
                    files.remove(self.directory / name)
        for folder in (self.directory, self.directory.parent):
            self._sweep_temporary(folder)
        run = RunDir(self.directory.parent)
        if self.directory == run.submission:  # who submits a branch writes its `appender`, which is there
            with contextlib.suppress(FileNotFoundError):
                self._sweep_temporary(run.lease)

    def _sweep_temporary(self, folder: Path) -> None:
        with contextlib.suppress(PermissionError):  # of another user, and nothing that this lease guards is there
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
                fd = _closed(fd)  # opened anew: the server of the file system may have been restarted
        _closed(fd)

    def _wrote_beat(self, fd: int, count: int) -> bool:
        """Write the counter; False if superseded."""
        if _highest(self.directory) != self.fence:  # looked at after the opening, which may have brought back
            files.remove(_file(self.directory, self.fence, "beat"))  # what the successor has swept
            return False
        files.overwrite(fd, b"%020d %s\n" % (count, json.dumps(self.carried()).encode()))
        return True

    def _beats_once(self, count: int) -> bool:
        """One heartbeat, which leaves no file open; False if superseded."""
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
    """One thread that beats for many leases, such as those of a large sweep; a context manager.

    It leaves no file open. Its leases carry nothing of their own, so that it need not beat often.
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
        """Beat for a lease, from now on."""
        with self._lock:
            self._leases[lease.directory] = lease
            lease._beats_once(1)

    def remove(self, lease: Lease) -> None:
        """Do not beat for it any more."""
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
    """Close a file descriptor, unless it is -1; returns -1."""
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
    """Return when the holder is gone: whether nobody has taken the lease after it.

    Raises:
        LockedError: it turned out to be alive.
        SupersededError: it is, or was, a later start of the job that waits.
        StoppedError: there was a request to stop before that was known.
    """
    patience = max(timeout_s, _patience(holder))
    first, started = _heartbeat(directory, fence), clock.monotonic()
    reported = waiting = False
    while True:
        if is_later_start(holder, own):
            raise end_of_earlier_start(directory.parent, holder, own)
        if (verdict := liveness(holder, own)) == "gone":
            return True
        if waiting and _highest(directory) > fence:  # its files, which tell whether it is alive, are gone
            return False
        waiting = True
        waited = clock.monotonic() - started
        beating = _heartbeat(directory, fence) != first and "pid" in holder
        if beating or (verdict == "alive" and waited >= min(DYING_S, patience)):
            raise LockedError(f"{directory.parent} is in use by {describe_holder(holder)}; wait for it, or stop it")
        if waited >= patience:  # checked last: this process itself may have been stopped or starved for that long
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

    A job that the scheduler restarts waits for a live holder: the previous job may still be saving (after scancel, for
    example) when this one starts on another node.

    Raises:
        LockedError: another process holds it and is alive (for such a job: even after JOB_WAIT_S).
        RunDirError: the run was moved or removed.
        StoppedError: a signal came while the job waited; it was requeued if the cause requires that.
        SupersededError: a later start of this job has held it: Slurm requeued the job, as its node was cut off.
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
    """The last heartbeat that was seen, since when (monotonic), and whether its holder is alive (None: not decided)."""

    heartbeat: tuple[str | None, str | None]
    since: float
    alive: bool | None


class LeaseWatcher:
    """Tells for commands that only look whether holders are alive; remembers their heartbeats between calls.

    Args:
        patience_s: how long a heartbeat must not have changed, if that is longer than the holder's own three.
    """

    def __init__(self, patience_s: float = 0.0) -> None:
        self._patience_s = patience_s
        self._own = processes.this_process()
        self._seen: dict[Path, _Seen] = {}

    def is_alive(self, directory: Path) -> bool:
        """Whether the holder of the lease in `directory` is alive; False also while not decided, see `wait`.

        Raises:
            OSError: the directory or the holder's file cannot be read.
        """
        fence, holder = read_holder(directory) or (0, {"released": True})
        verdict = liveness(holder, self._own)
        if verdict != "unknown":
            self._seen.pop(directory, None)
            return verdict == "alive"
        now = clock.monotonic()  # before the look: this process itself may be stopped in between
        heartbeat = _heartbeat(directory, fence)
        seen = self._seen.setdefault(directory, _Seen(heartbeat, now, None))
        if heartbeat != seen.heartbeat:
            seen = self._seen[directory] = _Seen(heartbeat, now, True)
        elif now - seen.since >= max(_patience(holder), self._patience_s):
            seen.alive = False
        return bool(seen.alive)

    def wait(self) -> bool:
        """Watch all undecided holders until each is decided; whether there were any."""
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

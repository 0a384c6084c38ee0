"""Read and write the attempt log of a run: attempt.json, attempts.jsonl, status.json and the completion mark.

A killed attempt cannot record its end, so the next attempt records it. Nothing here imports torch, hydra or numpy.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from runner.contracts import is_same_job
from runner.errors import CrashLoopError, ExitStatus, FileError, SupersededError, TimeoutsError
from runner.rundir.lease import end_of_earlier_start, is_later_start
from runner.rundir.paths import RunDir
from runner.rundir.time_account import TimeAccount, closed, latest
from runner.system import clock, files, processes

T = TypeVar("T")

TITLE = re.compile(rb"attempt \d+ on ")
"""The beginning of `AttemptLog.title`, which a run prints first, and by which `runner logs` finds the last attempt."""

# Causes that are not failures of the run: it was asked to stop, or its machine was needed for something else.
PAUSED = "paused"  # a search has trained it to a rung, and may resume it
DIVERGED = "diverged"  # the loss is nan or infinite
UNSAVED = "unsaved"  # the file system refused to store the last state
HARMLESS = frozenset({"finished", PAUSED, "preempted", "requeued", "cancelled", "interrupted"})
CRASH_LOOP_LIMIT = 3
EARLY = "ended_early"  # key in the completion mark of a run that ended before its last step
TIME_LIMIT = "time limit"
TIMEOUTS = "timeouts"  # a job was ended after too many time limits
OUT_OF_TIME = (TIME_LIMIT, TIMEOUTS)
BETWEEN_STEPS = (ExitStatus.FINISHED, ExitStatus.INTERRUPTED)  # exit statuses of attempts that ended after a save
UPDATE_INTERVAL_S = 2.0
MAX_WARNINGS = 10
# How often and with which pause to try to write a required record before the attempt fails.
WRITE_TRIES, WRITE_PAUSE_S = 3, 0.5

# The state of a run after an attempt, by the attempt's cause; `failed` after any other cause.
STATE_AFTER = {
    "finished": "finished",
    PAUSED: PAUSED,
    "preempted": "requeued",
    "requeued": "requeued",
    TIME_LIMIT: "requeued",
    "cancelled": "cancelled",
    "node failure": "requeued",
    "interrupted": "interrupted",
    "crash loop": "crash loop",
    "hang": "stuck",
}


def last_record(run: RunDir) -> dict[str, Any]:
    """Return the last step's record in metrics.jsonl, or {} if there is none."""
    try:
        file = files.open_regular(run.metrics)
    except FileNotFoundError:
        return {}
    with file:
        for _, line in files.lines_backwards(file.fileno()):
            with suppress(ValueError, RecursionError):
                record = json.loads(line)
                if isinstance(record, dict) and "loss" in record and isinstance(record.get("step"), int):
                    return record
    return {}


def last_step(run: RunDir) -> int:
    """Return the last step in metrics.jsonl, or 0 if there is none."""
    return int(last_record(run).get("step", 0))


@dataclass(frozen=True)
class Finish:
    """How far a run has finished, according to its completion mark.

    Attributes:
        steps: the step at which it finished; 0 if it has not.
        epochs: the number of epochs at which it finished, if the run's length is in epochs.
        early: an object with the `reason` why it ended before its last step; None if it did not.
    """

    steps: int = 0
    epochs: float | None = None
    early: Mapping[str, Any] | None = None

    @staticmethod
    def of(run: RunDir) -> Finish:
        """Read the completion mark of a run.

        Raises:
            OSError: it cannot be read.
        """
        mark = files.read_object(run.finished)
        steps, epochs, early = mark.get("steps"), mark.get("epochs"), mark.get(EARLY)
        return Finish(
            steps if isinstance(steps, int) else 0,
            epochs if isinstance(epochs, int | float) else None,
            early if isinstance(early, dict) else None,
        )

    def covers(self, steps: int | None, epochs: float | None) -> bool:
        """Check whether the run finished at `steps` steps or later. If `steps` is None, compare `epochs` instead."""
        if steps is not None:
            return self.steps >= steps
        return self.steps > 0 and self.epochs is not None and epochs is not None and self.epochs >= epochs


def ended_attempts(run: RunDir) -> list[dict[str, Any]]:
    """Read the lines of attempts.jsonl. Skip lines that a disk error or an edit has made invalid."""
    return [line for line in files.read_lines(run.attempts, limit=files.MAX_RECORD_BYTES) if _is_ended(line)]


def _is_ended(line: Any) -> bool:
    if not isinstance(line, dict) or not isinstance(line.get("cause"), str):
        return False
    numbers = [line.get(key) or 0 for key in ("start_step", "checkpoint_step", "steps_lost")]
    return all(isinstance(number, int) for number in (line.get("attempt"), *numbers))


def status_of(run: RunDir) -> dict[str, Any]:
    """Read status.json.

    If it is missing or invalid, derive the status from the other records. Return {} if not started.

    If the other records show that the attempt ended, they take precedence: the disk may have refused only status.json.
    """
    status = files.read_object(run.status)
    if status and (status.get("state") != "running" or files.read_object(run.attempt)):
        return status
    shown = _status_from_records(run)
    if not status:
        return shown
    if shown.get("attempts") != status.get("attempts"):
        return status  # the status is from a different attempt
    return status | {key: value for key, value in shown.items() if value is not None}


def incomplete_records(run: RunDir, steps: int) -> str | None:
    """Return which step records a run that finished at `steps` lacks and how to restore them, or None if complete."""
    last = last_step(run)
    if last >= steps:
        return None
    return (
        f"{run.metrics} ends at step {last}: the records of the other {steps - last} steps were lost or removed. "
        f"Restore the file from a copy, or remove {run.finished.name} and the checkpoints above step {last} and rerun"
    )


def _status_from_records(run: RunDir) -> dict[str, Any]:
    ended = ended_attempts(run)
    current = files.read_object(run.attempt)
    if current.get("attempt") in [line["attempt"] for line in ended]:
        current = {}  # the attempt was killed while it recorded its end
    finished = Finish.of(run).steps
    if not (ended or current or finished):
        return {}
    last = current or (ended[-1] if ended else {})
    cause = ended[-1]["cause"] if ended else None
    state = "running" if current else "finished" if finished else STATE_AFTER.get(str(cause), "failed")
    record = last_record(run)
    return {
        **{key: last.get(key) for key in ("job_id", "node", "ranks", "reason", "total")},
        **{key: record.get(key) for key in ("step", "loss")},
        "state": state,
        "cause": cause,
        "attempts": len(ended) + bool(current),
        "steps_lost": _steps_lost(ended),
        "updated": last.get("ended") or last.get("started"),
    }


def _steps_lost(attempts: list[dict[str, Any]]) -> int:
    return sum(attempt.get("steps_lost") or 0 for attempt in attempts)


def check_latest(run: RunDir, job: Mapping[str, Any]) -> None:
    """Check that no later start of `job` has made an attempt. Call this while holding the lease.

    Raises:
        SupersededError: a later start has made an attempt.
        OSError: the records cannot be read.
    """
    for record in (*ended_attempts(run), files.read_object(run.attempt)):
        if is_later_start(record, job):
            raise end_of_earlier_start(run.path, record, job)


def _without_progress(attempts: list[dict[str, Any]], job: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the latest consecutive attempts of a job that failed without a new checkpoint, newest first."""

    def stuck(attempt: dict[str, Any]) -> bool:
        gained = (attempt.get("checkpoint_step") or 0) - (attempt.get("start_step") or 0)
        return is_same_job(attempt, job) and attempt["cause"] not in HARMLESS and gained <= 0

    return list(takewhile(stuck, reversed(attempts)))


def _timeouts(attempts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [attempt for attempt in attempts if attempt["cause"] in OUT_OF_TIME]


@dataclass
class AttemptLog:
    """The log of one attempt, used on rank 0. A superseded process cannot change it.

    Methods that write raise SupersededError once a newer process holds the lease. Records that a full or failing disk
    refuses are kept in memory and written with the next update. A record that is still unwritten at the end of the
    attempt is an error.
    """

    run: RunDir  # with a guard
    total: int | None  # None until the data determine the number of steps per epoch
    earlier: list[dict[str, Any]]
    record: dict[str, Any] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    lost_records: str | None = None  # why metrics of this attempt are not on the disk, if they could not be written
    auto_restarts: bool = False  # whether the scheduler restarts the job; otherwise a user must rerun the command
    account: TimeAccount = field(default_factory=TimeAccount)
    _kept: bytes = b""  # the lines of earlier attempts, unchanged
    _closed: list[dict[str, Any]] = field(default_factory=list)  # the lines added by this attempt
    _unwritten: set[Path] = field(default_factory=set)
    _updated: float = float("-inf")

    def __post_init__(self) -> None:
        # `note` and `warn` are called from several threads. The lock ensures that one thread at a time writes records.
        self._lock = threading.RLock()

    @staticmethod
    def begin(
        run: RunDir,
        identity: dict[str, Any],
        total: int | None,
        explain: Callable[[dict[str, Any]], str],
        account: TimeAccount | None = None,
        last_sign: Mapping[str, Any] = MappingProxyType({}),
    ) -> AttemptLog:
        """Close the entry of a killed attempt, if any, and open an entry for this attempt.

        Args:
            run: the run directory, with the guard of its lease, which must be held.
            identity: job_id, submission, restart_count, host and node of this attempt.
            total: the step to train to, or None if not yet known.
            explain: takes the record of an attempt without a recorded end, and returns the likely cause of the end.
            account: this attempt's time account; by default a new one.
            last_sign: the object in the previous attempt's last heartbeat, see `sign`.

        Raises:
            SupersededError: a newer process holds the lease.
            OSError: the records of earlier attempts cannot be read.
        """
        account = account or TimeAccount()
        with suppress(OSError):  # missing, or the disk is read-only
            files.look_anew(run.checkpoints)  # another machine may have committed the newest checkpoint
        log = AttemptLog(run, total, ended_attempts(run), account=account, _kept=_lines(run.attempts))
        left = files.read_object(run.attempt)
        if isinstance(left.get("attempt"), int) and left["attempt"] not in [line["attempt"] for line in log.earlier]:
            noted = left.get("cause")
            # When a rank dies, srun sends the remaining ranks a signal before it kills them, so "interrupted" alone
            # proves nothing.
            cause = explain(left) if noted in (None, "interrupted") else str(noted)
            time = latest(left["attempt"], files.read_object(run.status), last_sign)
            log.record = left
            log._close(cause, None, last_step(run), time)
            log.record = {}
        number = max((line["attempt"] for line in log.earlier), default=0) + 1
        start = {"started": clock.wall(), "start_step": run.newest_step(), "total": total}
        log.note(attempt=number, **identity, pid=processes.own_pid(), **start)
        log.update(state="running", step=log.record["start_step"], cause=log.last_cause, force=True)
        return log

    @property
    def title(self) -> str:
        """Return the line to print at the start of an attempt, with its number, node and time."""
        job = f", job {self.record['job_id']}" if self.record.get("job_id") else ""
        began = datetime.fromtimestamp(self.record["started"]).strftime("%Y-%m-%d %H:%M:%S")
        return f"attempt {self.record['attempt']} on {self.record.get('node') or self.record.get('host')}{job}, {began}"

    @property
    def last_cause(self) -> str | None:
        return self.earlier[-1]["cause"] if self.earlier else None

    @property
    def ranks_before(self) -> int | None:
        """Return the number of ranks of the last attempt that recorded it, or None."""
        ranks = self.earlier[-1].get("ranks") if self.earlier else None
        return ranks if isinstance(ranks, int) else None

    def check_budgets(self, max_timeouts: int | None = None) -> None:
        """Stop a job that is restarted repeatedly without progress. Call at the start of an attempt.

        Args:
            max_timeouts: number of consecutive time limits allowed. If set, they are not counted as failures; if None,
                they are.

        Raises:
            TimeoutsError: `max_timeouts` time limits in a row without a new checkpoint.
            CrashLoopError: three consecutive attempts of this job failed without a new checkpoint.
        """
        stuck = _without_progress(self.earlier, self.record)
        if max_timeouts is not None:
            self._check_timeouts(len(_timeouts(stuck)), max_timeouts)
            stuck = [attempt for attempt in stuck if attempt["cause"] not in OUT_OF_TIME]
        if len(stuck) >= CRASH_LOOP_LIMIT:
            causes = ", ".join(attempt["cause"] for attempt in reversed(stuck))
            raise CrashLoopError(
                f"{len(stuck)} attempts in a row ended without a new checkpoint ({causes}), at step "
                f"{self.record['start_step']}: not retried. See the logs in {self.run.path}, fix the cause and rerun "
                "the command (with launcher.retry_failed=true in a sweep)"
            )

    def check_timeouts(self, max_timeouts: int | None) -> None:
        """Stop a job that reached its time limit too often. Call at the end of an attempt that did.

        Raises:
            TimeoutsError: with this attempt, `max_timeouts` time limits in a row without a new checkpoint.
            FileError: the checkpoints cannot be listed, even after retries.
        """
        if max_timeouts is None:
            return
        if insist(self.run.newest_step, self.run.checkpoints) > int(self.record["start_step"]):
            return
        stuck = _without_progress(self.earlier, self.record)
        self._check_timeouts(1 + len(_timeouts(stuck)), max_timeouts)

    def _check_timeouts(self, timeouts: int, most: int) -> None:
        if timeouts >= most:
            raise TimeoutsError(
                f"{timeouts} time limits in a row without a new checkpoint, at step {self.record['start_step']} "
                f"(launcher.max_timeouts={most}): increase launcher.time, or save more often (checkpoint.every_steps, "
                "checkpoint.every_minutes); then rerun the command (with launcher.retry_failed=true in a sweep)"
            )

    def resumed(self, step: int) -> None:
        """Record the step of this resume. It is lower than the newest checkpoint's step if that is corrupt."""
        self.note(start_step=step, total=self.total)
        self.update(step=step, force=True)

    def note(self, **entries: Any) -> None:
        """Write entries to this attempt's record immediately, in case it is killed. Any thread may call this."""
        with self._lock:
            if "ended" not in self.record:
                self.record = {**self.record, **entries}
                self._unwritten.add(self.run.attempt)
                self._flush()

    def warn(self, message: str) -> None:
        """Add an error that training survives, such as a full disk, to the status. Any thread may call this."""
        with self._lock, suppress(SupersededError):  # the training thread will notice this too
            self.warnings = [*self.warnings, message][-MAX_WARNINGS:]
            self.update(force=True)

    def update(self, force: bool = False, **entries: Any) -> None:
        """Refresh status.json if it is older than two seconds, or if `force` is set.

        Do not fsync, so that training does not wait for the disk. After a power loss, the other records replace
        status.json.
        """
        self.status.update({key: value for key, value in entries.items() if value is not None})
        now = clock.monotonic()
        if not force and now - self._updated < UPDATE_INTERVAL_S:
            return
        self._updated = now
        with self._lock, suppress(OSError):  # a full or read-only disk is reported where it matters: by the save
            self._flush()
            self._write_status()

    def sign(self) -> dict[str, Any]:
        """Return the object that each heartbeat stores.

        If this attempt is killed, the object shows how its time was spent.
        """
        return {"attempt": self.record["attempt"], "time": self.account.state()}

    def _write_status(self) -> None:
        with self._lock:
            keys = ("job_id", "submission", "job_name", "launcher", "restart_count", "host", "node", "ranks", "pid")
            identity = {key: self.record.get(key) for key in keys}
            status = {
                "state": "running",
                **self.status,
                **identity,
                "attempt": self.record["attempt"],
                "time": self.account.state(),
                "total": self.total,
                "attempts": len(self.earlier) + (0 if self.record.get("ended") else 1),
                "steps_lost": _steps_lost(self.earlier),
                "updated": clock.wall(),
                "warnings": self.warnings,
            }
            status["checkpoint_step"], status["checkpoint_time"] = self.run.newest_checkpoint() or (None, None)
            files.write_json(self.run.status, status, durable=False, guard=self.run.guard)

    @property
    def step(self) -> int:
        """Return the last step that this attempt completed, or the step at which it began."""
        return int(self.status.get("step") or self.record["start_step"])

    def announce_end(self, cause: str) -> None:
        """Record why this attempt is about to end, because it may be killed while it requeues its job."""
        self.note(cause=cause)
        self.update(state=self._state_after(cause), cause=cause, force=True)

    def end(self, cause: str, status: int, reason: str | None = None) -> None:
        """Close this attempt's entry and record the state of the run.

        Args:
            cause: why the attempt ended.
            status: its exit status.
            reason: the error, if it failed.

        Raises:
            FileError: the disk refuses the entry at every attempt to write it.
        """
        why = {"reason": reason} if reason else {}
        # `_close` lists the checkpoints, which may fail too.
        insist(lambda: self._close(cause, status, self.step, self.account.state(), **why), self.run.attempts)
        insist(self._write_all, self.run.attempts)
        self.status.update(state=self._state_after(cause), cause=cause, **why)
        with suppress(FileError):  # the other records contain the same facts
            insist(self._write_status, self.run.status)

    def _state_after(self, cause: str) -> str:
        if cause == "interrupted" and self.auto_restarts:
            return "requeued"
        return STATE_AFTER.get(cause, "failed")

    def _close(self, cause: str, status: int | None, end_step: int, time: Any, **entries: str) -> None:
        """Close the entry in `record`. `time` is the last state of the attempt's `TimeAccount`, or None if unknown."""
        saved = self.run.newest_step()
        boundary = end_step if status in BETWEEN_STEPS else None
        with self._lock:
            record = self.record  # only under the lock: a thread may replace it
            record.update(
                ended=clock.wall(),
                end_step=end_step,
                checkpoint_step=saved,
                steps_lost=max(0, end_step - saved),
                cause=cause,
                exit=status,
                **closed(time, int(record.get("start_step") or 0), saved, boundary),
                **entries,
            )
            if not any(line is record for line in self._closed):  # an end that cannot be recorded is a failure
                self._closed.append(record)
                self.earlier.append(record)
            self._unwritten |= {self.run.attempts, self.run.attempt}
            self._flush()

    def _flush(self) -> None:
        """Write all records that are not written yet, the ended attempts first."""
        try:
            self._write_all()
        except OSError as error:
            message = f"{error.filename or self.run.attempt} cannot be written ({error.strerror}); it will be retried"
            self.warnings = [*(line for line in self.warnings if line != message), message][-MAX_WARNINGS:]

    def _write_all(self) -> None:
        with self._lock:
            guard = self.run.guard
            if self.run.attempts in self._unwritten:
                added = "".join(json.dumps(line) + "\n" for line in self._closed)
                files.write_atomic(self.run.attempts, self._kept + added.encode(), guard=guard)
                self._unwritten.discard(self.run.attempts)
            if self.run.attempt in self._unwritten:
                files.write_json(self.run.attempt, {} if "ended" in self.record else self.record, guard=guard)
                self._unwritten.discard(self.run.attempt)


def insist(write: Callable[[], T], path: Path) -> T:
    """Call `write`, up to WRITE_TRIES times if the disk refuses. For records that a run needs.

    Raises:
        FileError: the disk refuses every time.
    """
    tries = 1
    while True:
        try:
            return write()
        except OSError as error:
            if tries == WRITE_TRIES:
                raise FileError(
                    f"{path} cannot be written ({error.strerror or error}): free space or restore the permission, "
                    "then rerun the command"
                ) from error
        tries += 1
        clock.sleep(WRITE_PAUSE_S)


def _lines(path: Path) -> bytes:
    """Read a `.jsonl` file, and complete its last line with a line break. Return b"" if there is no file."""
    try:
        data = files.read_regular(path)
    except FileNotFoundError:
        return b""
    return data if data.endswith(b"\n") or not data else data + b"\n"

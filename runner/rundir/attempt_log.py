"""The attempt log of a run: attempt.json, attempts.jsonl, status.json and the completion mark.

An attempt that is killed cannot record how it ended; the next one does it. Nothing here imports torch, hydra or numpy.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from runner.errors import CrashLoopError, SupersededError
from runner.rundir.paths import RunDir
from runner.system import clock, files

# Causes that are not the run's own failure: it was asked to stop, or its machine was needed for something else.
HARMLESS = frozenset({"finished", "preempted", "requeued", "cancelled", "interrupted", "superseded"})
CRASH_LOOP_LIMIT = 3
TIME_LIMIT = "time limit"
UPDATE_INTERVAL_S = 2.0
MAX_WARNINGS = 10
METRICS_TAIL = 1 << 16  # bytes

# The state of a run after an attempt that ended for this cause; any other cause: failed.
STATE_AFTER = {
    "finished": "finished",
    "preempted": "requeued",
    "requeued": "requeued",
    TIME_LIMIT: "requeued",
    "cancelled": "cancelled",
    "interrupted": "interrupted",
    "crash loop": "crash loop",
    "superseded": "running",
}


def last_record(run: RunDir) -> dict[str, Any]:
    """The record of the last step in metrics.jsonl; empty if there is none."""
    try:
        lines = files.read_tail(run.metrics, METRICS_TAIL).split(b"\n")
    except FileNotFoundError:
        return {}
    for line in reversed(lines[:-1]):  # the last one is empty or incomplete
        with suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict) and "loss" in record and isinstance(record.get("step"), int):
                return record
    return {}


def last_step(run: RunDir) -> int:
    """The last step in metrics.jsonl; 0 if there is none."""
    return int(last_record(run).get("step", 0))


def finished_at(run: RunDir) -> int:
    """The number of steps at which the run finished; 0 if it has not."""
    steps = files.read_object(run.finished).get("steps")
    return steps if isinstance(steps, int) else 0


def ended_attempts(run: RunDir) -> list[dict[str, Any]]:
    """The lines of attempts.jsonl, without any that a disk error or an edit has made invalid."""
    return [line for line in files.read_lines(run.attempts, limit=files.MAX_RECORD_BYTES) if _is_ended(line)]


def _is_ended(line: Any) -> bool:
    if not isinstance(line, dict) or not isinstance(line.get("cause"), str):
        return False
    numbers = [line.get(key) or 0 for key in ("start_step", "checkpoint_step", "steps_lost")]
    return all(isinstance(number, int) for number in (line.get("attempt"), *numbers))


def status_of(run: RunDir) -> dict[str, Any]:
    """The content of status.json, or if it is missing or broken, what the other records show. Empty if not started."""
    return files.read_object(run.status) or _status_from_records(run)


def _status_from_records(run: RunDir) -> dict[str, Any]:
    ended = ended_attempts(run)
    current = files.read_object(run.attempt)
    finished = finished_at(run)
    if not (ended or current or finished):
        return {}
    last = current or (ended[-1] if ended else {})
    cause = ended[-1]["cause"] if ended else None
    state = "running" if current else "finished" if finished else STATE_AFTER.get(str(cause), "failed")
    record = last_record(run)
    return {
        **{key: last.get(key) for key in ("job_id", "node", "reason", "total")},
        **{key: record.get(key) for key in ("step", "loss")},
        "state": state,
        "cause": cause,
        "attempts": len(ended) + bool(current),
        "steps_lost": _steps_lost(ended),
        "updated": last.get("ended") or last.get("started"),
    }


def _steps_lost(attempts: list[dict[str, Any]]) -> int:
    return sum(attempt.get("steps_lost") or 0 for attempt in attempts)


def _without_progress(attempts: list[dict[str, Any]], job_id: str | None) -> list[dict[str, Any]]:
    """The latest consecutive attempts of this job that failed without a new checkpoint, newest first."""

    def stuck(attempt: dict[str, Any]) -> bool:
        gained = (attempt.get("checkpoint_step") or 0) - (attempt.get("start_step") or 0)
        return attempt.get("job_id") == job_id and attempt["cause"] not in HARMLESS and gained <= 0

    return list(takewhile(stuck, reversed(attempts)))


@dataclass
class AttemptLog:
    """The log of one attempt, on rank 0. Every write is behind the fence: a superseded process changes nothing.

    Methods that write raise SupersededError once a newer process holds the lease.
    """

    run: RunDir
    total: int
    check_fence: Callable[[], None] | None
    earlier: list[dict[str, Any]]
    record: dict[str, Any] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    auto_restarts: bool = False  # the scheduler restarts the job, where otherwise a person reruns the command
    _lock: threading.Lock = field(default_factory=threading.Lock)  # `note` is called from a thread as well
    _updated: float = float("-inf")

    @staticmethod
    def begin(
        run: RunDir,
        identity: dict[str, Any],
        total: int,
        explain: Callable[[dict[str, Any]], str],
        check_fence: Callable[[], None] | None = None,
    ) -> AttemptLog:
        """Close the entry of an attempt that was killed, if there is one, and open this attempt's.

        Args:
            run: the run directory; its lease must be held.
            identity: job_id, restart_count, host and node of this attempt.
            total: the number of steps to train to.
            explain: the likely cause of the end of an attempt that did not record it, from its record.
            check_fence: raises SupersededError if this process no longer holds the lease.

        Raises:
            SupersededError: a newer process holds the lease.
        """
        log = AttemptLog(run, total, check_fence, ended_attempts(run))
        left = files.read_object(run.attempt)
        if isinstance(left.get("attempt"), int) and left["attempt"] not in [line["attempt"] for line in log.earlier]:
            noted = left.get("cause")
            # When a rank dies, srun signals the others before it kills them: "interrupted" alone proves nothing.
            cause = explain(left) if noted in (None, "interrupted") else str(noted)
            log._close(left, cause, None, last_step(run))
        number = max((line["attempt"] for line in log.earlier), default=0) + 1
        start = {"started": clock.wall(), "start_step": max(run.checkpoint_steps(), default=0), "total": total}
        log.record = {"attempt": number, **identity, "pid": os.getpid(), **start}
        log._write_record()
        log.update(state="running", step=log.record["start_step"], cause=log.last_cause, force=True)
        return log

    @property
    def last_cause(self) -> str | None:
        return self.earlier[-1]["cause"] if self.earlier else None

    def check_crash_loop(self, max_timeouts: int | None = None) -> None:
        """Stop a job that is restarted again and again without progress.

        Args:
            max_timeouts: the limit for time limits, which then do not count here (see `timeouts`); None: they count.

        Raises:
            CrashLoopError: three consecutive attempts of this job failed without a new checkpoint.
        """
        stuck = _without_progress(self.earlier, self.record.get("job_id"))
        if max_timeouts is not None:
            stuck = [attempt for attempt in stuck if attempt["cause"] != TIME_LIMIT]
        if len(stuck) >= CRASH_LOOP_LIMIT:
            causes = ", ".join(attempt["cause"] for attempt in reversed(stuck))
            raise CrashLoopError(
                f"{len(stuck)} attempts in a row ended without a new checkpoint ({causes}), at step "
                f"{self.record['start_step']}: not retried. See the logs in {self.run.path}, fix the cause and rerun "
                "the command (with launcher.retry_failed=true in a sweep)"
            )

    def timeouts(self) -> int:
        """Consecutive time limits of this job without a new checkpoint, this attempt included; 0 if it made one."""
        if max(self.run.checkpoint_steps(), default=0) > int(self.record["start_step"]):
            return 0
        stuck = _without_progress(self.earlier, self.record.get("job_id"))
        return 1 + len([attempt for attempt in stuck if attempt["cause"] == TIME_LIMIT])

    def resumed(self, step: int) -> None:
        """Record the step at which this attempt resumes: below the newest checkpoint's if that one is corrupt."""
        with self._lock:
            self.record["start_step"] = step
            self._write_record()
        self.update(step=step, force=True)

    def note(self, **entries: Any) -> None:
        """Put entries into this attempt's record at once, in case it is killed before it ends.

        A full disk keeps them out of the file, but must not keep the attempt from ending in order.
        """
        with self._lock, suppress(OSError):
            self.record.update(entries)
            if "ended" not in self.record:
                self._write_record()

    def warn(self, message: str) -> None:
        """Show an error that training survives (a full disk, for example) in the status; from any thread."""
        self.warnings = [*self.warnings, message][-MAX_WARNINGS:]
        with suppress(SupersededError):  # the training thread finds out by itself
            self.update(force=True)

    def update(self, force: bool = False, **entries: Any) -> None:
        """Refresh status.json, unless that was done less than two seconds ago; `force`: at once.

        Without fsync, so that training does not wait for the disk: after a power loss, the other records replace it.
        """
        self.status.update({key: value for key, value in entries.items() if value is not None})
        now = clock.monotonic()
        if not force and now - self._updated < UPDATE_INTERVAL_S:
            return
        self._updated = now
        identity = {key: self.record.get(key) for key in ("job_id", "restart_count", "host", "node", "pid")}
        status = {
            "state": "running",
            **self.status,
            **identity,
            "total": self.total,
            "attempts": len(self.earlier) + (0 if self.record.get("ended") else 1),
            "steps_lost": _steps_lost(self.earlier),
            "updated": clock.wall(),
            "warnings": self.warnings,
        }
        with suppress(OSError):  # a full or read-only disk is reported where it matters: by the save
            status["checkpoint_step"], status["checkpoint_time"] = self.run.newest_checkpoint() or (None, None)
            files.write_json(self.run.status, status, durable=False, check=self.check_fence)

    @property
    def step(self) -> int:
        """The last step that this attempt completed, or its first one."""
        return int(self.status.get("step") or self.record["start_step"])

    def announce_end(self, cause: str) -> None:
        """Record why this attempt is about to end: it may be killed while it requeues its job."""
        self.note(cause=cause)
        self.update(state=self._state_after(cause), cause=cause, force=True)

    def end(self, cause: str, status: int, reason: str | None = None) -> None:
        """Close this attempt's entry and record the state of the run.

        Args:
            cause: why the attempt ended.
            status: its exit status.
            reason: the error, if it failed.
        """
        if reason:
            self.record["reason"] = reason
        self._close(self.record, cause, status, self.step)
        self.update(state=self._state_after(cause), cause=cause, reason=reason, force=True)

    def _state_after(self, cause: str) -> str:
        if cause == "interrupted" and self.auto_restarts:
            return "requeued"
        return STATE_AFTER.get(cause, "failed")

    def _check_fence(self) -> None:
        if self.check_fence is not None:
            self.check_fence()

    def _write_record(self) -> None:
        files.write_json(self.run.attempt, self.record, check=self.check_fence)

    def _close(self, record: dict[str, Any], cause: str, status: int | None, end_step: int) -> None:
        saved = max(self.run.checkpoint_steps(), default=0)
        with self._lock:
            record.update(
                ended=clock.wall(),
                end_step=end_step,
                checkpoint_step=saved,
                steps_lost=max(0, end_step - saved),
                cause=cause,
                exit=status,
            )
            self._check_fence()
            files.append_line(self.run.attempts, record)
            self.earlier.append(record)
            self._check_fence()
            files.remove(self.run.attempt)

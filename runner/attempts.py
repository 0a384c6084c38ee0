"""The bookkeeping of attempts: attempt.json, attempts.jsonl, status.json and the completion mark.

An attempt that is killed cannot say how it ended; the next one closes its line. Nothing here imports
torch, hydra or numpy.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from runner.errors import CrashLoopError
from runner.files import append_line, read_lines, read_object, write_json
from runner.run_dir import RunDir

# Ends that say nothing against the run: it was asked to stop, or somebody else needed the machine.
HARMLESS = frozenset({"finished", "preempted", "requeued", "cancelled", "interrupted", "superseded"})
CRASH_LOOP_LIMIT = 3
TIME_LIMIT = "time limit"

STATES = {
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
    """The record of the last step that metrics.jsonl knows of; empty where there is none."""
    steps = [record for record in tail(run) if isinstance(record, dict) and "loss" in record]
    return max(steps, key=lambda record: int(record["step"]), default={})


def last_step(run: RunDir) -> int:
    """The last step that metrics.jsonl knows of; 0 where there is none."""
    return int(last_record(run).get("step", 0))


def finished_at(run: RunDir) -> int:
    """The steps that the run was finished at; 0 while it is not."""
    return int(read_object(run.finished).get("steps") or 0)


def ended_attempts(run: RunDir) -> list[dict[str, Any]]:
    """The lines of attempts.jsonl; what a disk or a hand has made of one is left out."""
    return [line for line in read_lines(run.attempts) if isinstance(line, dict) and {"attempt", "cause"} <= line.keys()]


def status_of(run: RunDir) -> dict[str, Any]:
    """What status.json says; where it is missing or broken, what the other books tell. Empty before the start."""
    return read_object(run.status) or _status_from_books(run)


def _status_from_books(run: RunDir) -> dict[str, Any]:
    ended = ended_attempts(run)
    under_way = read_object(run.attempt)
    finished = finished_at(run)
    if not (ended or under_way or finished):
        return {}
    last = under_way or (ended[-1] if ended else {})
    cause = ended[-1]["cause"] if ended else None
    state = "running" if under_way else "finished" if finished else STATES.get(str(cause), "failed")
    newest = last_record(run)
    return {
        **{key: last.get(key) for key in ("job_id", "node", "reason")},
        **{key: newest.get(key) for key in ("step", "loss")},
        "state": state,
        "cause": cause,
        "attempts": len(ended) + bool(under_way),
        "steps_lost": sum(line.get("steps_lost") or 0 for line in ended),
        "updated": last.get("ended") or last.get("started"),
    }


def tail(run: RunDir, size: int = 1 << 16) -> Iterable[Any]:
    """The records in the last `size` bytes of metrics.jsonl."""
    import json

    try:
        with open(run.metrics, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - size))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    records = []
    for line in lines[:-1]:  # a line without its end was cut short
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def without_progress(lines: list[dict[str, Any]], job_id: str | None) -> list[dict[str, Any]]:
    """The newest attempts of this job, one after the other, that failed and brought no checkpoint further."""

    def stuck(line: dict[str, Any]) -> bool:
        gained = (line.get("checkpoint_step") or 0) - (line.get("start_step") or 0)
        return line.get("job_id") == job_id and line["cause"] not in HARMLESS and gained <= 0

    return list(takewhile(stuck, reversed(lines)))


@dataclass
class AttemptLog:
    """One attempt's entry in the books. Only rank 0 has one."""

    run: RunDir
    total: int
    record: dict[str, Any]
    earlier: list[dict[str, Any]]
    status: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)  # the cause is noted by a thread
    comes_back: bool = False  # the scheduler starts the job again where a person would give the command again
    _updated: float = 0.0

    @staticmethod
    def begin(
        run: RunDir,
        identity: dict[str, Any],
        total: int,
        explain: Callable[[dict[str, Any]], str],
    ) -> AttemptLog:
        """Close the attempt that was killed, if one was, and open this one.

        Args:
            run: the run directory; its lease must be held.
            identity: job_id, restart_count, host and node of this attempt.
            total: the steps the run is to have.
            explain: the likely cause of the end of an attempt that left no word (its record is given).
        """
        log = AttemptLog(run, total, {}, ended_attempts(run))
        left = read_object(run.attempt)
        if left.get("attempt") and left["attempt"] not in [line.get("attempt") for line in log.earlier]:
            noted = left.get("cause")
            # A signal without a reason and then a kill: the end of a job one of whose ranks has died, say.
            cause = explain(left) if noted in (None, "interrupted") else noted
            log._close(left, cause, None, last_step(run))
        number = max((line["attempt"] for line in log.earlier), default=0) + 1
        log.record = {"attempt": number, **identity, "pid": os.getpid(), "started": time.time(), "start_step": None}
        log.record["start_step"] = max(run.checkpoint_steps(), default=0)
        write_json(run.attempt, log.record)
        log.update(state="running", step=log.record["start_step"], cause=log.last_cause, force=True)
        return log

    @property
    def last_cause(self) -> str | None:
        return self.earlier[-1]["cause"] if self.earlier else None

    @property
    def steps_lost(self) -> int:
        """Steps trained more than once, over all attempts so far."""
        return sum(line.get("steps_lost") or 0 for line in self.earlier)

    def check_crash_loop(self, max_timeouts: int | None = None) -> None:
        """Stop a job that is restarted again and again without getting further.

        Args:
            max_timeouts: time limits have this budget of their own (see `timeouts`); None: they count as well.

        Raises:
            CrashLoopError: three attempts of this job in a row ended badly without a new checkpoint.
        """
        stuck = without_progress(self.earlier, self.record.get("job_id"))
        if max_timeouts is not None:
            stuck = [line for line in stuck if line["cause"] != TIME_LIMIT]
        if len(stuck) >= CRASH_LOOP_LIMIT:
            causes = ", ".join(str(line["cause"]) for line in reversed(stuck))
            raise CrashLoopError(
                f"{len(stuck)} attempts in a row ended without a new checkpoint ({causes}), at step "
                f"{self.record['start_step']}: not tried again. See the logs in {self.run.path}, mend the cause, "
                "and give the same command once more (with launcher.retry_failed=true in a sweep)"
            )

    def timeouts(self) -> int:
        """Time limits of this job in a row without a new checkpoint, this attempt's included; 0 if it made one."""
        if max(self.run.checkpoint_steps(), default=0) > int(self.record["start_step"]):
            return 0
        stuck = without_progress(self.earlier, self.record.get("job_id"))
        return 1 + len([line for line in stuck if line["cause"] == TIME_LIMIT])

    def resumed(self, step: int) -> None:
        """Say at which step this attempt really goes on (lower than the newest if that was damaged)."""
        with self._lock:
            self.record["start_step"] = step
            write_json(self.run.attempt, self.record)
        self.update(step=step, force=True)

    def note(self, **entries: Any) -> None:
        """Put entries into this attempt's record at once, in case it is killed before its end.

        A disk that is full keeps them out, and must not keep the attempt from leaving in order.
        """
        with self._lock, suppress(OSError):
            self.record.update(entries)
            if "ended" not in self.record:
                write_json(self.run.attempt, self.record)

    def fault(self, message: str) -> None:
        """Keep a fault that training survived (a full disk, say) in the status."""
        self.faults = [*self.faults[-9:], message]
        self.update(force=True)

    def update(self, force: bool = False, **entries: Any) -> None:
        """Refresh status.json, at most every two seconds unless forced; a full disk does not matter."""
        self.status.update({key: value for key, value in entries.items() if value is not None})
        now = time.monotonic()
        if not force and now - self._updated < 2.0:
            return
        self._updated = now
        identity = {key: self.record.get(key) for key in ("job_id", "restart_count", "host", "node", "pid")}
        status = {
            "state": "running",
            **self.status,
            **identity,
            "total": self.total,
            "attempts": len(self.earlier) + (0 if self.record.get("ended") else 1),
            "steps_lost": self.steps_lost,
            "updated": time.time(),
            "faults": self.faults,
        }
        try:
            saved = self.run.newest_checkpoint()
            status["checkpoint_step"], status["checkpoint_time"] = saved or (None, None)
            write_json(self.run.status, status)
        except OSError:
            return  # a full or read-only disk is reported where it harms: at the save

    @property
    def step(self) -> int:
        """The last step that is in the metrics, which is the state of this attempt."""
        return int(self.status.get("step") or self.record["start_step"])

    def leaving(self, cause: str) -> None:
        """Say why this attempt is about to end: it may be killed while it sees to its coming back."""
        self.note(cause=cause)
        self.update(state=self._state(cause), cause=cause, force=True)

    def drop(self) -> None:
        """Forget this attempt: there was nothing to do."""
        with self._lock:
            self.run.attempt.unlink(missing_ok=True)
            self.record["ended"] = time.time()
        self.update(state="finished", cause="finished", force=True)

    def end(self, cause: str, status: int, reason: str | None = None) -> None:
        """Write this attempt's line, and the run's state with it; `reason` says more where it failed."""
        if reason:
            self.record["reason"] = reason
        self._close(self.record, cause, status, self.step)
        self.update(state=self._state(cause), cause=cause, reason=reason, force=True)

    def _state(self, cause: str) -> str:
        if cause == "interrupted" and self.comes_back:
            return "requeued"
        return STATES.get(cause, "failed")

    def _close(self, record: dict[str, Any], cause: str, status: int | None, end_step: int) -> None:
        saved = max(self.run.checkpoint_steps(), default=0)
        with self._lock:
            record.update(
                ended=time.time(),
                end_step=end_step,
                checkpoint_step=saved,
                steps_lost=max(0, end_step - saved),
                cause=cause,
                exit=status,
            )
            append_line(self.run.attempts, record)
            self.earlier.append(record)
            self.run.attempt.unlink(missing_ok=True)

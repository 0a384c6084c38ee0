"""A scheduler's job around an attempt in this process. It may request a stop before the attempt begins."""

from __future__ import annotations

from typing import Any

from runner.system import clock


class FakeJob:
    """A job that counts requests and, like a Slurm job, requeues unless it was cancelled."""

    auto_restarts = False  # no thread that listens for signals
    max_timeouts: int | None = None

    def __init__(self, restart_count: int = 0, early_signal: int | None = None) -> None:
        self.restart_count = restart_count
        self.early_signal = early_signal
        self.requeued: list[str] = []
        self.starts = 0
        self.verdicts = 0

    def identity(self) -> dict[str, Any]:
        return {"job_id": "7", "restart_count": self.restart_count, "host": "here", "node": "n1"}

    def began(self) -> float:
        return clock.monotonic()

    def waited(self) -> dict[str, float]:
        return {}

    def cause(self, signum: int) -> str:
        return "preempted"

    def cause_of_loss(self, record: dict[str, Any]) -> str:
        return "killed"

    def on_started(self) -> None:
        self.starts += 1

    def yield_verdict(self, reason: str | None = None) -> bool:
        return False

    def record_verdict(self) -> None:
        self.verdicts += 1

    def requeue_if_needed(self, cause: str) -> str:
        self.requeued.append(cause)
        return cause

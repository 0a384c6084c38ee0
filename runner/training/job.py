"""Implement the job of an attempt (`runner.contracts.Job`) for a process that was started by hand."""

from __future__ import annotations

from typing import Any

from runner.system import processes


class LocalJob:
    """A process on this machine. Its run resumes only if you rerun the command."""

    auto_restarts = False
    max_timeouts: int | None = None
    early_signal: int | None = None

    def identity(self) -> dict[str, Any]:
        job_id, host = processes.environment.get("TORCHELASTIC_RUN_ID"), processes.host_name()
        return {"job_id": job_id, "restart_count": 0, "host": host, "node": None}

    def began(self) -> float:
        return processes.began()

    def waited(self) -> dict[str, float]:
        return {}  # there is no queue

    def cause(self, signum: int) -> str:
        return "interrupted"

    def cause_of_loss(self, record: dict[str, Any]) -> str:
        return "killed"

    def on_started(self) -> None:
        """Do nothing, because no scheduler counts attempts."""

    def yield_verdict(self, reason: str | None = None) -> bool:
        return False  # no other process waits for this decision

    def record_verdict(self) -> None:
        """Do nothing, because no other process waits for a verdict."""

    def requeue_if_needed(self, cause: str) -> str:
        return cause  # the exit status reports that a rerun of the command resumes the run

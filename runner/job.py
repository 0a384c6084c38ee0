"""What an attempt knows of the job it runs in: who it is, why it was asked to stop, how it comes back.

The Slurm launcher hands in an object of this shape; without one, an attempt is a process somebody started.
"""

from __future__ import annotations

import os
import socket
from typing import Any, Protocol


class Job(Protocol):
    """The job of one attempt."""

    auto_restarts: bool
    """Whether the attempt is restarted without anybody asking, so that crash loops must be stopped."""

    max_timeouts: int | None
    """Time limits in a row without a new checkpoint, after which the run stops; None: they count as failures."""

    def identity(self) -> dict[str, Any]:
        """job_id, restart_count, host and node."""

    def cause(self, signum: int) -> str:
        """Why `signum` came: preempted, time limit, cancelled, requeued or interrupted."""

    early_signal: int | None
    """A signal that came before the attempt's handlers were there."""

    def begun(self) -> None:
        """The attempt is in the books."""

    def defer(self) -> None:
        """This rank only follows another to the end, which is for that one to judge (it may be gone, or silent)."""

    def leave(self, cause: str) -> str:
        """After the save, on rank 0 alone: see to it that the run comes back if `cause` says so.

        Returns the cause that holds in the end (a job may be cancelled while it saves).
        """


class LocalJob:
    """A process on this machine, started by hand; nothing brings it back but the same command."""

    auto_restarts = False
    max_timeouts: int | None = None
    early_signal: int | None = None

    def identity(self) -> dict[str, Any]:
        host = socket.gethostname()
        return {"job_id": os.environ.get("TORCHELASTIC_RUN_ID"), "restart_count": 0, "host": host, "node": None}

    def cause(self, signum: int) -> str:
        return "interrupted"

    def begun(self) -> None:
        """Nobody else counts."""

    def defer(self) -> None:
        """Nobody judges."""

    def leave(self, cause: str) -> str:
        return cause  # the exit status says that the same command goes on

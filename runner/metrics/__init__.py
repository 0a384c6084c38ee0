"""Where a run's metrics go: one small protocol, and the writers behind it.

Importing this package imports none of the libraries that a writer needs.
"""

from __future__ import annotations

from typing import Any, Protocol

from runner.metrics.jsonl import JsonlWriter, resume_jsonl

__all__ = ["JsonlWriter", "Writer", "resume_jsonl"]


class Writer(Protocol):
    """Takes records in order of step: one a step, and one an evaluation (with `eval_loss`)."""

    def write(self, record: dict[str, Any]) -> None:
        """Take one record; it has `step`, the number of steps complete."""

    def flush(self) -> None:
        """Hand on what is buffered."""

    def close(self) -> None:
        """Flush and end; nothing is written afterwards."""

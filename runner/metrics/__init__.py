"""Where a run's metrics go: a small protocol, and the writers that implement it.

Importing this package imports none of the libraries that the writers need.
"""

from __future__ import annotations

from typing import Any, Protocol

from runner.metrics.jsonl import JsonlWriter, resume_jsonl, resume_records

__all__ = ["JsonlWriter", "Writer", "resume_jsonl", "resume_records"]


class Writer(Protocol):
    """Takes records in order of step: one per step, and one per evaluation (with `eval_loss`)."""

    def write(self, record: dict[str, Any]) -> None:
        """Take one record; its `step` is the number of completed steps."""

    def flush(self) -> None:
        """Send what is buffered."""

    def close(self) -> None:
        """Flush and close; nothing is written afterwards."""

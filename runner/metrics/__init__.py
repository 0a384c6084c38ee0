"""Writers of a run's metrics, and the protocol that they implement.

Importing this package imports none of the libraries that the writers need.
"""

from __future__ import annotations

from typing import Any, Protocol

from runner.metrics.jsonl import JsonlWriter, resume_jsonl, resume_records

__all__ = ["JsonlWriter", "Writer", "resume_jsonl", "resume_records"]


class Writer(Protocol):
    """A receiver of records in order of step: one per step, and one per evaluation (with `eval_loss`)."""

    def write(self, record: dict[str, Any]) -> None:
        """Write one record. Its `step` is the number of completed steps."""

    def flush(self) -> None:
        """Send buffered records."""

    def close(self) -> None:
        """Flush and close. Nothing is written afterwards."""

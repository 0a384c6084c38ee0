"""Writers of a run's metrics, and the protocol that they implement.

Importing this package imports none of the libraries that the writers need.
"""

from __future__ import annotations

from typing import Any, Protocol

from runner.metrics.jsonl import JsonlWriter, resume_jsonl, resume_records

__all__ = ["JsonlWriter", "Writer", "resume_jsonl", "resume_records"]


class Writer(Protocol):
    """A receiver of records in order of step: one per step, and one per evaluation (with `eval_loss`).

    Example:
        >>> class LastLoss:  # select it with +logger.last._target_=module.LastLoss
        ...     def __init__(self, run, step, report):
        ...         self.path = run.path / "last_loss.txt"
        ...     def write(self, record):
        ...         if "loss" in record:
        ...             self.path.write_text(f"{record['step']} {record['loss']:.3f}")
        ...     def flush(self):
        ...         pass
        ...     def close(self):
        ...         pass
    """

    def write(self, record: dict[str, Any]) -> None:
        """Write one record. Its `step` is the number of completed steps."""

    def flush(self) -> None:
        """Send buffered records."""

    def close(self) -> None:
        """Flush and close. Nothing is written afterwards."""

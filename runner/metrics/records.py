"""Decide which sources a line of metrics.jsonl names, and read the lines with the other sources filled in.

With a thousand sources, the samples consumed per source would be most of every line. With many sources, a step's line
therefore names only the sources of its batch, because only their numbers have changed since the line before. This
depends only on the step, not on resumes or ranks. Every `ALL_EVERY_STEPS` steps a line names all sources, so that you
can start reading in the middle of a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from runner.system import files

CARRIED = "sources"
"""Key of a record. Its entries stay valid until a later record names them again."""
ALL_EVERY_STEPS = 1000
FEW = 16
"""Up to this number of sources, every line names all of them."""


def names_all(step: int, sources: int) -> bool:
    """Check whether the line of a step (from 1) names all sources."""
    return sources <= FEW or step == 1 or step % ALL_EVERY_STEPS == 0


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a metrics.jsonl. Step records are filled in with every source named so far.

    Lines that are not records of a step or of an evaluation are skipped.

    Raises:
        OSError: see `files.read_lines`.
    """
    sources: dict[str, Any] = {}
    for record in files.read_lines(path):
        if isinstance(record, dict) and type(record.get("step")) is int:
            if isinstance(record.get(CARRIED), Mapping):
                sources = {**sources, **record[CARRIED]}
                record[CARRIED] = sources
            yield record

"""Which sources a line of metrics.jsonl names, and the reader that completes the lines.

With a thousand sources, what each has given so far would be most of a line, again and again. So where there are many,
the line of a step names the sources of that step's batch, whose numbers are the only ones that have changed since the
line before. That depends on the step alone, not on where the run was resumed, nor on its ranks. Now and then a line
names all of them, so that whoever begins in the middle of a file need not read it from its beginning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from runner.system import files

CARRIED = "sources"
"""The key of a record whose entries hold until a later record names them again."""
ALL_EVERY_STEPS = 1000
FEW = 16
"""So many sources are named by every line, which then says all by itself."""


def names_all(step: int, sources: int) -> bool:
    """Whether the line of a step, counted from 1, names all of so many sources."""
    return sources <= FEW or step == 1 or step % ALL_EVERY_STEPS == 0


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a metrics.jsonl; those of steps with every source that was named so far.

    Lines that are not the record of a step or of an evaluation are skipped.

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

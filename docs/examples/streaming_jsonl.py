"""JSON lines from any number of files, split into blocks of bytes, resuming at a byte offset."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from exactdata import ShardedStream


class JsonLines(ShardedStream):
    """Read blocks of about `block` bytes: the lines that begin in them. A resume seeks to a byte offset."""

    def __init__(self, files: Sequence[str | Path], block: int = 1 << 20) -> None:
        self.files = [Path(file) for file in files]
        self.block = block

    def units(self) -> list[tuple[Path, int]]:
        return [(file, begin) for file in self.files for begin in range(0, file.stat().st_size, self.block)]

    def read(self, unit: tuple[Path, int], position: int | None) -> Iterator[tuple[Any, int]]:
        file, begin = unit
        with open(file, "rb") as lines:
            lines.seek(max(begin - 1, 0) if position is None else position)
            if begin and position is None:
                lines.readline()  # the rest of a line that begins in the previous block
            while lines.tell() < begin + self.block and (line := lines.readline()):
                yield json.loads(line), lines.tell()

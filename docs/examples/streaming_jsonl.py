"""JSON lines from any number of files, split over ranks and workers, resuming at a byte offset."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset

from runner.data import shard


class JsonLines(IterableDataset[Any]):
    """Each shard yields every `shards`-th line; a resume seeks to the saved byte offset."""

    def __init__(self, files: Sequence[str | Path]) -> None:
        self.files = [Path(file) for file in files]
        self.file = self.byte = self.line = 0

    def __iter__(self) -> Iterator[Any]:
        number, shards = shard()
        while self.file < len(self.files):
            with open(self.files[self.file], "rb") as lines:
                lines.seek(self.byte)
                while text := lines.readline():
                    self.byte, self.line = lines.tell(), self.line + 1
                    if (self.line - 1) % shards == number:
                        yield json.loads(text)
            self.file, self.byte = self.file + 1, 0
        self.file = self.byte = self.line = 0  # the next epoch begins at the start

    def state_dict(self) -> dict[str, int]:
        return {"file": self.file, "byte": self.byte, "line": self.line}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.file, self.byte, self.line = state["file"], state["byte"], state["line"]

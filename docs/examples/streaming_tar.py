"""Samples in tar files, as in WebDataset: members with the same stem are one sample."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset

from runner.data import shard


class TarSamples(IterableDataset[Any]):
    """Each shard reads every `shards`-th file; a resume skips within one file only."""

    def __init__(self, files: Sequence[str | Path]) -> None:
        self.files = [Path(file) for file in files]
        self.file = self.sample = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        number, shards = shard()
        mine = self.files[number::shards]
        while self.file < len(mine):
            for index, sample in enumerate(samples(mine[self.file])):
                if index >= self.sample:
                    self.sample = index + 1
                    yield sample
            self.file, self.sample = self.file + 1, 0
        self.file = 0

    def state_dict(self) -> dict[str, int]:
        return {"file": self.file, "sample": self.sample}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.file, self.sample = state["file"], state["sample"]


def samples(file: Path) -> Iterator[dict[str, Any]]:
    """`{"key": "0001", "txt": b"...", "cls": b"..."}` for each stem in a tar file."""
    current: dict[str, Any] = {}
    with tarfile.open(file) as tar:
        for member in tar:
            key, _, extension = member.name.partition(".")
            if current and current["key"] != key:
                yield current
                current = {}
            content = tar.extractfile(member)
            if content is not None:
                current |= {"key": key, extension: content.read()}
    if current:
        yield current

"""Samples in tar files, as in WebDataset: members with the same stem are one sample."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from exactdata import ShardedStream


class TarSamples(ShardedStream):
    """Read tar files, each by one shard. A resume skips within one file."""

    def __init__(self, files: Sequence[str | Path]) -> None:
        self.files = [Path(file) for file in files]

    def units(self) -> list[Path]:
        return self.files

    def read(self, unit: Path, position: int | None) -> Iterator[tuple[dict[str, Any], int]]:
        numbered = ((sample, done) for done, sample in enumerate(samples(unit), 1))
        return islice(numbered, position, None)


def samples(file: Path) -> Iterator[dict[str, Any]]:
    """Yield `{"key": "0001", "txt": b"...", "cls": b"..."}` for each stem in a tar file."""
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

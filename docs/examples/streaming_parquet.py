"""Rows of Parquet files, split by row group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pyarrow import parquet

from exactdata import ShardedStream


class ParquetRows(ShardedStream):
    """Read Parquet files, each row group by one shard. A resume skips within one row group."""

    def __init__(self, files: Sequence[str | Path], columns: Sequence[str] | None = None) -> None:
        self.files = [str(file) for file in files]
        self.columns = None if columns is None else list(columns)

    def units(self) -> list[tuple[str, int]]:
        counts = [(file, parquet.read_metadata(file).num_row_groups) for file in self.files]
        return [(file, group) for file, count in counts for group in range(count)]

    def read(self, unit: tuple[str, int], position: int | None) -> Iterator[tuple[dict[str, Any], int]]:
        file, group = unit
        first = position or 0
        rows = parquet.ParquetFile(file).read_row_group(group, columns=self.columns).slice(first)
        yield from ((row, done) for done, row in enumerate(rows.to_pylist(), first + 1))

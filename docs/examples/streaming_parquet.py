"""Rows of Parquet files, split by row group; a resume may redistribute them over other ranks and workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pyarrow import parquet
from torch.utils.data import IterableDataset

from runner.data import shard


class ParquetRows(IterableDataset[Any]):
    """Each row group is read by one shard.

    The state lists what remains to be read, as [file, row group, first row], so that it can be redistributed over
    another number of shards: `aggregate_state_dict` collects the remaining parts of all shards,
    `deaggregate_state_dict` assigns them to the new ones.
    """

    def __init__(self, files: Sequence[str | Path], columns: Sequence[str] | None = None) -> None:
        self.files = [str(file) for file in files]
        self.columns = None if columns is None else list(columns)
        self.left: list[list[int]] | None = None

    def groups(self) -> list[list[int]]:
        counts = [parquet.read_metadata(file).num_row_groups for file in self.files]
        return [[file, group, 0] for file, count in enumerate(counts) for group in range(count)]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self.left is None:
            number, shards = shard()
            self.left = self.groups()[number::shards]
        while self.left:
            file, group, first = self.left[0]
            table = parquet.ParquetFile(self.files[file]).read_row_group(group, columns=self.columns)
            rows = table.slice(first).to_pylist()
            for done, row in enumerate(rows, 1):
                if done < len(rows):
                    self.left[0][2] = first + done
                else:
                    del self.left[0]
                yield row
        self.left = None  # the next epoch reads all of them again

    def state_dict(self) -> dict[str, Any]:
        return {"left": None if self.left is None else [list(part) for part in self.left]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left = state["left"]

    def aggregate_state_dict(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {"left": sorted(part for state in states for part in state["left"] or [])}

    def deaggregate_state_dict(self, aggregated: dict[str, Any], number: int, shards: int) -> dict[str, Any]:
        return {"left": aggregated["left"][number::shards]}

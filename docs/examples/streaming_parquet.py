"""Rows of Parquet files, row group by row group, which can be shared out anew over other ranks and workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pyarrow import parquet
from torch.utils.data import IterableDataset

from runner.data import shard


class ParquetRows(IterableDataset[Any]):
    """A row group is read by one shard.

    What is left is a list of [file, row group, first row]. It is in the state, so that the row groups that all
    shards have left can be dealt to another number of them: `aggregate_state_dict` collects them,
    `deaggregate_state_dict` deals them.
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
        self.left = None  # the next epoch has all of them again

    def state_dict(self) -> dict[str, Any]:
        return {"left": None if self.left is None else [list(part) for part in self.left]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left = state["left"]

    def aggregate_state_dict(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {"left": sorted(part for state in states for part in state["left"] or [])}

    def deaggregate_state_dict(self, aggregated: dict[str, Any], number: int, shards: int) -> dict[str, Any]:
        return {"left": aggregated["left"][number::shards]}

"""Plan once which documents are in which row, and memory-map the plan. Does not import torch.

A row has `sequence_length` tokens and consists of *pieces*. A piece is a document, or a part of a long document. With
`packing=best_fit` or `none`, the rows are in this order:

- Full rows, each with `sequence_length` tokens of one long document that `long=split` has split.
- Rows with the remaining tokens of each document. The plan lists the documents in them, row by row.

With `packing=stream`, all documents are joined end to end, and each row is the next `sequence_length` tokens.

    order.npy    documents, row by row (stream: all documents)           4 bytes per document
    starts.npy   index in order.npy where each row begins                4 bytes per row
                 (stream: token offset where each document begins)       8 bytes per document
    long.npy     documents with full rows                                4 bytes per document
    ends.npy     one past the last full row of each such document        4 bytes per document
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from exactdata.documents.best_fit import best_fit
from exactdata.documents.claims import once
from exactdata.documents.prepared import Index, Store, read_json
from exactdata.errors import DataError, nearest
from exactdata.order.arrays import I64
from exactdata.paths import usable_cache

MOST = np.iinfo(np.uint32).max
Pieces = tuple[I64, I64, I64, I64]
"""Index of the row among the requested rows, document, offset of the piece in the document, and length."""


class Packing(Enum):
    """Ways to pack documents into rows."""

    best_fit = "best_fit"
    stream = "stream"
    none = "none"


class Long(Enum):
    """Ways to treat a document with more tokens than a row."""

    split = "split"
    truncate = "truncate"
    drop = "drop"


SPLITS = ("all", "train", "eval")


@dataclass(frozen=True)
class PlanOptions:
    """The options that determine the pack plan of given documents; see `Documents`.

    Raises:
        DataError: the value of an option is not allowed.
    """

    sequence_length: int
    packing: str = "best_fit"
    long: str = "split"
    split: str = "all"

    def __post_init__(self) -> None:
        if not 1 <= self.sequence_length <= MOST:
            raise DataError(f"sequence_length is {self.sequence_length}: it must be at least 1")
        for name, allowed in (("packing", Packing.__members__), ("long", Long.__members__), ("split", SPLITS)):
            value = getattr(self, name)
            if value not in allowed:
                raise DataError(f"{name}={value!r}{nearest(str(value), allowed)}: one of {', '.join(allowed)}")
        if self.packing == "stream" and self.long != "split":
            raise DataError(
                f"long={self.long} with packing=stream: a stream is cut at the end of every row, whatever the "
                "documents are: leave long=split, or choose packing=best_fit"
            )

    @property
    def key(self) -> str:
        values = json.dumps(asdict(self))
        return f"{self.packing}-{self.sequence_length}-{hashlib.blake2b(values.encode(), digest_size=4).hexdigest()}"


def make_plan(index: Index, options: PlanOptions) -> PackedRows:
    """Write a pack plan, or open it if it already exists.

    Args:
        index: index of the documents.
        options: options of the plan.

    Raises:
        DataError: there are no documents or too many documents to pack, or the cache cannot be written.
    """
    directory = index.store.plans / options.key
    with usable_cache(directory, "the pack plan"):
        once(directory, index.store.claims, partial(_write_plan, index, options))
    return PackedRows(index, directory)


def _write_plan(index: Index, options: PlanOptions, folder: Path) -> None:
    if len(index) > MOST:
        raise DataError(f"{index.store.directory}: {len(index):,} documents are more than 2^32: make several sources")
    length = options.sequence_length
    lengths = np.diff(index.offsets)
    wanted = np.ones(len(index), bool) if options.split == "all" else index.held == (options.split == "eval")
    in_split, whole = int(wanted.sum()), int(lengths[wanted].sum())
    too_long = wanted & (lengths > length)
    if options.long == "drop":
        wanted &= ~too_long
    documents = np.flatnonzero(wanted).astype(np.uint32)
    if not len(documents):
        raise DataError(
            f"{index.store.directory}: no document is left with split={options.split} long={options.long} "
            f"sequence_length={length}, of {len(index):,}: add data, or set long=split"
        )
    kept = lengths[documents]
    if options.long == "truncate":
        kept = np.minimum(kept, length)
    rows = (
        _stream(kept, documents, folder, length)
        if options.packing == "stream"
        else _rows(kept, documents, folder, options)
    )
    total = int(kept.sum())
    meta = {
        **asdict(options),
        "rows": rows,
        "tokens": total,
        "documents": len(documents),
        "padding": 1 - total / (rows * length),
        "long_documents": int(too_long.sum()),
        "dropped_documents": in_split - len(documents),
        "dropped_tokens": whole - total,
    }
    (folder / "meta.json").write_text(json.dumps(meta))


def _stream(lengths: I64, documents: Any, folder: Path, length: int) -> int:
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    np.save(folder / "order.npy", documents)
    np.save(folder / "starts.npy", starts)
    return -(-int(starts[-1]) // length)


def _rows(lengths: I64, documents: Any, folder: Path, options: PlanOptions) -> int:
    full, rest = lengths // options.sequence_length, lengths % options.sequence_length
    ends = np.cumsum(full[full > 0])
    pieces, sizes = documents[rest > 0], rest[rest > 0]
    if options.packing == "best_fit":
        order, starts = best_fit(sizes, options.sequence_length)
        pieces = pieces[order]
    else:
        starts = np.arange(len(pieces) + 1, dtype=np.uint32)
    np.save(folder / "long.npy", documents[full > 0])
    np.save(folder / "ends.npy", ends.astype(np.uint32 if not len(ends) or ends[-1] <= MOST else np.int64))
    np.save(folder / "order.npy", pieces)
    np.save(folder / "starts.npy", starts)
    return (int(ends[-1]) if len(ends) else 0) + len(starts) - 1


class PackedRows:
    """The rows of a source. Looks up the documents in each row, and the rows of each document.

    Args:
        index: index of the documents.
        directory: directory of the plan.

    Attributes:
        tokens: number of tokens in all rows, without padding.
        documents: number of documents that are in at least one row.

    Raises:
        DataError: a file is missing or damaged.
    """

    def __init__(self, index: Index, directory: Path) -> None:
        self.index, self.directory = index, directory
        meta = read_json(directory / "meta.json")
        self.report: dict[str, Any] = meta
        self.sequence_length: int = meta["sequence_length"]
        self.tokens: int = meta["tokens"]
        self.documents: int = meta["documents"]
        self._rows: int = meta["rows"]
        self._stream = meta["packing"] == "stream"
        self._cut = meta["long"] == "truncate"
        self._order, self._starts = self._mapped("order"), self._mapped("starts")
        if not self._stream:
            self._long, self._ends = self._mapped("long"), self._mapped("ends")
            self._full = int(self._ends[-1]) if len(self._ends) else 0

    @classmethod
    def open(cls, directory: Path) -> PackedRows:
        """Open the plan in a directory.

        Raises:
            DataError: the plan is missing or damaged.
        """
        return cls(Index(Store(directory.parent.parent)), directory)

    def _mapped(self, name: str) -> Any:
        try:
            return np.load(self.directory / f"{name}.npy", mmap_mode="r").view(np.ndarray)
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"{self.directory}: the pack plan is damaged ({error}): delete it to plan anew") from error

    def __len__(self) -> int:
        return self._rows

    def __reduce__(self) -> Any:
        return PackedRows.open, (self.directory,)

    def pieces(self, rows: I64) -> Pieces:
        """Return the pieces of the given rows, in the order of the rows and from left to right within each row.

        Args:
            rows: int64 of shape (B,). They must be in [0, len), which is not checked.

        Returns:
            Four int64 arrays of shape (P,): the index in `rows`, the document, the offset of the first token of the
            piece in its document, and its length.
        """
        return self._of_stream(rows) if self._stream else self._of_rows(rows)

    def _of_stream(self, rows: I64) -> Pieces:
        length = self.sequence_length
        begin = rows * length
        end = np.minimum(begin + length, self._starts[-1])
        first = np.searchsorted(self._starts, begin, side="right") - 1
        counts = np.searchsorted(self._starts, end, side="left") - first
        which, at = _ranges(first, counts)
        starts = self._starts[at]
        offsets = np.maximum(begin[which] - starts, 0)
        lengths = np.minimum(self._starts[at + 1], end[which]) - starts - offsets
        return which, self._order[at].astype(np.int64), offsets, lengths

    def _of_rows(self, rows: I64) -> Pieces:
        length = self.sequence_length
        packed = np.maximum(rows - self._full, 0)
        is_full = rows < self._full
        if len(self._order):
            first = self._starts[packed].astype(np.int64)
            counts = np.where(is_full, 1, self._starts[packed + 1] - first)
            which, at = _ranges(first, counts)
            documents = self._order[at].astype(np.int64)
        else:  # all rows are full
            which, counts, documents = np.arange(len(rows)), np.ones_like(rows), np.zeros_like(rows)
        if not is_full.any():
            return which, documents, *self._rests(documents)
        full = np.flatnonzero(is_full)
        slots = (np.cumsum(counts) - counts)[full]
        of = _searched(self._ends, rows[full], "right")
        documents[slots] = self._long[of]
        offsets, lengths = self._rests(documents)
        before = np.where(of > 0, self._ends[of - 1], 0).astype(np.int64)
        offsets[slots], lengths[slots] = (rows[full] - before) * length, length
        return which, documents, offsets, lengths

    def _rests(self, documents: I64) -> tuple[I64, I64]:
        """Return the offset and length of the part of each document that is not in full rows."""
        sizes = self.index.offsets[documents + 1] - self.index.offsets[documents]
        if self._cut:
            sizes = np.minimum(sizes, self.sequence_length)
        lengths = sizes % self.sequence_length
        return sizes - lengths, lengths

    def measure(self, rows: I64) -> I64:
        """Return the number of tokens, and of documents that begin, in each row, int64 of shape (B, 2)."""
        which, _, first, lengths = self.pieces(np.asarray(rows, np.int64))
        found = np.zeros((len(rows), 2), np.int64)
        np.add.at(found[:, 0], which, lengths)
        np.add.at(found[:, 1], which, first == 0)
        return found

    def rows_of(self, document: int) -> I64:
        """Return the rows that have a piece of a document, int64 of shape (R,). R is 0 if the plan drops it.

        Raises:
            DataError: there is no such document.
        """
        if not 0 <= document < len(self.index):
            raise DataError(f"document {document}: this source has documents 0 to {len(self.index) - 1}")
        if self._stream:
            at = int(_searched(self._order, document))
            if at == len(self._order) or self._order[at] != document:
                return np.zeros(0, np.int64)
            begin, end = (int(each) for each in self._starts[at : at + 2])
            return np.arange(begin // self.sequence_length, -(-end // self.sequence_length))
        at = int(_searched(self._long, document))
        has_full = at < len(self._long) and self._long[at] == document
        full = np.arange(self._ends[at - 1] if at else 0, self._ends[at]) if has_full else np.zeros(0, np.int64)
        packed = _searched(self._starts, np.flatnonzero(self._order == document), "right") - 1 + self._full
        return np.concatenate([full, packed]).astype(np.int64)

    def where(self, documents: I64) -> list[tuple[str, int]]:
        """Return the file and the line (from 1) of each document."""
        return self.index.where(documents)

    def find(self, file: str, line: int) -> int:
        """Return the number of the document at a line of a file; see `Index.find`."""
        return self.index.find(file, line)


def _searched(array: Any, values: Any, side: Literal["left", "right"] = "left") -> Any:
    """Search a memory map after casting `values` to its dtype, because numpy would otherwise copy the map."""
    return np.searchsorted(array, np.asarray(values, array.dtype), side=side)


def _ranges(first: I64, counts: I64) -> tuple[I64, I64]:
    """Concatenate the ranges first[i] to first[i] + counts[i] - 1. Return the i of each number, and the numbers."""
    which = np.repeat(np.arange(len(first)), counts)
    ends = np.cumsum(counts)
    return which, np.arange(len(which)) - np.repeat(ends - counts - first, counts)

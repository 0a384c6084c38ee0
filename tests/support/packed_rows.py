"""A source whose samples are rows of whole documents, with different numbers of tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from exactdata.errors import UserError
from exactdata.order.arrays import I64


class Plan:
    """A plan with one long document in rows 0 and 1, then several documents in each row.

    It replaces `exactdata.documents.packed.PackedRows`.
    """

    def __init__(self, directory: Path, rows: int, sequence_length: int, seed: int) -> None:
        self.directory, self.sequence_length = directory, sequence_length
        draws = np.random.default_rng(seed)
        pieces = [(0, 0, 0, sequence_length), (1, 0, sequence_length, 1)]
        for row in range(1, rows):
            room = sequence_length - (row == 1)
            while room == sequence_length or (room > 0 and draws.random() < 0.8):
                length = int(draws.integers(1, room + 1))
                pieces.append((row, len(pieces) - 1, 0, length))
                room -= length
        self._pieces = np.array(pieces, np.int64)
        self._rows = rows
        self.tokens = int(self._pieces[:, 3].sum())
        self.documents = len(pieces) - 1

    @classmethod
    def open(cls, directory: Path) -> Plan:
        try:
            return cls(directory, *json.loads((directory / "plan.json").read_text()))
        except OSError as error:
            raise UserError(f"{directory}: {error.strerror}") from error

    def __len__(self) -> int:
        return self._rows

    def pieces(self, rows: I64) -> tuple[I64, I64, I64, I64]:
        of = [self._pieces[self._pieces[:, 0] == row] for row in rows.tolist()]
        which = np.repeat(np.arange(len(rows)), [len(part) for part in of])
        _, document, first, length = np.concatenate([np.zeros((0, 4), np.int64), *of]).T
        return which, document, first, length

    def measure(self, rows: I64) -> I64:
        which, _, first, length = self.pieces(rows)
        counts = [np.bincount(which, weights, len(rows)) for weights in (length, first == 0)]
        return np.stack(counts, axis=1).astype(np.int64)

    def rows_of(self, document: int) -> I64:
        if not 0 <= document < self.documents:
            raise UserError(f"document {document}: this source has documents 0 to {self.documents - 1}")
        rows: I64 = self._pieces[self._pieces[:, 1] == document, 0]
        return rows

    def where(self, documents: I64) -> list[tuple[str, int]]:
        """Return locations of ten documents in each file, in every other line."""
        return [(f"part-{document // 10}.jsonl", 2 * (document % 10) + 1) for document in documents.tolist()]

    def find(self, file: str, line: int) -> int:
        for document in range(self.documents):
            if self.where(np.array([document])) == [(file, line)]:
                return document
        raise UserError(f"{file}:{line}: no document was read from this line")


class Rows(Dataset[Any]):
    """Rows of documents, in which token t of a document has the id t + 1."""

    collated = True
    tokens_per_sample = None
    vocab_size = 256

    def __init__(self, directory: str, rows: int, sequence_length: int, seed: int = 0) -> None:
        where = Path(directory)
        where.mkdir(parents=True, exist_ok=True)
        (where / "plan.json").write_text(json.dumps([rows, sequence_length, seed]))
        self.packed = Plan.open(where)
        self.total_tokens, self.measure = self.packed.tokens, self.packed.measure

    def __len__(self) -> int:
        return len(self.packed)

    def __getitems__(self, rows: Any) -> dict[str, torch.Tensor]:
        shape = len(rows), self.packed.sequence_length
        ids, labels = torch.zeros(shape, dtype=torch.int64), torch.full(shape, -100)
        documents, at = torch.full(shape, -1), [0] * len(rows)
        for which, document, first, length in zip(*self.packed.pieces(np.asarray(rows)), strict=True):
            place = slice(at[which], at[which] + length)
            ids[which, place] = torch.arange(first, first + length) + 1
            labels[which, place] = torch.arange(first, first + length) + 2
            labels[which, at[which] + length - 1] = -100
            documents[which, place] = int(document)
            at[which] += length
        return {"input_ids": ids, "labels": labels, "document_ids": documents}

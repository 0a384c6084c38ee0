"""Describe how documents are prepared, and lay out the resulting files: token shards and an index of the documents.

    spec.json         files, column, tokenizer and parts
    parts/00000/      tokens.bin, trained.bin (of chats), lengths.npy, lines.npy, held.npy, dropped.jsonl, part.json
    index/            offsets.npy, lines.npy, held.npy, slices.npy, dropped.jsonl, report.json, meta.json
    plans/KEY/        see `exactdata.documents.packed`
    claims/           claims of the parts in progress

A *part* is a slice of one large file, or several small files. Its directory appears only once the part is complete.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from exactdata.documents.formats import slices_of
from exactdata.documents.tokenizer import TokenizerSpec
from exactdata.errors import DataError
from exactdata.order.arrays import I64

FORMAT = 1
"""Version of the file formats, which is part of every key. Increase it when a format changes."""
SMALL, LARGE, MANY = 1 << 20, 1 << 26, 4096
"""A part is 1 to 64 MiB in size, or more if there would otherwise be over 4,096 parts."""

Slice = tuple[int, int, int]
"""The index of a file in `files`, and the start and stop for `exactdata.documents.formats.read`."""


@dataclass(frozen=True)
class Spec:
    """The documents to prepare, and the options of the preparation.

    Attributes:
        files: absolute paths.
        stats: size in bytes and modification time in nanoseconds of each file.
        column: the key or column that contains the text or the messages.
        chat: whether the column contains messages.
        train_on: the roles that are trained on.
        tokenizer: the tokenizer, as `TokenizerSpec` describes it.
        parts: the slices of each part.
        bytes: size of each part in bytes, as stored in the files.
    """

    files: list[str]
    stats: list[tuple[int, int]]
    column: str
    chat: bool
    train_on: list[str]
    tokenizer: TokenizerSpec
    parts: list[list[Slice]]
    bytes: list[int]

    @classmethod
    def of(
        cls, files: Sequence[Path], column: str, chat: bool, train_on: Sequence[str], tokenizer: TokenizerSpec
    ) -> Spec:
        """Stat the files, and split them into parts.

        Raises:
            DataError: a file is missing, or has an unsupported suffix.
        """
        try:
            found = [file.stat() for file in files]
        except OSError as error:
            raise DataError(f"{error.filename}: {error.strerror}: check the path") from error
        stats = [(each.st_size, each.st_mtime_ns) for each in found]
        total = sum(size for size, _ in stats)
        most = max(min(LARGE, total // 64), SMALL, total // MANY)
        parts: list[list[Slice]] = []
        sizes: list[int] = []
        for number, (file, (size, _)) in enumerate(zip(files, stats, strict=True)):
            for start, stop, share in slices_of(file, size, most):
                if not parts or sizes[-1] + share > most:
                    parts.append([])
                    sizes.append(0)
                parts[-1].append((number, start, stop))
                sizes[-1] += share
        names = [str(file.absolute()) for file in files]
        return cls(names, stats, column, chat, sorted(train_on) if chat else [], tokenizer, parts, sizes)

    @property
    def key(self) -> str:
        """Return a digest of everything that determines the result: path, size and time of each file, and all options.

        Complete paths are included, because files unpacked from two archives may have the same name, size and time.
        """
        chat = [self.train_on, self.tokenizer.chat_template, self.tokenizer.names] if self.chat else None
        values = [FORMAT, self.files, self.stats, self.column, chat, self.tokenizer.to_json(), self.parts]
        return hashlib.blake2b(json.dumps(values).encode(), digest_size=10).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Spec:
        parts = [[(file, start, stop) for file, start, stop in part] for part in value["parts"]]
        return cls(**value | {"tokenizer": TokenizerSpec(**value["tokenizer"]), "parts": parts})

    def check_unchanged(self, number: int) -> None:
        """Check that a file has not changed since the preparation began.

        Raises:
            DataError: the file has changed.
        """
        try:
            found = Path(self.files[number]).stat()
        except OSError as error:
            raise DataError(f"{self.files[number]}: {error.strerror}; it was there at the start") from error
        if (found.st_size, found.st_mtime_ns) != tuple(self.stats[number]):
            raise DataError(f"{self.files[number]}: it has changed while it was read: start again when it is complete")


class Store:
    """The paths of one preparation's files.

    Args:
        directory: directory of the preparation.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.spec_path = directory / "spec.json"
        self.parts = directory / "parts"
        self.index = directory / "index"
        self.plans = directory / "plans"
        self.claims = directory / "claims"

    @property
    def is_complete(self) -> bool:
        return self.index.is_dir()

    def part(self, number: int) -> Path:
        return self.parts / f"{number:05d}"

    @cached_property
    def spec(self) -> Spec:
        return Spec.from_json(read_json(self.spec_path))


def read_json(path: Path) -> Any:
    """Read a JSON file of a preparation.

    Raises:
        DataError: the file is missing or damaged.
    """
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        what = path if path.name == "spec.json" else path.parent  # the path to delete, so that it is created again
        raise DataError(
            f"{path}: prepared documents are missing or damaged ({error}): delete {what} to prepare anew"
        ) from error


class Index:
    """Memory-mapped index of the documents of a complete preparation. Opening it reads a few hundred bytes per part.

    Args:
        store: the paths of a complete preparation.

    Attributes:
        offsets: index of each document's first token among all tokens, then the number of tokens, int64 of shape
            (documents + 1,).
        held: whether each document is among the 5 % that are held out, chosen by content: bool, shape (documents,).
        part_starts: index of each part's first token among all tokens, then the number of tokens.
        content: a digest of all tokens.

    Raises:
        DataError: a file is missing or damaged.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        meta = read_json(store.index / "meta.json")
        self.offsets: I64 = self._mapped("offsets")
        self.held = self._mapped("held")
        self.part_starts = np.array(meta["part_starts"], np.int64)
        self.dtype = np.dtype(meta["dtype"])
        self.vocab_size: int = meta["vocab_size"]
        self.has_mask: bool = meta["has_mask"]
        self.content: str = meta["content"]

    def _mapped(self, name: str) -> Any:
        path = self.store.index / f"{name}.npy"
        try:
            return np.load(path, mmap_mode="r").view(np.ndarray)
        except (OSError, ValueError, EOFError) as error:
            raise DataError(
                f"{path}: prepared documents are missing or damaged ({error}): delete {self.store.directory} to "
                "prepare anew"
            ) from error

    def __len__(self) -> int:
        return len(self.held)

    def report(self) -> dict[str, Any]:
        """Return a report of the preparation: counts, lengths, and the reasons why documents were dropped."""
        report: dict[str, Any] = read_json(self.store.index / "report.json")
        return report

    @cached_property
    def _slices(self) -> I64:
        """Return each slice's first document, file, and number of preceding lines in the file, shape (slices, 3)."""
        slices: I64 = self._mapped("slices")
        return slices

    @cached_property
    def _lines(self) -> Any:
        return self._mapped("lines")

    def where(self, documents: I64) -> list[tuple[str, int]]:
        """Return the file and the line (from 1) of each document."""
        at = np.searchsorted(self._slices[:, 0], documents, side="right") - 1
        files = self._slices[at, 1].tolist()
        lines = (self._slices[at, 2] + self._lines[documents]).tolist()
        return [(self.store.spec.files[file], line) for file, line in zip(files, lines, strict=True)]

    def find(self, file: str, line: int) -> int:
        """Return the number of the document at a line of a file.

        Args:
            file: path of the file, or the last components of the path.
            line: number of the line, counted from 1.

        Raises:
            DataError: there is no such file, or no document at this line.
        """
        files = [number for number, path in enumerate(self.store.spec.files) if f"/{path}".endswith(f"/{file}")]
        if len(files) != 1:
            known = ", ".join(self.store.spec.files[:3])
            raise DataError(f"{file}: {'several files end so' if files else 'no such file'}: the files are {known}, …")
        for at in np.flatnonzero(self._slices[:, 1] == files[0])[::-1].tolist():
            first, base = int(self._slices[at, 0]), int(self._slices[at, 2])
            last = int(self._slices[at + 1, 0]) if at + 1 < len(self._slices) else len(self)
            found = first + int(np.searchsorted(self._lines[first:last], line - base))
            if found < last and self._lines[found] == line - base:
                return found
        raise DataError(
            f"{file}:{line}: no document was read from this line: {self.store.index}/dropped.jsonl says what was "
            "dropped and why"
        )

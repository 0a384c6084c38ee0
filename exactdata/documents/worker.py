"""Prepare parts: read and tokenize their documents, and write token shards. Run as a process with `python -m`.

A separate process does not import torch, and keeps tokenizer threads out of a parent process that may fork later.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from exactdata.documents.claims import claimed, fill
from exactdata.documents.formats import Broken, Found, read
from exactdata.documents.prepared import Spec, Store
from exactdata.documents.tokenizer import Encoded, Encoder
from exactdata.errors import DataError, UserError

AT_ONCE = 1 << 20
"""Maximum number of characters tokenized in one call."""
HELD_OUT = 20
"""One in this many documents is held out."""
Tell = Callable[[dict[str, Any]], None]


def work(store: Store, tell: Tell) -> None:
    """Prepare parts until every part is complete or claimed by another process.

    Args:
        store: the paths of the preparation, whose spec.json is already written.
        tell: called with the number of documents and of tokens in each batch.

    Raises:
        DataError: a file is missing or has changed.
        OSError: a file system operation fails.
    """
    spec = store.spec
    encoder = Encoder(spec.tokenizer, spec.train_on)
    for number in range(len(spec.parts)):
        if store.part(number).is_dir():
            continue
        with claimed(store.claims / store.part(number).name) as ours:
            if ours and not store.part(number).is_dir():
                fill(store.part(number), lambda folder, n=number: _Part(spec, n, encoder, tell).write(folder))  # type: ignore[misc]


@dataclass
class _Part:
    """Prepare one part and write its files."""

    spec: Spec
    number: int
    encoder: Encoder
    tell: Tell
    lengths: list[int] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    held: list[bool] = field(default_factory=list)
    untrained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    digest: Any = field(default_factory=xxhash.xxh3_128)

    def write(self, folder: Path) -> None:
        with ExitStack() as opened:
            self.tokens: BinaryIO = opened.enter_context(open(folder / "tokens.bin", "wb"))
            self.log: BinaryIO = opened.enter_context(open(folder / "dropped.jsonl", "wb"))
            self.trained = opened.enter_context(open(folder / "trained.bin", "wb")) if self.spec.chat else None
            slices = [self._slice(at, *each) for at, each in enumerate(self.spec.parts[self.number])]
        for name, values in (("lengths", self.lengths), ("lines", self.lines)):
            np.save(folder / f"{name}.npy", np.array(values, np.uint32))
        np.save(folder / "held.npy", np.array(self.held, bool))
        self.digest.update(np.array(self.lengths, np.uint32))
        meta = {
            "slices": slices,
            "dropped": self.dropped,
            "untrained": self.untrained,
            "digest": self.digest.hexdigest(),
        }
        (folder / "part.json").write_text(json.dumps(meta))

    def _slice(self, at: int, file: int, start: int, stop: int) -> tuple[int, int]:
        """Write the documents of a slice. Return the number of documents written, and the number of lines read."""
        before, last, size = len(self.lengths), 0, 0
        batch: list[tuple[int, Any]] = []
        self.spec.check_unchanged(file)
        for last, value in self._read(file, start, stop):
            if (broken := self._refused(value)) is not None:
                self._drop(at, last, broken)
                continue
            batch.append((last, value))
            size += len(value) if isinstance(value, str) else 1000 * len(value)
            if size > AT_ONCE:
                self._encode(at, batch)
                batch, size = [], 0
        self._encode(at, batch)
        self.spec.check_unchanged(file)
        return len(self.lengths) - before, last

    def _read(self, file: int, start: int, stop: int) -> Iterator[Found]:
        """Yield the documents of a slice. Convert an OSError to a DataError that names the source, not the cache."""
        try:
            yield from read(Path(self.spec.files[file]), start, stop, self.spec.column)
        except OSError as error:
            raise DataError(
                f"{self.spec.files[file]}: cannot be read ({error.strerror or error}): check its permissions and disk"
            ) from error

    def _refused(self, value: Any) -> Broken | None:
        if isinstance(value, Broken):
            return value
        wanted, words = (list, "messages") if self.spec.chat else (str, "text")
        if not isinstance(value, wanted):
            return Broken(f"wrong type: no {words}", type(value).__name__)
        return None if value else Broken("empty")

    def _drop(self, at: int, line: int, broken: Broken) -> None:
        self.dropped[broken.reason] += 1
        record = {"slice": at, "line": line, "reason": broken.reason, "detail": broken.detail}
        self.log.write(json.dumps(record).encode() + b"\n")

    def _encode(self, at: int, batch: list[tuple[int, Any]]) -> None:
        values = [value for _, value in batch]
        found = list(map(self.encoder.chat, values)) if self.spec.chat else self.encoder.texts(values)
        kept = list(self._kept(at, zip((line for line, _ in batch), found, strict=True)))
        for each in kept:
            self.tokens.write(each.tokens.data)
            self.digest.update(each.tokens)
            if self.trained is not None:
                assert each.trained is not None
                self.trained.write(each.trained.data)
                self.digest.update(each.trained)
                self.untrained += not each.trained.any()
        tokens = sum(len(each.tokens) for each in kept)
        self.tell({"documents": len(kept), "tokens": tokens})

    def _kept(self, at: int, found: Any) -> Iterator[Encoded]:
        for line, each in found:
            if isinstance(each, Broken) or not len(each.tokens):
                self._drop(at, line, each if isinstance(each, Broken) else Broken("empty"))
                continue
            self.lengths.append(len(each.tokens))
            self.lines.append(line)
            # Select by content, so that copies of a document are either all held out or all trained on.
            self.held.append(xxhash.xxh3_64_intdigest(each.tokens) % HELD_OUT == HELD_OUT - 1)
            yield each


def _end_with_parent() -> None:
    """Exit when standard input is closed, because then the parent process has ended."""
    while os.read(0, 1):
        pass
    os._exit(1)


def main(directory: str) -> int:
    """Prepare the parts of a store. Print progress and errors as lines of JSON."""
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def tell(record: dict[str, Any]) -> None:
        print(json.dumps(record), flush=True)

    try:
        work(Store(Path(directory)), tell)
    except UserError as error:
        tell({"error": str(error)})
        return 2
    except OSError as error:
        tell({"oserror": [error.errno, error.strerror or str(error), str(error.filename or directory)]})
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

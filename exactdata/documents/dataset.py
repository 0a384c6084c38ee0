"""Provide documents as a map-style dataset of packed rows."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from exactdata.datasets import Batch, check_bounds
from exactdata.documents import preparing
from exactdata.documents.formats import SUFFIXES
from exactdata.documents.packed import PackedRows, PlanOptions, make_plan
from exactdata.documents.prepared import Spec
from exactdata.documents.tokenizer import load
from exactdata.errors import DataError
from exactdata.order.arrays import I64
from exactdata.paths import cache_directory, expand
from exactdata.ranks import current_ranks
from exactdata.shards import open_shard

IGNORED = -100
"""The label of tokens that are not trained on. torch's cross entropy ignores it by default."""


class Documents(Dataset[Batch]):
    """Documents, tokenized once and packed into rows of `sequence_length` tokens. Each row is a sample.

    Every token of every document is in exactly one row, unless `long` drops tokens. The first process to construct the
    dataset prepares the documents (see `prepare`), while other processes wait. Afterwards, constructing it only opens
    memory maps. A row is a dict of these tensors, each of shape (T,):

    - `input_ids`: int64. Padding is at the end of a row and has the value 0.
    - `labels`: int64, the next token of the same document. The label is -100 at the last token of a document, at
      padding, and before a chat token that is not trained on.
    - `position_ids`: int64, counted from 0 in each piece of a document.
    - `document_ids`: int64, the number of the document in this source, or -1 at padding.

    Example:
        ```python
        import json

        from exactdata import StatefulDataLoader
        from exactdata.documents.dataset import Documents

        with open("texts.jsonl", "w") as file:
            for words in range(1, 40):
                print(json.dumps({"text": "word " * words}), file=file)
        data = Documents("texts.jsonl", sequence_length=64, tokenizer="bytes")
        batch = next(iter(StatefulDataLoader(data, batch_size=2)))
        print(len(data), {key: tuple(value.shape) for key, value in batch.items()})
        ```

    Args:
        paths: a file (.jsonl, .jsonl.gz, .jsonl.zst, .parquet, .arrow from `datasets`, .txt), a folder, a glob, or a
            list of these.
        sequence_length: T, the number of tokens per row, at least 1.
        text: the key or column with the text.
        messages: the key or column with a chat, which is a list of messages with `role` and `content`. It replaces
            `text`.
        tokenizer: `bytes`, a tokenizer.json, or the folder of a Hugging Face tokenizer.
        packing: `best_fit` (complete documents with little padding), `stream` (documents joined end to end and cut into
            rows), or `none` (one document per row).
        long: whether to `split`, `truncate` or `drop` documents longer than T.
        split: `train`, `eval` (5 % of the documents, chosen by their content) or `all`.
        end_token: the token to append to each document. `auto` means the tokenizer's end token, if it has one, and
            `none` means no token.
        pattern: pattern of the files to read in a folder. If None, all files with a supported suffix.
        train_on: roles whose messages are trained on.
        chat_template: a Jinja chat template, or the path of one. If None, the tokenizer's template, or ChatML if it has
            none.
        vocab_size: the largest vocabulary that the tokenizer may have. If None, it is not checked.
        cache_dir: directory of the prepared documents. If None, $RUNNER_CACHE, or ~/.cache/runner if that is not set.

    Raises:
        DataError: a path, column, tokenizer or option is wrong, or the cache cannot be written.
    """

    collated = True
    prefetch = "thread"
    tokens_per_sample = None

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        sequence_length: int,
        text: str = "text",
        messages: str | None = None,
        tokenizer: str | Path = "bytes",
        packing: str = "best_fit",
        long: str = "split",
        split: str = "all",
        end_token: str = "auto",
        pattern: str | None = None,
        train_on: Sequence[str] = ("assistant",),
        chat_template: str | None = None,
        vocab_size: int | None = None,
        cache_dir: str | Path | None = None,
    ) -> None:
        options = PlanOptions(sequence_length, packing, long, split)
        spec = spec_of(paths, text, messages, tokenizer, end_token, pattern, train_on, chat_template)
        self.vocab_size = spec.tokenizer.vocab_size
        if vocab_size is not None and self.vocab_size > vocab_size:
            raise DataError(
                f"the tokenizer has {self.vocab_size:,} tokens, more than vocab_size={vocab_size:,}: raise vocab_size"
            )
        directory = cache_directory(cache_dir)
        is_new = not (preparing.store_of(spec, directory).plans / options.key).is_dir()
        index = preparing.prepare(spec, directory)
        self._open(make_plan(index, options))
        if is_new and current_ranks()[0] == 0:
            print("\n".join(summary(_report(self.packed))), file=sys.stderr, flush=True)

    def _open(self, packed: PackedRows) -> None:
        self.packed = packed
        self.sequence_length = packed.sequence_length
        parts = len(packed.index.part_starts) - 1
        self._tokens: list[Any] = [None] * parts
        self._trained: list[Any] = [None] * parts
        self._counted: I64 = np.arange(0)

    @classmethod
    def prepare(cls, workers: int | None = None, **arguments: Any) -> dict[str, Any]:
        """Prepare the documents without opening them, and return a report.

        Args:
            workers: number of processes. If None, one per core.
            arguments: arguments for the constructor.

        Raises:
            DataError: as for the constructor.
        """
        names = ("paths", "text", "messages", "tokenizer", "end_token", "pattern", "train_on", "chat_template")
        of_plan = ("sequence_length", "packing", "long", "split")
        options = PlanOptions(**{name: arguments[name] for name in of_plan if name in arguments})
        spec = spec_of(**{name: arguments[name] for name in names if name in arguments})
        index = preparing.prepare(spec, cache_directory(arguments.get("cache_dir")), workers)
        packed = make_plan(index, options)
        return _report(packed)

    def __getstate__(self) -> dict[str, Any]:
        return {"packed": self.packed, "vocab_size": self.vocab_size}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.vocab_size = state["vocab_size"]
        self._open(state["packed"])

    @property
    def total_tokens(self) -> int:
        """Return the number of tokens in all rows, without padding."""
        return self.packed.tokens

    def measure(self, rows: I64) -> I64:
        """Return the number of tokens, and of documents that begin, in each row, int64 of shape (B, 2)."""
        return self.packed.measure(rows)

    def __len__(self) -> int:
        return len(self.packed)

    def __getitem__(self, index: int) -> Batch:
        return {key: value[0] for key, value in self.__getitems__([index]).items()}

    def __getitems__(self, indices: Sequence[int] | I64) -> Batch:
        """Fetch a batch.

        Args:
            indices: row numbers, shape (B,).

        Returns:
            The tensors listed in the docstring of the class, each of shape (B, T).

        Raises:
            IndexError: an index is outside [0, len).
            DataError: a token shard is missing or damaged.
        """
        wanted = np.asarray(indices, np.int64)
        check_bounds(wanted, len(self.packed), "dataset")
        rows, length = len(wanted), self.sequence_length
        which, documents, first, lengths = self.packed.pieces(wanted)
        filled = np.bincount(which, lengths, rows).astype(np.int64)
        widths = lengths.copy()  # length of each piece, including the padding after it
        widths[np.searchsorted(which, np.arange(rows), side="right") - 1] += length - filled
        at = np.cumsum(widths) - widths  # offset of each piece in the concatenated batch
        names = np.repeat(documents, widths)
        positions = self._count(rows * length) - np.repeat(at, widths)
        ids, labels = self._gathered(at, documents, first, lengths, rows * length)
        padded = np.flatnonzero(filled < length)
        for row, begin in zip(padded.tolist(), filled[padded].tolist(), strict=True):
            gap = slice(row * length + begin, (row + 1) * length)
            ids[gap], labels[gap], positions[gap], names[gap] = 0, IGNORED, 0, -1
        found = {"input_ids": ids, "labels": labels, "position_ids": positions, "document_ids": names}
        return {key: torch.from_numpy(value.reshape(rows, length)) for key, value in found.items()}

    def _count(self, size: int) -> I64:
        """Return the integers below `size`, from a cache, because computing them takes longer than copying them."""
        counted = self._counted
        if len(counted) != size:
            counted = self._counted = np.arange(size)
        return counted

    def _gathered(self, at: I64, documents: I64, first: I64, lengths: I64, size: int) -> tuple[I64, I64]:
        """Return the concatenated tokens and labels of a batch, int64 of shape (size,). Padding has arbitrary values.

        Args:
            at: offset of each piece in the batch.
            documents: number of the document of each piece.
            first: offset of each piece in its document.
            lengths: number of tokens of each piece.
            size: number of tokens in the batch, including padding.
        """
        index = self.packed.index
        begins = index.offsets[documents]
        starts = begins + first
        if self.packed.report["long"] == "truncate":
            left = np.zeros(len(documents), bool)
        else:  # the label of a piece's last token is the first token of the next piece, which is in a different row
            left = starts + lengths < index.offsets[documents + 1]
        parts = np.searchsorted(index.part_starts, starts, side="right") - 1
        starts -= index.part_starts[parts]
        ids, labels = np.empty(size, np.int64), np.empty(size, np.int64)
        pieces = list(zip(at.tolist(), starts.tolist(), lengths.tolist(), parts.tolist(), strict=True))
        shards = {part: self._shard(part) for part in set(parts.tolist())}
        for to, start, length, part in pieces:
            ids[to : to + length] = shards[part][start : start + length]
        labels[:-1] = ids[1:]
        labels[at + lengths - 1] = IGNORED
        for piece in np.flatnonzero(left).tolist():
            to, start, length, part = pieces[piece]
            labels[to + length - 1] = shards[part][start + length]
        if index.has_mask:
            for (to, start, length, part), follows in zip(pieces, left.tolist(), strict=True):
                predicted = length if follows else length - 1
                trained = self._trained[part][start + 1 : start + 1 + predicted]
                labels[to : to + predicted][~trained] = IGNORED
        return ids, labels

    def _shard(self, part: int) -> Any:
        """Return the tokens of a part. Opens the token shard on first use."""
        if self._tokens[part] is None:
            index = self.packed.index
            size = int(index.part_starts[part + 1] - index.part_starts[part])
            folder = index.store.part(part)
            if index.has_mask:
                self._trained[part] = _opened(folder / "trained.bin", np.dtype(bool), size)
            self._tokens[part] = _opened(folder / "tokens.bin", index.dtype, size)
        return self._tokens[part]

    def fingerprint(self) -> dict[str, Any]:
        """Return a JSON-serializable fingerprint of the tokens and the plan."""
        report = self.packed.report
        options = {name: report[name] for name in ("sequence_length", "packing", "long", "split")}
        return {**options, "content": self.packed.index.content}


def _opened(path: Path, dtype: np.dtype[Any], size: int) -> Any:
    """Memory-map a token shard.

    Raises:
        DataError: the shard is missing, or its size has changed since it was written.
    """
    problem = ""
    try:
        found = open_shard(path, np.dtype(np.uint8) if dtype.kind == "b" else dtype).view(np.ndarray)
    except DataError as error:
        problem = str(error)
    else:
        problem = f"{path}: has {len(found):,} tokens, {size:,} were written" if len(found) != size else ""
    if problem:
        raise DataError(f"{problem}: delete {path.parents[2]} to prepare anew")
    return found.view(dtype)


def _report(packed: PackedRows) -> dict[str, Any]:
    """Return a JSON-serializable report with counts from the documents and their pack plan."""
    index = packed.index
    return {"directory": str(index.store.directory), **index.report(), "plan": packed.report}


def summary(report: dict[str, Any]) -> list[str]:
    """Format the report of `Documents.prepare` as a few lines."""
    plan, lengths, dropped = report["plan"], report["lengths"], report["dropped"]
    end = "no end token" if report["end_token"] is None else f"each with the end token {report['end_token']}"
    of_split = "" if plan["split"] == "all" else f"; {plan['documents']:,} documents of split={plan['split']}"
    lines = [
        f"{report['documents']:,} documents, {report['tokens']:,} tokens ({end}) in {report['files']:,} files of "
        f"{report['bytes'] / 1e6:,.1f} MB",
        f"lengths: median {lengths['50 %']:,}, 90 % up to {lengths['90 %']:,}, longest {lengths['100 %']:,} tokens",
        f"{plan['rows']:,} rows of {plan['sequence_length']:,} tokens (packing={plan['packing']}), "
        f"{100 * plan['padding']:.3f} % padding{of_split}",
    ]
    if plan["long_documents"] and plan["packing"] != "stream":
        done = {"split": "were split", "truncate": "were cut", "drop": "were left out"}[plan["long"]]
        lost = f": {plan['dropped_tokens']:,} tokens lost" if plan["dropped_tokens"] else ", nothing is lost"
        lines.append(f"{plan['long_documents']:,} documents longer than a row {done} (long={plan['long']}){lost}")
    if report["untrained_documents"]:
        lines.append(f"{report['untrained_documents']:,} chats have no turn to train on (train_on)")
    if dropped:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in dropped.items())
        where = f"{report['directory']}/index/dropped.jsonl"
        lines.append(f"not used: {sum(dropped.values()):,} lines ({reasons}), each listed in {where}")
    return lines


def spec_of(
    paths: str | Path | Sequence[str | Path],
    text: str = "text",
    messages: str | None = None,
    tokenizer: str | Path = "bytes",
    end_token: str = "auto",
    pattern: str | None = None,
    train_on: Sequence[str] = ("assistant",),
    chat_template: str | None = None,
) -> Spec:
    """Return the specification of a preparation. Takes the same arguments as `Documents`.

    Raises:
        DataError: a path or the tokenizer is wrong.
    """
    train_on = [train_on] if isinstance(train_on, str) else train_on
    files = expand(paths, pattern or [f"**/*{suffix}" for suffix in SUFFIXES])
    return Spec.of(files, messages or text, messages is not None, train_on, load(tokenizer, end_token, chat_template))

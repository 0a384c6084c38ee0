"""A streamed Hugging Face dataset, packed into sequences of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from exactdata import ShardedStream


class PackedText(ShardedStream):
    """Concatenated texts, split into sequences of `length` tokens with their next-token labels.

    Each file of the stream is read by one shard and packed separately, so that the sequences do not depend on workers
    or ranks. A position is the position of the stream, with the tokens that were read but not yet yielded.

    Args:
        stream: a `datasets.IterableDataset`, as `load_dataset(..., streaming=True)` returns.
        encode: text -> tokens.
        length: tokens per sequence.
        field: name of the text in a document.
    """

    def __init__(self, stream: Any, encode: Callable[[str], list[int]], length: int, field: str = "text") -> None:
        self.stream = stream
        self.encode = encode
        self.length = length
        self.field = field

    def units(self) -> range:
        return range(self.stream.num_shards)

    def read(self, unit: int, position: Any) -> Iterator[tuple[dict[str, torch.Tensor], Any]]:
        part = self.stream.shard(num_shards=self.stream.num_shards, index=unit)
        rest: list[int] = []
        if position is not None:
            part.load_state_dict(position["stream"])
            rest = list(position["rest"])
        # One by one: `iter(part)` would split its one file among the worker processes once more.
        for documents in part.iter(batch_size=1):
            rest += self.encode(documents[self.field][0])
            while len(rest) > self.length:
                window, rest = torch.tensor(rest[: self.length + 1]), rest[self.length :]
                yield {"input_ids": window[:-1], "labels": window[1:]}, {"stream": part.state_dict(), "rest": rest}

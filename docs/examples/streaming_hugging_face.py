"""A streamed Hugging Face dataset, packed into sequences of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from datasets.distributed import split_dataset_by_node
from torch.utils.data import IterableDataset

from runner.data import ranks


class PackedText(IterableDataset[Any]):
    """Concatenated texts, split into sequences of `length` tokens with their next-token labels.

    The state is that of the stream and the tokens that were read but not yet yielded. The stream must have at least
    as many files as there are workers over all ranks, since each worker reads files of its own.

    Args:
        stream: a `datasets.IterableDataset`, as `load_dataset(..., streaming=True)` returns; its own `state_dict`
            holds its position.
        encode: text -> tokens.
        length: tokens per sequence.
        field: name of the text in a document.
    """

    def __init__(self, stream: Any, encode: Callable[[str], list[int]], length: int, field: str = "text") -> None:
        self.stream = stream
        self.encode = encode
        self.length = length
        self.field = field
        self.rest: list[int] = []
        self.pending: dict[str, Any] | None = None
        self.source: Any = None

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        rank, world_size = ranks()
        # This splits by rank; `datasets` itself assigns files to the worker processes.
        self.source = split_dataset_by_node(self.stream, rank=rank, world_size=world_size)
        if self.pending is not None:
            self.source.load_state_dict(self.pending)
            self.pending = None
        for document in self.source:
            self.rest += self.encode(document[self.field])
            while len(self.rest) > self.length:
                window = torch.tensor(self.rest[: self.length + 1])
                self.rest = self.rest[self.length :]
                yield {"input_ids": window[:-1], "labels": window[1:]}
        self.source, self.rest = None, []  # the next epoch begins at the start

    def state_dict(self) -> dict[str, Any]:
        stream = self.pending if self.source is None else self.source.state_dict()
        return {"stream": stream, "rest": list(self.rest)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.pending, self.rest = state["stream"], list(state["rest"])

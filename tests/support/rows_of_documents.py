"""A dataset with the arguments of `exactdata.documents.dataset.Documents`, for tests of configs."""

from __future__ import annotations

from typing import Any


class Rows:
    """A dataset that keeps its arguments."""

    def __init__(
        self,
        paths: Any,
        sequence_length: int,
        text: str = "text",
        messages: str | None = None,
        tokenizer: str = "bytes",
        packing: str = "best_fit",
        long: str = "split",
        split: str = "all",
        end_token: Any = "auto",
        pattern: str | None = None,
        train_on: Any = ("assistant",),
        chat_template: str | None = None,
        vocab_size: int | None = None,
        cache_dir: str | None = None,
    ) -> None:
        self.arguments = locals()

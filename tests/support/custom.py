"""Components that a user might plug in: losses that fail, a dataset, a loader."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import paced
import torch
from torch import nn
from torch.utils.data import IterableDataset

from exactdata import StatefulDataLoader
from runner.errors import UserError
from runner.models.loss import next_token_loss

_calls = 0


def nan_at(model: nn.Module, batch: Mapping[str, torch.Tensor], call: int) -> torch.Tensor:
    """Return the default loss, but NaN at one call of this process."""
    global _calls  # noqa: PLW0603 a loss that counts its calls
    _calls += model.training
    losses = next_token_loss(model, batch)
    return losses * float("nan") if _calls == call and model.training else losses


def nan_in_some_steps(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the default loss, but NaN where a number drawn for the micro-batch is small."""
    losses = next_token_loss(model, batch)
    return losses * float("nan") if model.training and torch.rand(()) < 0.05 else losses


def error_after(model: nn.Module, batch: Mapping[str, torch.Tensor], calls: int) -> torch.Tensor:
    """Return the default loss, and raise an error after `calls` calls, like a mistake in the user's data."""
    global _calls  # noqa: PLW0603 a loss that counts its calls
    _calls += 1
    if _calls > calls:
        raise UserError("a token is outside of the vocabulary")
    return next_token_loss(model, batch)


class Rows:
    """A map-style dataset of `length` samples of 16 tokens."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(37 * index, 37 * index + 17) % 251
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}


def overflow_at(model: nn.Module, batch: Mapping[str, torch.Tensor], step: int, calls: int = 1) -> torch.Tensor:
    """Return the paced loss. In one step its gradient, but not its value, is too large for float16."""
    global _calls  # noqa: PLW0603 a loss that counts its calls
    _calls += model.training
    losses: torch.Tensor = paced.loss(model, batch)
    if not model.training or _calls != step * calls:
        return losses
    weight = next(parameter for parameter in model.parameters() if parameter.requires_grad)
    huge = weight.sum() * 1e36
    return losses + (huge - huge.detach())


class Normed(nn.Module):
    """A model with a batch norm that maps tokens to logits. It ignores the other arguments of a GPT."""

    def __init__(self, vocab_size: int, width: int, **ignored: Any) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.norm(self.tokens(tokens).transpose(1, 2)).transpose(1, 2)
        logits: torch.Tensor = self.head(hidden)
        return logits


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """A stateful stream that counts up, shifted by the rank."""

    def __init__(self, length: int, sequence_length: int) -> None:
        self.length, self.sequence_length, self.at = length, sequence_length, 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        rank = int(os.environ.get("RANK", "0"))
        while self.at < self.length:
            start = 37 * self.at + 11 * rank
            self.at += 1
            tokens = torch.arange(start, start + self.sequence_length + 1) % 251
            yield {"input_ids": tokens[:-1], "labels": tokens[1:]}
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def stream_loader(length: int, sequence_length: int, batch_size: int) -> StatefulDataLoader[Any]:
    """Return a loader over a stream, for `data.loader._target_`."""
    return StatefulDataLoader(Stream(length, sequence_length), batch_size=batch_size)


class Images:
    """A map-style dataset of `length` labeled images of 4 x 4 pixels, without tokens."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"image": torch.full((4, 4), index / self.length), "labels": torch.tensor(index % 3)}


class Pixels(nn.Module):
    """A linear model from (B, 4, 4) to (B, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 3)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.linear(image.flatten(1))  # type: ignore[no-any-return]


def pixel_loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the cross entropy of the labels."""
    return nn.functional.cross_entropy(model(batch["image"]), batch["labels"], reduction="none")

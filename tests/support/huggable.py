"""A task for Hugging Face language models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import cross_entropy


def next_token(model: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the cross entropy of each sample (B,)."""
    logits = model(input_ids=batch["input_ids"]).logits
    return cross_entropy(logits.mT, batch["labels"], reduction="none").mean(dim=1)

"""Losses: functions (model, batch) -> one loss per sample."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100  # labels to skip, torch's default


def next_token_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Mean cross entropy over the labels of each sample, in float32 whatever the model's precision.

    Args:
        model: maps token ids (B, T) to logits (B, T, V).
        batch: `input_ids` and `labels`, int64 (B, T); labels of -100 are skipped.

    Returns:
        Losses in nats per token, shape (B,), float32; 0 for a sample whose labels are all skipped.
    """
    labels = batch["labels"]
    logits = model(batch["input_ids"])
    losses = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="none")
    counted = (labels != IGNORED).sum(dim=1).clamp(min=1)
    return losses.view(labels.shape).sum(dim=1) / counted

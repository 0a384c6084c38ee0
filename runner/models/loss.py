"""Losses: functions (model, batch) -> one loss per sample."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from runner.models.calling import next_token_logits

IGNORED = -100  # labels to skip, torch's default


def next_token_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Compute the mean cross entropy over the labels of each sample, always in float32.

    All samples have the same weight, however many labels they have. `task=next_token` weights them by their number of
    labels.

    Args:
        model: maps token ids (B, T) to logits (B, T, V), or to an object with `logits`.
        batch: `input_ids` and `labels`, int64 (B, T); labels of -100 are skipped. If it also has `document_ids` and
            `position_ids`, no document attends to another.

    Returns:
        Losses in nats per token, shape (B,), float32; 0 for a sample whose labels are all skipped.
    """
    return token_losses(next_token_logits(model, batch), batch["labels"])


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the mean cross entropy over the labels of each sample.

    Args:
        logits: shape (B, T, V).
        labels: int64 (B, T); labels of -100 are skipped.

    Returns:
        Nats per token, shape (B,), float32; 0 for a sample whose labels are all skipped.
    """
    losses = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="none")
    return losses.view(labels.shape).sum(dim=1) / counted(labels).clamp(min=1)


def counted(labels: Tensor) -> Tensor:
    """Count the labels of each sample that are not -100: int64 (B,)."""
    return (labels != IGNORED).sum(dim=1)

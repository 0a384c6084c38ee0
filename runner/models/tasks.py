"""The tasks of the runner, which compute losses and values of a training step or an evaluation from a batch.

You can write your own task as a class like these, or as a function like `runner.models.loss.next_token_loss`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from runner.errors import UserError
from runner.models.calling import logits_of, next_token_logits
from runner.models.loss import counted, token_losses

LABELS = ("label", "labels", "target", "targets", "y")
NOT_INPUTS = (*LABELS, "dataset_idx")


class NextToken:
    """Language modelling: predict the next token.

    The batch has `input_ids` and `labels`, int64 (B, T); labels of -100 are skipped. The model maps token ids (B, T) to
    logits (B, T, V), or to an object with `logits`. The loss of a step is the mean over all its labels. If the batch
    has `document_ids` and `position_ids` (B, T), no document attends to another.
    """

    def training_step(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute `loss`, the mean cross entropy in nats, and `weight`, the number of labels, per sample: (B,)."""
        return _weighted(next_token_logits(model, batch), batch["labels"])

    def evaluation_step(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute `loss` and `weight`, and for metrics `preds`, logits (B, T, V), and `target`, labels (B, T)."""
        logits = next_token_logits(model, batch)
        return {**_weighted(logits, batch["labels"]), "preds": logits, "target": batch["labels"]}


def _weighted(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    return {"loss": token_losses(logits, labels), "weight": counted(labels)}


class Classification:
    """Classification: predict one of several classes for each sample.

    Args:
        inputs: key of the batch for the input of the model; None: the first key that is not a label. If a batch is a
            pair, it is (inputs, labels).
        labels: key of the batch for the classes, int64 (B,); None: label, labels, target, targets or y.
        label_smoothing: as in torch.nn.functional.cross_entropy, 0 to 1. Evaluations do not use it.
    """

    def __init__(self, inputs: str | None = None, labels: str | None = None, label_smoothing: float = 0.0) -> None:
        if not 0 <= label_smoothing <= 1:
            raise UserError(f"task.label_smoothing={label_smoothing} must be from 0 to 1")
        self.inputs, self.labels, self.label_smoothing = inputs, labels, label_smoothing

    def training_step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Compute `loss`, the cross entropy in nats, and `accuracy`, 1 or 0: float32, shape (B,)."""
        logits, labels = self._outputs(model, batch)
        return _judged(logits, labels, self.label_smoothing)

    def evaluation_step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Compute `loss` and `accuracy`, and for metrics `preds`, logits (B, C), and `target`, labels (B,)."""
        logits, labels = self._outputs(model, batch)
        return {**_judged(logits, labels, 0.0), "preds": logits, "target": labels}

    def _outputs(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return logits (B, C) and labels (B,).

        Raises:
            UserError: the batch lacks the input or the labels, or the shapes do not match.
        """
        if isinstance(batch, Sequence) and len(batch) == 2:
            inputs, labels = batch
        elif isinstance(batch, Mapping):
            labels = batch[_entry(batch, "labels", self.labels, [key for key in LABELS if key in batch])]
            inputs = batch[_entry(batch, "inputs", self.inputs, [key for key in batch if key not in NOT_INPUTS])]
        else:
            raise UserError(f"task=classification takes a mapping or a pair as a batch, not a {type(batch).__name__}")
        logits = logits_of(model(inputs))
        if logits.ndim != 2 or labels.shape != logits.shape[:1]:
            raise UserError(
                f"task=classification: the model returned shape {tuple(logits.shape)} for labels of shape "
                f"{tuple(labels.shape)}: it must return (B, classes) for labels (B,)"
            )
        return logits, labels


def _judged(logits: Tensor, labels: Tensor, label_smoothing: float) -> dict[str, Tensor]:
    loss = F.cross_entropy(logits.float(), labels, reduction="none", label_smoothing=label_smoothing)
    return {"loss": loss, "accuracy": (logits.argmax(1) == labels).float()}


def _entry(batch: Mapping[str, Any], role: str, wanted: str | None, candidates: Sequence[str]) -> str:
    there = ", ".join(map(str, batch))
    if wanted is not None:
        if wanted not in batch:
            raise UserError(
                f"task.{role}={wanted} is not in the batch, which has {there}: set task.{role} to one of them"
            )
        return wanted
    if not candidates:
        raise UserError(f"the batch has {there}, none of which is known as {role}: set task.{role} to one of them")
    return candidates[0]

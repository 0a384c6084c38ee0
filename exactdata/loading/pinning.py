"""Copy a batch into page-locked memory, so that its transfer to the GPU can be asynchronous."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def pin(batch: Any) -> Any:
    """Return the batch with its tensors in pinned memory. Uses the same containers as torch's DataLoader."""
    if isinstance(batch, torch.Tensor):
        return batch.pin_memory()
    if hasattr(batch, "pin_memory"):
        return batch.pin_memory()
    if isinstance(batch, (str, bytes)):
        return batch
    if isinstance(batch, Mapping):
        return {key: pin(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(pin(value) for value in batch))
    if isinstance(batch, Sequence):
        return [pin(value) for value in batch]
    return batch


def can_pin() -> bool:
    """Return whether there is an accelerator that benefits from pinned memory."""
    if not torch.accelerator.is_available():
        return False
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type != "mps"

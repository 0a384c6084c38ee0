"""Count the samples and tokens of a step. Tokens are counted only if the data have tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

NONE_STATED = np.zeros(0, np.int64)


def stated_tokens(names: Sequence[str], tokens_per_sample: Mapping[str, float]) -> NDArray[np.int64]:
    """Return the tokens per sample of each source in `names`, or a single number if it is the same for all sources.

    The array is empty unless every source states an integer. A float is only a mean and is not used. This is called
    once, so that the time of a step does not depend on the number of sources.
    """
    stated = [tokens_per_sample[name] for name in names if isinstance(tokens_per_sample.get(name), int)]
    if len(stated) < len(names):
        stated = []
    return np.array(stated[:1] if len(set(stated)) == 1 else stated, np.int64)


def samples_in(batch: Any) -> int:
    """Return the number of samples in a batch: the length of its first tensor, or of the batch itself."""
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.ndim else 1
    if isinstance(batch, Mapping) and batch:
        return samples_in(batch["input_ids"] if "input_ids" in batch else next(iter(batch.values())))
    if isinstance(batch, (list, tuple)) and batch and isinstance(batch[0], (torch.Tensor, Mapping, list, tuple)):
        return samples_in(batch[0])
    return len(batch) if hasattr(batch, "__len__") else 1


def tokens_in(
    batch: Any, samples: int, stated: NDArray[np.int64] = NONE_STATED, sources: NDArray[np.int64] | None = None
) -> int | None:
    """Return the number of tokens in a batch, or None if its data have no tokens.

    Args:
        batch: batch from the loader.
        samples: number of samples in the batch.
        stated: tokens per sample, if all sources state it (see `stated_tokens`). Otherwise, the entries of
            `document_ids`, shape (B, T), that are not -1 are counted. If there are no `document_ids`, the integer
            `input_ids`, shape (B, T), that `attention_mask` does not mask are counted.
        sources: source number of each sample, if known.
    """
    if len(stated) == 1:
        return samples * int(stated[0])
    if len(stated) and sources is not None:
        return int(stated[sources].sum())
    if not isinstance(batch, Mapping):
        return None
    packed = batch.get("document_ids")
    if isinstance(packed, torch.Tensor) and packed.ndim == 2:
        return int((packed >= 0).sum())
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
        return None
    return int(mask.sum()) if isinstance(mask, torch.Tensor) else ids.numel()

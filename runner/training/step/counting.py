"""How many samples and tokens a step has; tokens are counted only where the data have any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

NONE_STATED = np.zeros(0, np.int64)


def stated_tokens(names: Sequence[str], tokens_per_sample: Mapping[str, float]) -> NDArray[np.int64]:
    """The tokens of a sample of each source in `names`, one number if it is the same of all; empty unless all state it.

    A float is only their mean, and states nothing of a sample.
    Once: a step's cost does not depend on how many sources there are.
    """
    stated = [tokens_per_sample[name] for name in names if isinstance(tokens_per_sample.get(name), int)]
    if len(stated) < len(names):
        stated = []
    return np.array(stated[:1] if len(set(stated)) == 1 else stated, np.int64)


def samples_in(batch: Any) -> int:
    """Samples in a batch: the length of its first tensor, or of the batch itself."""
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
    """Tokens in a batch, None if it has none.

    Args:
        batch: as the loader yields it.
        samples: how many it has.
        stated: the tokens of a sample, where all sources state it (`stated_tokens`). Otherwise the
            tokens are those of `document_ids` of shape (B, T) that are not -1, or else the integer `input_ids` of shape
            (B, T), without those that `attention_mask` leaves out.
        sources: the number of the source of each sample, if it is known.
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

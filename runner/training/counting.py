"""How many samples and tokens a step has; tokens are counted only where the data have any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def stated_tokens(names: Sequence[str], tokens_per_sample: Mapping[str, int]) -> list[int]:
    """The tokens of a sample of each source in `names`; empty unless all of them state it."""
    stated = [tokens_per_sample[name] for name in names if name in tokens_per_sample]
    return stated if len(stated) == len(names) else []


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
    batch: Any, samples: int, stated: Sequence[int] = (), sources: NDArray[np.int64] | None = None
) -> int | None:
    """Tokens in a batch, None if it has none.

    Args:
        batch: as the loader yields it.
        samples: how many it has.
        stated: the tokens of a sample of each source, where all sources state it (`stated_tokens`). Otherwise the
            tokens are the integer `input_ids` of shape (B, T), without those that `attention_mask` leaves out.
        sources: the number of the source of each sample, if it is known.
    """
    if len(set(stated)) == 1:
        return samples * stated[0]
    if stated and sources is not None:
        return int(np.asarray(stated)[sources].sum())
    if not isinstance(batch, Mapping):
        return None
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
        return None
    return int(mask.sum()) if isinstance(mask, torch.Tensor) else ids.numel()

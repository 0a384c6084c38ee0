"""How many samples and tokens a step has; tokens are counted only where the data have any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from runner.system.distributed import World

Count = tuple[int, int | None]  # samples, and tokens if there are any


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


def tokens_in(batch: Any, stated: Sequence[int] = ()) -> int | None:
    """Tokens in a batch, None if it has none.

    Args:
        batch: as the loader yields it.
        stated: the tokens of a sample of each source, where all sources state it (`stated_tokens`). Otherwise the
            tokens are the integer `input_ids` of shape (B, T), without those that `attention_mask` leaves out.
    """
    if len(set(stated)) == 1:
        return samples_in(batch) * stated[0]
    if not isinstance(batch, Mapping):
        return None
    if stated and isinstance(source := batch.get("dataset_idx"), torch.Tensor):
        return int(torch.tensor(stated)[source.cpu()].sum())
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
        return None
    return int(mask.sum()) if isinstance(mask, torch.Tensor) else ids.numel()


def count_over_ranks(world: World, counts: Sequence[Count]) -> Count:
    """The samples and tokens of the batches of all ranks; no tokens if a batch of any rank has none."""
    own = [
        sum(samples for samples, _ in counts),
        sum(tokens or 0 for _, tokens in counts),
        sum(tokens is None for _, tokens in counts),
    ]
    samples, tokens, without = world.sum(torch.tensor(own)).tolist()
    return int(samples), None if without else int(tokens)

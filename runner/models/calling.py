"""Calls of a language model with rows of several documents, none of which may see another."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from exactdata import generators
from runner.errors import UserError

TRIAL = 4
"""Tokens of each of the two documents that a model is tried with."""


def next_token_logits(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Compute the logits of each token's successor from the earlier tokens of its document.

    A model that takes `document_ids` gets them and `position_ids`. One that takes `position_ids` alone, as those of
    Hugging Face, is tried once with two short documents: do the second one's logits depend on the first? Many a model
    that takes positions tells nothing by them.

    Args:
        model: maps token ids (B, T) to logits (B, T, V), or to an object with `logits`; with or without wrappers.
        batch: `input_ids`, int64 (B, T). With `document_ids` (B, T), -1 at padding, also `position_ids` (B, T), which
            begin at 0 with each document.

    Returns:
        Logits (B, T, V).

    Raises:
        UserError: a row has several documents, and they would see each other.
    """
    if "document_ids" not in batch:
        return logits_of(model(batch["input_ids"]))
    bare = _bare(model)
    way = _WAYS.get(bare) or _way_of(bare, batch["input_ids"].device)
    if not way.apart:
        _check_alone(bare, batch["document_ids"])
    if "position_ids" in way.names and "position_ids" not in batch:
        raise UserError(
            "the batch has document_ids and no position_ids: add them, from 0 at the start of each document"
        )
    return way.logits(model, batch)


def logits_of(output: Any) -> Tensor:
    """What a model returned, or its `logits` where that is an object, as Hugging Face's models return."""
    logits: Tensor = getattr(output, "logits", output)
    return logits


@dataclass(frozen=True)
class _Way:
    """How a model is called.

    Attributes:
        names: the entries of a batch that it gets besides `input_ids`.
        options: further arguments.
        apart: whether that keeps documents apart.
        as_one_row: all rows are put into one, where only positions tell them apart: Hugging Face's flash attention
            looks at positions in a batch of one row only.
    """

    names: Sequence[str] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    apart: bool = True
    as_one_row: bool = False

    def logits(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        given = {name: batch[name] for name in ("input_ids", *self.names)}
        if self.as_one_row:
            given = {name: value.reshape(1, -1) for name, value in given.items()}
        logits = logits_of(model(given.pop("input_ids"), **given, **self.options))
        return logits.reshape(*batch["input_ids"].shape, -1)


_WAYS: WeakKeyDictionary[nn.Module, _Way] = WeakKeyDictionary()


def _bare(model: Any) -> nn.Module:
    """Take off the wrappers of DDP and torch.compile, whose signatures say nothing."""
    while inner := getattr(model, "_orig_mod", None) or (isinstance(model, DistributedDataParallel) and model.module):
        model = inner
    bare: nn.Module = model
    return bare


def _way_of(model: nn.Module, device: torch.device) -> _Way:
    """Find how to call a model, from its signature or by a trial, and remember it."""
    arguments = inspect.signature(model.forward).parameters
    names = [name for name in ("position_ids", "document_ids") if name in arguments]
    if "document_ids" in names:
        return _WAYS.setdefault(model, _Way(names))
    if not names and all(each.kind is not each.VAR_KEYWORD for each in arguments.values()):
        return _WAYS.setdefault(model, _Way(apart=False))
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.enable_grad(), generators.lent():
            way, telling = _tried(model, names, device)
    finally:
        for module in training:
            module.training = True
    return _WAYS.setdefault(model, way) if telling else way


def _tried(model: nn.Module, names: Sequence[str], device: torch.device) -> tuple[_Way, bool]:
    """Find the way by which documents do not see each other; also return whether they do if nothing is done.

    They do not while the output of each block is still multiplied by zeros: then a later trial tells more.
    """
    # With a cache, Hugging Face's models take no notice of positions that begin again.
    options = {"use_cache": False} if hasattr(getattr(model, "config", None), "use_cache") else {}
    alone = _Way(names, options, apart=False)
    again, on = (torch.arange(count, device=device).repeat(2, 2 * TRIAL // count) for count in (TRIAL, 2 * TRIAL))
    ways = [_Way(["position_ids"], options, as_one_row=as_one_row) for as_one_row in (False, True)]
    way = next((way for way in ways if not _crosses(model, way, again)), alone)
    return way, _crosses(model, alone, on)


def _crosses(model: nn.Module, way: _Way, positions: Tensor) -> bool:
    """Tell whether the logits of rows' second documents depend on the first: else their gradient is 0, to the last bit.

    A comparison of logits would not do: what passes through small weights is less than bfloat16 can tell.
    """
    tokens = torch.arange(1, TRIAL + 1, device=positions.device).repeat(2, 2)  # several: one may stand for padding
    embedded: list[Tensor] = []

    def keep(module: nn.Module, given: tuple[Any, ...], output: Tensor) -> None:
        ids = given[0] if given else None  # positions may be embedded, too
        if isinstance(ids, Tensor) and torch.equal(ids.flatten(), tokens.flatten()):
            embedded.append(output.requires_grad_())

    handles = [each.register_forward_hook(keep) for each in model.modules() if isinstance(each, nn.Embedding)]
    try:
        logits = way.logits(model, {"input_ids": tokens, "position_ids": positions})
    finally:
        for handle in handles:
            handle.remove()
    if not embedded:
        return True  # nobody knows
    gradients = torch.autograd.grad(logits[:, TRIAL:].float().square().sum(), embedded, allow_unused=True)
    return any(bool(each.reshape(2, 2 * TRIAL, -1)[:, :TRIAL].any()) for each in gradients if each is not None)


def _check_alone(model: nn.Module, documents: Tensor) -> None:
    later = documents[:, 1:]
    if ((later != documents[:, :-1]) & (later >= 0)).any():
        raise UserError(
            f"{type(model).__name__} lets the documents of a row see each other: use packing=none, so that a row has "
            "one document, or a model whose forward takes document_ids, or position_ids and tells documents by them"
        )

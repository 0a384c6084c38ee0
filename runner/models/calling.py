"""Call a language model with rows of several documents so that no document attends to another."""

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
"""Number of tokens in each of the two documents of the trial; see `_crosses`."""


def next_token_logits(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Compute the logits of each next token from the earlier tokens of the same document.

    If the model's `forward` takes `document_ids`, it receives them and `position_ids`. A model that takes only
    `position_ids`, such as a Hugging Face model, is tested once with two short documents, because many models accept
    positions but do not separate documents. The logits of the second document must not depend on the first.

    Args:
        model: maps token ids (B, T) to logits (B, T, V), or to an object with `logits`. It may be wrapped by DDP or
            torch.compile.
        batch: `input_ids`, int64 (B, T). If it has `document_ids` (B, T), -1 at padding, it also has `position_ids` (B,
            T), which begin at 0 in each document.

    Returns:
        Logits (B, T, V).

    Raises:
        UserError: a row has several documents, and the model would let one attend to another.
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
    """Return the output of a model, or its `logits` if it is an object, as in Hugging Face's models."""
    logits: Tensor = getattr(output, "logits", output)
    return logits


@dataclass(frozen=True)
class _Way:
    """A way to call a model.

    Attributes:
        names: batch entries that are passed to the model in addition to `input_ids`.
        options: further keyword arguments of the model.
        apart: whether documents do not attend to each other with this call.
        as_one_row: concatenate all rows into one. Hugging Face's flash attention separates documents by their positions
            only in a batch of one row.
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
    """Return the model without the wrappers of DDP and torch.compile, whose signatures do not show its arguments."""
    while inner := getattr(model, "_orig_mod", None) or (isinstance(model, DistributedDataParallel) and model.module):
        model = inner
    bare: nn.Module = model
    return bare


def _way_of(model: nn.Module, device: torch.device) -> _Way:
    """Determine from its signature or a trial how to call a model, and cache the result."""
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
    """Return a way that keeps documents apart, if any, and whether they affect each other in the plain way.

    They do not while the output of each block is still multiplied by zeros. Then the result of this trial is not
    conclusive, and a later trial decides.
    """
    # With a cache, Hugging Face's models ignore that positions restart at 0.
    options = {"use_cache": False} if hasattr(getattr(model, "config", None), "use_cache") else {}
    alone = _Way(names, options, apart=False)
    again, on = (torch.arange(count, device=device).repeat(2, 2 * TRIAL // count) for count in (TRIAL, 2 * TRIAL))
    ways = [_Way(["position_ids"], options, as_one_row=as_one_row) for as_one_row in (False, True)]
    way = next((way for way in ways if not _crosses(model, way, again)), alone)
    return way, _crosses(model, alone, on)


def _crosses(model: nn.Module, way: _Way, positions: Tensor) -> bool:
    """Check whether the logits of the second document in a row depend on the first.

    If they do not, their gradient is exactly 0. Comparing logits would not detect contributions through small weights,
    which are below the precision of bfloat16.
    """
    # Different tokens, because one may be the padding token.
    tokens = torch.arange(1, TRIAL + 1, device=positions.device).repeat(2, 2)
    embedded: list[Tensor] = []

    def keep(module: nn.Module, given: tuple[Any, ...], output: Tensor) -> None:
        ids = given[0] if given else None  # the model may also embed positions
        if isinstance(ids, Tensor) and torch.equal(ids.flatten(), tokens.flatten()):
            embedded.append(output.requires_grad_())

    handles = [each.register_forward_hook(keep) for each in model.modules() if isinstance(each, nn.Embedding)]
    try:
        logits = way.logits(model, {"input_ids": tokens, "position_ids": positions})
    finally:
        for handle in handles:
            handle.remove()
    if not embedded:
        return True  # unknown, so assume that they do
    gradients = torch.autograd.grad(logits[:, TRIAL:].float().square().sum(), embedded, allow_unused=True)
    return any(bool(each.reshape(2, 2 * TRIAL, -1)[:, :TRIAL].any()) for each in gradients if each is not None)


def _check_alone(model: nn.Module, documents: Tensor) -> None:
    later = documents[:, 1:]
    if ((later != documents[:, :-1]) & (later >= 0)).any():
        raise UserError(
            f"{type(model).__name__} lets the documents of a row see each other: use packing=none, so that a row has "
            "one document, or a model whose forward takes document_ids, or position_ids and tells documents by them"
        )

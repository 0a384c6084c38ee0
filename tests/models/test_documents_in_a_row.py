"""Attention stays inside documents, in the shipped GPT and in Hugging Face models; otherwise the row is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from transformers import modeling_flash_attention_utils

from runner.errors import UserError
from runner.models.calling import next_token_logits
from runner.models.gpt import GPT, within_documents
from runner.models.loss import next_token_loss
from runner.models.tasks import NextToken

V, T = 29, 16
ROWS = [[3, 5, 1, 4], [7, 6], []]
"""Lengths of the documents of each row; the third one is padding only."""
SIZES = {
    **dict.fromkeys(("vocab_size",), V),
    **dict.fromkeys(("hidden_size", "n_embd"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head"), 4),
    **dict.fromkeys(("num_key_value_heads",), 2),
    **dict.fromkeys(("intermediate_size",), 48),
    "head_dim": 8,
}


def hugging_face(name: str, attention: str = "sdpa", **more: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")
    known = {key: value for key, value in SIZES.items() if hasattr(config(), key)}
    config = config(**{**known, "pad_token_id": None, "initializer_range": 0.2, **more})
    config._attn_implementation = attention
    return getattr(transformers, {"GPT2": "GPT2LMHeadModel"}.get(name, f"{name}ForCausalLM"))(config)


def shipped() -> nn.Module:
    torch.manual_seed(0)
    model = GPT(V, T, layers=2, heads=4, width=32)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {"GPT": shipped}
for each in ("sdpa", "eager"):
    MODELS[f"Llama, {each}"] = partial(hugging_face, "Llama", each)
    MODELS[f"GPT-NeoX, {each}"] = partial(hugging_face, "GPTNeoX", each)
    MODELS[f"GPT-2, {each}"] = partial(hugging_face, "GPT2", each)
    MODELS[f"Qwen3, {each}"] = partial(hugging_face, "Qwen3", each)
    MODELS[f"Mistral, {each}, window"] = partial(hugging_face, "Mistral", each, sliding_window=3)
each_model = pytest.mark.parametrize("name", MODELS)


def packed(rows: list[list[int]] = ROWS, seed: int = 0) -> dict[str, Any]:
    """Make rows of random documents, numbered from 0 in each row."""
    tokens = torch.randint(1, V, (len(rows), T), generator=torch.Generator().manual_seed(seed))
    batch = {"input_ids": tokens, "labels": torch.full((len(rows), T), -100)}
    batch |= {"position_ids": torch.zeros(len(rows), T).long(), "document_ids": torch.full((len(rows), T), -1)}
    for row, lengths in enumerate(rows):
        for document, (first, length) in enumerate(zip(starts(lengths), lengths, strict=True)):
            span = slice(first, first + length)
            batch["position_ids"][row, span] = torch.arange(length)
            batch["document_ids"][row, span] = document
            batch["labels"][row, first : first + length - 1] = tokens[row, first + 1 : first + length]
    tokens[batch["document_ids"] < 0] = 0
    return batch


def starts(lengths: list[int]) -> list[int]:
    return [sum(lengths[:number]) for number in range(len(lengths))]


@each_model
def test_a_document_in_a_row_is_as_if_it_were_alone(name: str) -> None:
    """Compare the logits, and the row's loss, which is the mean over the labels of all documents."""
    model, batch = MODELS[name]().eval(), packed()
    batch["labels"][0, 4] = -100  # as in a turn of the user
    outputs = NextToken().evaluation_step(model, batch)
    assert all(torch.isfinite(value).all() for value in outputs.values())
    for row, lengths in enumerate(ROWS):
        total = 0.0
        for first, length in zip(starts(lengths), lengths, strict=True):
            alone = {key: value[row : row + 1, first : first + length] for key, value in batch.items()}
            logits = model(alone["input_ids"])
            logits = getattr(logits, "logits", logits)
            torch.testing.assert_close(outputs["preds"][row, first : first + length], logits[0], atol=1e-5, rtol=0)
            plain = {key: alone[key] for key in ("input_ids", "labels")}
            total += (next_token_loss(model, plain) * (plain["labels"] != -100).sum()).item()
        assert outputs["weight"][row] == (batch["labels"][row] != -100).sum()
        assert (outputs["loss"] * outputs["weight"])[row].item() == pytest.approx(total, rel=1e-5)
    assert torch.equal(next_token_loss(model, batch), outputs["loss"])


@each_model
def test_no_bit_of_a_document_depends_on_the_rest_of_its_row(name: str) -> None:
    model, batch = MODELS[name]().eval(), packed()
    logits = next_token_logits(model, batch)
    for document in (-1, *range(4)):
        own = batch["document_ids"] == document
        others = torch.where(own, batch["input_ids"], packed(seed=1)["input_ids"] + (batch["document_ids"] < 0))
        assert torch.equal(next_token_logits(model, {**batch, "input_ids": others})[own], logits[own])
        changed = {**batch, "input_ids": torch.where(own, (batch["input_ids"] + 1) % V, batch["input_ids"])}
        assert not torch.equal(next_token_logits(model, changed)[own], logits[own])


def test_rows_are_joined_where_only_that_separates_documents() -> None:
    """Flash attention does so. It is not on this machine; the condition is that of its code."""

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, **given: Any) -> Any:
        positions, seen = given["position_ids"], torch.ones(query.shape[2], query.shape[2]).bool().tril()[None, None]
        if flash._is_packed_sequence(positions, len(query)):
            seen = within_documents((positions == 0).cumsum(1))
        key, value = (each.repeat_interleave(2, dim=1) for each in (key, value))
        out = nn.functional.scaled_dot_product_attention(query, key, value, seen, scale=given["scaling"])
        return out.transpose(1, 2), None

    flash: Any = modeling_flash_attention_utils
    transformers.AttentionInterface.register("of_one_row", attention)
    batch = packed()
    found = next_token_logits(hugging_face("Llama", "of_one_row").eval(), batch)
    wanted = next_token_logits(hugging_face("Llama").eval(), batch)
    there = batch["document_ids"] >= 0
    torch.testing.assert_close(found[there], wanted[there], atol=1e-5, rtol=0)


class Gated(nn.Module):
    """A model that takes positions and adds up all earlier tokens, with a gate that begins at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head, self.gate = nn.Embedding(V, 8), nn.Linear(8, V), nn.Parameter(torch.zeros(()))

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Any:
        x = self.tokens(input_ids)
        return self.head(x + self.gate * x.cumsum(1))


MAMBA: dict[str, Any] = {"attention": "eager", "num_hidden_layers": 2, "state_size": 4}
CONVOLUTIONS: dict[str, Any] = {
    "layer_types": ["full_attention", "conv"],
    "num_hidden_layers": 2,
    "initializer_range": 0.02,
}


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (lambda: hugging_face("Mamba", **MAMBA), "Mamba"),
        (lambda: hugging_face("Lfm2", **CONVOLUTIONS), "Lfm2"),
        (lambda: hugging_face("Lfm2", **CONVOLUTIONS).bfloat16(), "Lfm2"),
        (lambda: hugging_face("OPT", word_embed_proj_dim=32, ffn_dim=48), "OPT"),
        (lambda: nn.Sequential(nn.Embedding(V, 8), nn.Linear(8, V)), "Sequential"),
    ],
    ids=["no positions", "convolutions", "in bfloat16", "no mask by positions", "no arguments"],
)
def test_model_that_mixes_documents_gets_one_document_a_row(model: Callable[[], nn.Module], name: str) -> None:
    made = model()
    for _ in range(2):
        with pytest.raises(
            UserError, match=rf"^{name}\w* lets the documents of a row see each other: use packing=none"
        ):
            next_token_loss(made, packed())
    single = packed([[9], [16], []])
    plain = {key: single[key] for key in ("input_ids", "labels")}
    assert torch.equal(next_token_loss(made.eval(), single), next_token_loss(made, plain))


def test_model_with_zero_branches_is_found_once_they_are_not() -> None:
    model, batch = Gated(), packed()
    next_token_loss(model, batch)
    nn.init.ones_(model.gate)
    with pytest.raises(UserError, match=r"^Gated lets the documents"):
        next_token_loss(model, batch)


def test_trial_leaves_no_trace_in_model_and_generators() -> None:
    model, batch = hugging_face("GPT2"), packed()
    model.transformer.h[0].eval()
    modes, before = [each.training for each in model.modules()], torch.get_rng_state()
    first = next_token_loss(model, batch)
    after = torch.get_rng_state()
    assert [each.training for each in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    torch.set_rng_state(before)
    assert torch.equal(next_token_loss(model, batch), first)  # with dropout, and no trial
    assert torch.equal(torch.get_rng_state(), after)


def test_positions_are_needed_beside_documents() -> None:
    batch = packed()
    del batch["position_ids"]
    with pytest.raises(UserError, match="has document_ids and no position_ids"):
        next_token_loss(shipped(), batch)


@pytest.mark.parametrize("name", ["GPT", pytest.param("Llama, sdpa", marks=pytest.mark.slow)])
def test_wrappers_change_nothing(name: str) -> None:
    """Wrap it by torch.compile, DDP and FSDP2, also for the trial and in the backward pass."""
    from torch.distributed.fsdp import fully_shard

    def sharded(model: Any) -> Any:
        for block in model.blocks if name == "GPT" else model.model.layers:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    batch = packed()
    plain = MODELS[name]()
    wanted: Any = next_token_loss(plain, batch).sum()
    wanted.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        wraps: list[Any] = [partial(torch.compile, backend="eager"), nn.parallel.DistributedDataParallel, sharded]
        for wrap in wraps:
            wrapped: Any = wrap(MODELS[name]())
            loss: Any = next_token_loss(wrapped, batch).sum()
            loss.backward()
            total: Any = torch.nn.utils.get_total_norm([p.grad for p in wrapped.parameters() if p.grad is not None])
            torch.testing.assert_close(loss, wanted)
            torch.testing.assert_close(total.full_tensor() if hasattr(total, "full_tensor") else total, norm)
    finally:
        torch.distributed.destroy_process_group()

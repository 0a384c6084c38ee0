"""The model and its loss: causal, tied, initialized by depth, and correct per-sample losses."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F

from runner.errors import UserError
from runner.models.gpt import GPT
from runner.models.loss import next_token_loss


def small(**options: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(**{"vocab_size": 17, "sequence_length": 12, "layers": 2, "heads": 2, "width": 16, **options})


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, 17, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("options", [{}, {"tie_weights": False}, {"bias": False}, {"dropout": 0.1}])
def test_logits_for_every_token(options: dict[str, Any]) -> None:
    model = small(**options)
    logits = model(ids(3, 12))
    assert logits.shape == (3, 12, 17)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_no_token_sees_a_later_one() -> None:
    model = small().eval()
    tokens = ids(1, 12)
    changed = tokens.clone()
    changed[0, 7:] = (changed[0, 7:] + 1) % 17
    assert torch.equal(model(tokens)[0, :7], model(changed)[0, :7])
    assert not torch.equal(model(tokens)[0, 7:], model(changed)[0, 7:])


def test_a_shorter_sample_is_taken_and_a_longer_one_refused() -> None:
    model = small().eval()
    assert torch.allclose(model(ids(1, 12)[:, :5]), model(ids(1, 12))[:, :5], atol=1e-6)
    with pytest.raises(UserError, match=r"13 tokens is longer than model.sequence_length=12"):
        model(ids(1, 13))


def test_tied_weights_are_one_parameter() -> None:
    tied, free = small(), small(tie_weights=False)
    count = sum(p.numel() for p in free.parameters()) - sum(p.numel() for p in tied.parameters())
    assert count == 17 * 16
    assert not any("head" in name for name in tied.state_dict())


def test_model_begins_near_the_uniform_distribution() -> None:
    model = small(layers=8, width=64, vocab_size=256, sequence_length=64)
    tokens = torch.randint(0, 256, (4, 64))
    loss = next_token_loss(model, {"input_ids": tokens, "labels": tokens.roll(-1, 1)}).mean()
    assert abs(loss.item() - math.log(256)) < 0.1
    weights = dict(model.named_parameters())
    assert weights["blocks.0.mlp.down.weight"].std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.05)
    assert weights["blocks.0.mlp.up.weight"].std().item() == pytest.approx(0.02, rel=0.05)


def test_dropout_follows_the_seed_and_is_off_in_evaluation() -> None:
    model = small(dropout=0.5)

    def seeded() -> torch.Tensor:
        torch.manual_seed(3)
        return cast(torch.Tensor, model(ids(2, 12)))

    assert torch.equal(seeded(), seeded())
    assert not torch.equal(model(ids(2, 12)), model(ids(2, 12)))
    model.eval()
    assert torch.equal(model(ids(2, 12)), model(ids(2, 12)))


def test_weights_on_the_meta_device_can_be_made_later() -> None:
    with torch.device("meta"):
        model = GPT(17, 12, 2, 2, 16)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.reset_parameters()
    assert torch.isfinite(model(ids(1, 12))).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 3}, "model.width=16 must be a multiple of model.heads=3"),
        ({"layers": 0}, "model.layers=0 must"),
        ({"vocab_size": -1}, "model.vocab_size=-1 must"),
        ({"dropout": 1.0}, "model.dropout=1.0 must"),
        ({"dropout": float("nan")}, "model.dropout=nan must"),
    ],
)
def test_arguments_out_of_range_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        small(**options)


def test_the_loss_of_a_sample_is_the_mean_over_its_labels() -> None:
    model, tokens, labels = small().eval(), ids(3, 12), ids(3, 12).flip(0).clone()
    labels[1, 4:] = -100
    labels[2, :] = -100
    losses = next_token_loss(model, {"input_ids": tokens, "labels": labels})
    assert (losses.shape, losses.dtype) == ((3,), torch.float32)
    logits = model(tokens)
    assert losses[0].item() == pytest.approx(F.cross_entropy(logits[0], labels[0]).item(), rel=1e-5)
    assert losses[1].item() == pytest.approx(F.cross_entropy(logits[1, :4], labels[1, :4]).item(), rel=1e-5)
    assert losses[2].item() == 0.0


def test_the_loss_is_float32_under_autocast() -> None:
    model, tokens = small(), ids(2, 12)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(tokens).dtype == torch.bfloat16
        assert next_token_loss(model, {"input_ids": tokens, "labels": tokens}).dtype == torch.float32

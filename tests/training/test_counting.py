"""Counts have true names: samples always, tokens only where the data have tokens."""

from __future__ import annotations

import json
from collections import UserDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import TINY, Run

from runner.training.step.counting import samples_in, stated_tokens, tokens_in

IDS = torch.zeros(3, 5, dtype=torch.int64)
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
IMAGES = torch.zeros(3, 8, 8)


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        ({"input_ids": IDS, "labels": IDS}, 15),
        ({"labels": IDS, "input_ids": IDS, "attention_mask": MASK}, 9),
        (UserDict({"input_ids": IDS}), 15),
        ({"input_ids": IDS, "document_ids": MASK - 1}, 9),
        ({"image": IMAGES, "labels": torch.zeros(3, dtype=torch.int64)}, None),
        ({"input_ids": IMAGES}, None),
        ({"input_ids": torch.zeros(3, 5)}, None),
        ({"views": [IMAGES, IMAGES]}, None),
        ((IMAGES, torch.zeros(3)), None),
        ([IMAGES, torch.zeros(3)], None),
        (IMAGES, None),
        (["a", "b", "c"], None),
    ],
)
def test_the_samples_and_tokens_of_a_batch(batch: Any, tokens: int | None) -> None:
    assert samples_in(batch) == 3
    assert tokens_in(batch, 3) == tokens


def test_token_counts_stated_by_sources_are_used() -> None:
    differing, same = (stated_tokens(["a", "b"], {"b": b, "a": 5}) for b in (7, 5))
    assert (differing.tolist(), same.tolist()) == ([5, 7], [5])
    assert len(stated_tokens(["a", "b"], {"b": 7})) == len(stated_tokens([], {})) == 0
    assert tokens_in({"x": IMAGES}, 3, same) == 15
    assert tokens_in({"x": IMAGES}, 3, differing, np.array([0, 1, 1])) == 19
    assert tokens_in({"input_ids": IDS}, 3, differing) == 15  # the sources of these samples are not stated


@pytest.mark.slow
def test_records_name_samples_and_only_existing_tokens(tmp_path: Path) -> None:
    own = ["data=own", "train.loss._target_=custom.pixel_loss", "train.steps=10"]
    own += ["model._target_=custom.Pixels", "~model.layers", "~model.heads", "~model.width", "~model.sequence_length"]
    own += ["~model.vocab_size", "~model.dropout", "~model.bias", "~model.tie_weights"]
    own += ["+data.sources.images={_target_:custom.Images,length:24}"]
    tiny = [entry for entry in TINY if not entry.startswith("model.")]
    images = Run(tmp_path / "images", [*tiny, *own])
    text = Run(tmp_path / "text", [*TINY, "train.steps=10"])
    for run in (images, text):
        output = run.finish()
        last = [record for record in run.records() if "loss" in record][-1]
        assert last["samples_seen"] == 40
        (timing,) = [json.loads(line) for line in (run.path / "timings.jsonl").read_text().splitlines()]
        tokens = run is text
        assert last.get("tokens_seen") == (640 if tokens else None)
        assert ("tokens_per_s" in timing, "tokens_per_s" in run.status()) == (tokens, tokens)
        assert timing["samples_per_s"] > 0
        assert run.status()["samples_per_s"] > 0
        assert ("tokens/s" in output, "samples/s" in output) == (tokens, not tokens)
    longer = Run(images.path, [*images.overrides, "train.steps=12"])
    longer.finish()
    assert longer.records()[-1]["samples_seen"] == 48

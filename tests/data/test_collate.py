"""`data.collate`: a user's function makes the batches from the samples of the sources, in a mixture too."""

from __future__ import annotations

import types
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from composing import compose
from loading import Gathered, Squares
from padded import Sentences, pad
from torch.utils.data import Dataset, default_collate

from exactdata import ElasticSampler, StatefulDataLoader
from exactdata.datasets import TokenDataset
from exactdata.errors import DataError
from exactdata.loading.collation import CollationError
from exactdata.loading.fixed import FixedBatches
from exactdata.loading.workers import collate_in_own_memory
from exactdata.order.ledger import DataLedger
from runner.config.schema import Config
from runner.errors import UserError
from runner.training.data.consumption import Consumption, ElasticConsumption
from runner.training.data.sources import join_sources, make_collate, tokens_per_sample


def loader_of(dataset: Any, sizes: dict[str, int], workers: int = 0, **more: Any) -> Any:
    sampler = ElasticSampler(sizes, dict.fromkeys(sizes, 1.0), num_replicas=1, rank=0, global_batch_size=6, epochs=1)
    config = types.SimpleNamespace(num_workers=workers)
    return StatefulDataLoader(dataset, 6, sampler=sampler, config=config, **more)


class Pairs(Dataset[Any]):
    def __init__(self, size: int, width: int = 3) -> None:
        self.size, self.width = size, width

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return torch.full((self.width,), float(index)), index


@pytest.mark.parametrize("workers", [0, 1])
def test_sources_of_different_lengths_are_padded(workers: int) -> None:
    sources = {"short": Sentences(12, 5), "long": Sentences(24, 9)}
    sizes = {name: len(source) for name, source in sources.items()}
    seen: list[Any] = []

    def padding(samples: Any) -> Any:
        seen.extend(samples)
        return pad(samples)

    loader = loader_of(join_sources(sources, padding), sizes, workers, collate_fn=padding)
    sampler = loader.sampler
    consumption = ElasticConsumption(loader, sampler, DataLedger(list(sizes), list(sizes.values())), {})
    for batch, record in consumption.batches():
        assert batch["labels"].shape == batch["input_ids"].shape
        assert batch["labels"].shape[1] == (batch["labels"] != -100).sum(1).max()
        where = consumption.sources(record)
        assert where is not None
        assert record.indices is not None
        assert batch["dataset_idx"].tolist() == where.tolist() == (record.indices >= 12).astype(int).tolist()
    assert all(sample.keys() == {"tokens"} for sample in seen)
    assert len(seen) == (0 if workers else 36)


def test_samples_that_are_not_dicts_stay_as_they_are() -> None:
    sources = {"a": Pairs(6), "b": Pairs(6)}
    loader = loader_of(join_sources(sources), {"a": 6, "b": 6})
    consumption = ElasticConsumption(loader, loader.sampler, DataLedger(["a", "b"], [6, 6]), {})
    for batch, record in consumption.batches():
        values, numbers = batch
        assert values.shape == (6, 3)
        where = consumption.sources(record)
        assert where is not None
        assert record.indices is not None
        assert np.array_equal(where, record.indices // 6)
        assert numbers.tolist() == (record.indices % 6).tolist()
    assert consumption.sources(None) is None
    assert Consumption(loader).sources(None) is None


def test_collated_sources_are_fetched_by_sample_for_collate() -> None:
    def count(samples: Any) -> Any:
        assert isinstance(samples, list)
        return {"sums": torch.tensor([int(sample["x"].sum()) for sample in samples])}

    for names in (["a"], ["a", "b"]):
        sources = {name: Gathered(6) for name in names}
        loader = loader_of(join_sources(sources, count), dict.fromkeys(names, 6), collate_fn=count)
        found = sorted(int(value) for batch in loader for value in batch["sums"])
        assert found == sorted([int(row.sum()) for row in Gathered(6).data] * len(names))
    assert join_sources({"a": (data := Gathered(6))}) is data


@pytest.mark.parametrize("workers", [0, 1])
def test_sources_that_do_not_agree_are_one_line(workers: int) -> None:
    sources = {"narrow": Pairs(6), "wide": Pairs(6, width=5)}
    with pytest.raises(CollationError) as error:
        list(loader_of(join_sources(sources), {"narrow": 6, "wide": 6}, workers))
    text = str(error.value)
    assert len(text.splitlines()) == 1
    for words in (
        "of source 'narrow'",
        "of source 'wide'",
        "0 (3,) float32",
        "0 (5,) float32",
        "set collate_fn",
    ):
        assert words in text
    assert "Traceback" not in text


def test_finished_batches_that_do_not_agree_name_the_remedy() -> None:
    wide = Gathered(6)
    wide.data = wide.data.reshape(3, 8)
    with pytest.raises(DataError, match=r"source 'b' has x \(8,\) int64.*set collate_fn .*pads"):
        list(loader_of(join_sources({"a": Gathered(6), "b": wide}), {"a": 6, "b": 3}))


def test_an_error_of_a_collate_function_names_its_samples() -> None:
    def fails(samples: Any) -> Any:
        raise ValueError("no such thing")

    with pytest.raises(ValueError, match=r"no such thing \[while collating the samples \d+ of source 'a' \(index"):
        list(loader_of(join_sources({"a": Squares(6), "b": Squares(6)}), {"a": 6, "b": 6}, collate_fn=fails))


def test_an_evaluation_draws_and_collates_the_same_every_time() -> None:
    data = join_sources({"short": Sentences(6, 5), "long": Sentences(6, 9)}, pad)
    batches = FixedBatches(data, [[0, 7, 3], [11]], pad, seed=4)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = list(batches)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    for one, other in zip(first, batches, strict=True):
        assert torch.equal(one["input_ids"], other["input_ids"])
    assert [batch["dataset_idx"].tolist() for batch in first] == [[0, 1, 0], [1]]


@cache
def composed() -> Config:
    return compose(["data.collate._target_=padded.pad", "data.collate.to=3"]).config


def config_of(node: dict[str, Any]) -> Config:
    """Compose a config with another `data.collate`."""
    return replace(composed(), data=replace(composed().data, collate=node))


@pytest.mark.parametrize("target", ["padded.pad", "padded.Padding"])
def test_a_function_or_a_class_is_bound_to_its_options(target: str) -> None:
    node = composed().data.collate
    assert node == {"_target_": "padded.pad", "to": 3}
    made = make_collate(config_of({**node, "_target_": target}))
    assert made is not None
    assert made([{"tokens": torch.arange(9)}])["labels"].tolist() == [[1, 2]]
    assert make_collate(config_of({})) is None


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ({"_target_": "padded.pda"}, "data.collate._target_=padded.pda"),
        ({"_target_": "padded.pad", "too": 3}, "'too'"),
        ({"_target_": "padded.Padding", "too": 3}, "'too'"),
        ({"_target_": "padded.takes_nothing"}, "cannot be called as collate(samples)"),
        ({"_target_": "padded.Sentences", "size": 3, "longest": 3}, "__call__"),
    ],
)
def test_a_mistake_in_data_collate_is_one_line(node: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as error:
        make_collate(config_of(node))
    assert len(str(error.value).splitlines()) == 1
    assert words in str(error.value)


def test_options_without_a_function_are_one_line() -> None:
    with pytest.raises(UserError, match=r"\A.*data\.collate has no _target_.*\Z"):
        compose(["data.collate.to=3"])


def test_a_worker_collates_into_ordinary_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch travels as bytes: making shared memory for each tensor first would take most of the time."""
    info = object()
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: info)
    samples = [{"x": torch.arange(3) + number} for number in range(2)]
    assert default_collate(samples)["x"].is_shared()
    batch = collate_in_own_memory(samples)["x"]
    assert not batch.is_shared()
    assert batch.tolist() == [[0, 1, 2], [1, 2, 3]]
    assert torch.utils.data.get_worker_info() is info


def test_only_all_token_samples_report_a_token_count() -> None:
    class Padded(TokenDataset):
        def __getitems__(self, indices: Any) -> Any:
            return super().__getitems__(indices)

    assert tokens_per_sample({"a": TokenDataset(np.arange(33), 8), "b": Padded(np.arange(33), 8), "c": [1, 2]}) == {
        "a": 8
    }

"""Transforms of any library are exact: what a sample draws from the global generators depends on the sample alone."""

from __future__ import annotations

import random
import types
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from loading import Noisy as Stateful
from loading import Squares, identity
from resume import assert_same
from torch.utils.data import Dataset, IterableDataset, RandomSampler, SequentialSampler, Subset, default_collate

from exactdata import ElasticSampler, MixtureDataset, StatefulDataLoader, generators
from exactdata.loading import global_draws

SIZE = 36


class Pictures(Dataset[Any]):
    """Random crop, flip, colors and noise, as transform libraries draw them from three global generators.

    Every fourth picture is unchanged, so that not every sample draws.
    """

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        picture = torch.arange(3 * 8 * 8).reshape(3, 8, 8).float() + 1000 * index
        if index % 4 == 0:
            return {"index": index, "picture": picture[:, :4, :4]}
        top, left = (int(torch.randint(0, 5, (1,))) for _ in range(2))
        picture = picture[:, top : top + 4, left : left + 4]
        if random.random() < 0.5:
            picture = picture.flip(-1)
        picture = picture * float(np.random.uniform(0.8, 1.2)) + torch.randn(picture.shape)
        return {"index": index, "picture": picture}


class Listed(Pictures):
    """The same dataset, fetched by lists of samples; it keeps the number of requests."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.asked.append(len(indices))
        return [self[index] for index in indices]


class Gathered(Pictures):
    collated = True

    def __getitems__(self, indices: Any) -> Any:
        return default_collate([self[int(index)] for index in indices])


class Stream(IterableDataset[float]):
    def __iter__(self) -> Iterator[float]:
        return (float(torch.rand(())) for _ in range(9))


def loader_of(data: Any, workers: int = 0, batch_size: int = 4, ranks: int = 1, rank: int = 0, **more: Any) -> Any:
    sampler = ElasticSampler(
        {"all": SIZE}, [1.0], num_replicas=ranks, rank=rank, global_batch_size=12, seed=5, epochs=2
    )
    config = types.SimpleNamespace(num_workers=workers)
    return StatefulDataLoader(data, batch_size, sampler=sampler, config=config, **more)


def by_position(loader: Any, batches: int | None = None) -> dict[int, tuple[int, bytes]]:
    """Map each position of the next batches to (index, pixels)."""
    found: dict[int, tuple[int, bytes]] = {}
    for batch, record in islice(loader.iter_recorded(), batches):
        pixels = [picture.numpy().tobytes() for picture in batch["picture"]]
        found |= dict(zip(record.positions.tolist(), zip(batch["index"].tolist(), pixels, strict=True), strict=True))
    return found


@pytest.fixture
def whole() -> dict[int, tuple[int, bytes]]:
    """Return what every run must see."""
    found = by_position(loader_of(Pictures()))
    assert len(found) == 2 * SIZE
    assert (
        len(set(found.values())) == 2 * SIZE - SIZE // 4
    )  # different in each epoch, except for samples that draw nothing
    return found


MAPS: dict[str, Callable[[], Any]] = {
    "__getitem__": Pictures,
    "__getitems__": Listed,
    "subset": lambda: Subset(Pictures(), range(SIZE)),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", MAPS)
def test_pixels_do_not_depend_on_shape_or_resumes(name: str, workers: int, whole: dict[int, tuple[int, bytes]]) -> None:
    assert by_position(loader_of(MAPS[name](), workers)) == whole
    first = [loader_of(MAPS[name](), workers, 2, ranks=2, rank=rank) for rank in range(2)]
    found = by_position(first[0], 6) | by_position(first[1], 6)  # two global batches of 12
    torch.rand(7), np.random.rand(7), random.random()
    later = loader_of(MAPS[name](), 2 - workers, batch_size=12)
    state = first[0].aggregate_state_dict([loader.state_dict() for loader in first])
    later.load_state_dict(later.deaggregate_state_dict(state, 0, 1))
    assert found | by_position(later) == whole


@pytest.mark.parametrize("data", [Pictures(), Listed(), Gathered()], ids=["single", "list", "batch"])
def test_the_generators_of_the_training_do_not_move(data: Any) -> None:
    np.random.randn()  # half of a pair is kept for the next one
    before = generators.states()
    list(loader_of(data))
    with pytest.raises(ZeroDivisionError):
        list(loader_of(data, collate_fn=lambda samples: 1 / 0))
    assert generators.drawn_from(before) == ""


def test_sample_is_fetched_once_until_it_draws() -> None:
    data = Listed()
    list(loader_of(data, batch_size=12))
    assert data.asked == [12, *[1] * 72]  # the first batch again, and then single samples
    nothing = Listed()
    nothing.draws_nothing = True  # type: ignore[attr-defined]
    list(loader_of(nothing, batch_size=12))
    assert nothing.asked == [12] * 6


def test_collate_draws_depend_on_the_batch_alone() -> None:
    """Use a collate function that mixes the samples of a batch."""

    def mix(samples: list[Any]) -> Any:
        return {**default_collate(samples), "share": np.random.beta(1, 1)}

    def shares(loader: Any, batches: int | None = None) -> list[float]:
        return [batch["share"] for batch in islice(loader, batches)]

    first = loader_of(Squares(SIZE), collate_fn=mix)
    found = shares(first, 5)
    later = loader_of(Squares(SIZE), 2, collate_fn=mix)
    later.load_state_dict(first.state_dict())
    found += shares(later)
    np.random.seed(3)
    assert found == shares(loader_of(Squares(SIZE), collate_fn=mix))
    assert len(set(found)) == len(found)


def test_a_source_of_a_mixture_draws_the_same() -> None:
    mixed = MixtureDataset([Pictures()], ["all"])
    assert not mixed.draws_nothing
    assert by_position(loader_of(mixed)) == by_position(loader_of(Pictures(), 2))


def test_generators_kept_as_dataset_state_are_seeded_too() -> None:
    config = types.SimpleNamespace(num_workers=0)
    loaders = [StatefulDataLoader(Stateful(), 4, config=config, collate_fn=identity) for _ in range(2)]
    first = list(islice(loaders[0], 3))
    loaders[1].load_state_dict(loaders[0].state_dict())
    torch.manual_seed(8)
    again = StatefulDataLoader(Stateful(), 4, config=config, collate_fn=identity)
    assert first + list(loaders[1]) == list(again)


def test_without_a_config_the_draws_are_those_of_torchs_loader() -> None:
    def drawn(make: Any, iterate: Callable[[Any], Any]) -> list[torch.Tensor]:
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        return [batch["picture"] for batch in iterate(make(Pictures(), 4))]

    def after_torchs_draw(loader: Any) -> Any:
        torch.empty((), dtype=torch.int64).random_()  # the seed of torch's workers, which this loader draws elsewhere
        return iter(loader)

    for ours, theirs in zip(
        drawn(StatefulDataLoader, after_torchs_draw), drawn(torch.utils.data.DataLoader, iter), strict=True
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("data", [Gathered(), Stream()], ids=["batches", "stream"])
def test_draws_beyond_the_sample_are_named_at_the_first_batch(
    data: Any, workers: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(global_draws, "_warned", set())
    config = types.SimpleNamespace(num_workers=workers)
    next(iter(StatefulDataLoader(data, 9, config=config)))
    assert [record.name for record in caplog.records] == ["exactdata.loading.global_draws"]
    assert f"{type(data).__name__} draws from the global generator of " in caplog.text
    assert "torch: its samples will differ if the " in caplog.text
    caplog.clear()
    next(iter(StatefulDataLoader(Squares(9), 3, config=config)))
    next(iter(StatefulDataLoader(Pictures(), 3, config=config)))
    assert not caplog.records


def test_dataset_that_draws_despite_draws_nothing_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(global_draws, "_warned", set())
    data = Pictures()
    data.draws_nothing = True  # type: ignore[attr-defined]
    list(loader_of(data))
    assert "Pictures draws from the global generator of random, numpy.random, torch" in caplog.text
    assert "remove draws_nothing" in caplog.text


def test_the_same_draws_do_not_come_from_two_generators() -> None:
    """Seed them differently: numpy and torch use the same generator, so one seed would correlate a crop with a flip."""
    generators.seed(0x0123456789ABCDEF)
    words = np.random.randint(0, 2**31, 4).tolist(), torch.randint(0, 2**31, (4,)).tolist()
    assert not set(words[0]) & set(words[1])


@pytest.mark.parametrize("kind", [RandomSampler, SequentialSampler])
def test_a_sampler_without_keys_draws_the_same_on_any_workers(kind: Any) -> None:
    def epochs(workers: int, cut: int | None = None) -> list[Any]:
        torch.manual_seed(3)
        data = Pictures()
        config = types.SimpleNamespace(num_workers=workers)
        loader: Any = StatefulDataLoader(data, 4, sampler=kind(data), config=config)
        found = [list(loader), list(loader)]
        if cut is not None:
            stream = iter(loader)
            found.append([next(stream) for _ in range(cut)])
            again: Any = StatefulDataLoader(data, 4, sampler=kind(data), config=types.SimpleNamespace(num_workers=2))
            again.load_state_dict(loader.state_dict())
            found[-1] += list(again)
            loader = again
        return [*found, list(loader), *([] if cut is not None else [list(loader)])]

    whole = epochs(0)
    assert_same(epochs(2), whole)
    assert_same(epochs(0, cut=2), whole)

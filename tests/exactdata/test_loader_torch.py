"""Compared with torch's loader: the same arguments yield the same batches in the same order."""

from __future__ import annotations

import inspect
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loading import Gathered, GlobalSampler, Listed, Squares, Stateless, WithCursor, identity
from resume import assert_same
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from exactdata import DistributedSampler, StatefulDataLoader
from exactdata.loading import loader as loader_module
from exactdata.loading.pinning import can_pin

DATA = Squares(23)


class Backwards(RandomSampler):
    """A user's sampler, which must not be mistaken for torch's."""

    def __iter__(self) -> Any:
        return iter(range(len(self) - 1, -1, -1))


class Odd(SequentialSampler):
    """A user's sampler that subclasses SequentialSampler."""

    def __iter__(self) -> Any:
        return iter(range(1, len(self), 2))


IN_PROCESS: list[dict[str, Any]] = [
    {},
    {"batch_size": 4},
    {"batch_size": 4, "drop_last": True},
    {"batch_size": 23, "drop_last": True},
    {"batch_size": 40, "drop_last": True},
    {"batch_size": 4, "shuffle": True},
    {"batch_size": None},
    {"batch_size": None, "shuffle": True},
    {"batch_size": 4, "sampler": SequentialSampler(range(9))},
    {"batch_size": 4, "sampler": [5, 3, 3, 1, 7]},
    {"batch_size": 4, "sampler": RandomSampler(DATA)},
    {"batch_size": 4, "sampler": RandomSampler(DATA, replacement=True, num_samples=70)},
    {"batch_size": 4, "sampler": RandomSampler(DATA, num_samples=50)},
    {"batch_size": 4, "sampler": Backwards(DATA)},
    {"batch_size": 4, "sampler": Odd(DATA)},
    {"batch_size": 4, "sampler": SubsetRandomSampler(range(3, 17))},
    {"batch_size": 4, "sampler": WeightedRandomSampler([1.0, 2.0, 0.0, 3.0], 30)},
    {"batch_size": 4, "sampler": GlobalSampler(23)},
    {"batch_sampler": BatchSampler(RandomSampler(DATA), 5, True)},
    {"batch_sampler": [[0, 1], [2], [3, 4, 5]]},
    {"batch_size": 4, "collate_fn": identity},
    {"batch_size": 4, "dataset": Listed(23), "shuffle": True},
    {"batch_size": 4, "generator": 7, "shuffle": True},
    {"batch_size": None, "dataset": Stateless([10])},
    {"batch_size": 3, "dataset": Stateless([10])},
    {"batch_size": 3, "dataset": Stateless([10]), "drop_last": True},
    {"batch_size": 3, "dataset": WithCursor([10])},
    {"batch_size": 3, "dataset": Stateless([0])},
]
WITH_WORKERS: list[dict[str, Any]] = [
    {"batch_size": 4, "shuffle": True, "num_workers": 2},
    {"batch_size": 4, "num_workers": 1, "prefetch_factor": 5, "timeout": 100},
    {"batch_size": 4, "shuffle": True, "num_workers": 2, "persistent_workers": True},
    {"batch_size": None, "num_workers": 2},
    {"batch_sampler": BatchSampler(RandomSampler(DATA), 5, True), "num_workers": 2, "collate_fn": identity},
    {"batch_size": 4, "dataset": Listed(23), "num_workers": 2, "generator": 7, "shuffle": True},
    {"batch_size": 3, "dataset": Stateless([2, 17]), "num_workers": 2},
    {"batch_size": 3, "dataset": Stateless([17, 2]), "num_workers": 2, "drop_last": True},
    {"batch_size": None, "dataset": WithCursor([0, 5]), "num_workers": 2, "persistent_workers": True},
]


def build(kind: Any, case: dict[str, Any]) -> Any:
    case = dict(case)
    if "generator" in case:
        case["generator"] = torch.Generator().manual_seed(case["generator"])
    return kind(case.pop("dataset", DATA), **case)


def batches(kind: Any, case: dict[str, Any], epochs: int = 3) -> list[Any]:
    torch.manual_seed(11)
    loader = build(kind, case)
    return [list(loader) for _ in range(epochs)]


def named(case: dict[str, Any]) -> str:
    """Return an id that is the same in every process, which pytest-xdist requires."""
    return re.sub(r" (object )?at 0x[0-9a-f]+", "", str(case))


FIRST = [WITH_WORKERS[0], WITH_WORKERS[3], WITH_WORKERS[7]]
OTHERS = [pytest.param(case, marks=pytest.mark.slow) for case in WITH_WORKERS if case not in FIRST]


@pytest.mark.parametrize("case", [*IN_PROCESS, *FIRST, *OTHERS], ids=named)
def test_batches_and_order_are_torchs(case: dict[str, Any]) -> None:
    assert_same(batches(StatefulDataLoader, case, 2), batches(DataLoader, case, 2))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_are_not_forked(method: str) -> None:
    case = {"batch_size": 6, "num_workers": 2, "multiprocessing_context": method, "shuffle": True}
    assert_same(batches(StatefulDataLoader, case, 1), batches(DataLoader, case, 1))


@pytest.mark.parametrize("case", IN_PROCESS[:6] + WITH_WORKERS[:1], ids=named)
def test_the_global_generator_does_not_move(case: dict[str, Any]) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    loader = build(StatefulDataLoader, case)
    list(loader)
    loader.load_state_dict(loader.state_dict())
    list(loader)
    assert torch.equal(torch.get_rng_state(), before)


def test_length_is_torchs() -> None:
    for case in IN_PROCESS:
        if not isinstance(case.get("dataset"), (Stateless, WithCursor)):
            assert len(build(StatefulDataLoader, case)) == len(build(DataLoader, case))


def test_signature_has_every_argument_of_the_installed_torch() -> None:
    ours, torchs = (inspect.signature(kind).parameters for kind in (StatefulDataLoader, DataLoader))
    assert list(ours)[: len(torchs)] == list(torchs)
    assert [ours[name].kind for name in torchs] == [torchs[name].kind for name in torchs]
    assert set(ours) - set(torchs) == {"snapshot_every_n_steps", "config"}


@pytest.mark.parametrize(
    "case",
    [
        {"num_workers": -1},
        {"timeout": -1},
        {"prefetch_factor": 2},
        {"persistent_workers": True},
        {"sampler": [1], "shuffle": True},
        {"batch_sampler": [[1]], "batch_size": 2},
        {"batch_sampler": [[1]], "drop_last": True},
        {"batch_size": None, "drop_last": True},
        {"dataset": Stateless([3]), "shuffle": True},
        {"dataset": Stateless([3]), "sampler": [1]},
        {"multiprocessing_context": "spawn"},
        {"num_workers": 1, "multiprocessing_context": "teleport"},
    ],
    ids=named,
)
def test_contradictory_arguments_fail_as_in_torch(case: dict[str, Any]) -> None:
    messages = []
    for kind in (DataLoader, StatefulDataLoader):
        with pytest.raises(ValueError, match=r".") as caught:
            build(kind, case)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_the_arguments_of_a_training_run_may_be_positional() -> None:
    config = SimpleNamespace(num_workers=0, pin_memory=False, prefetch_factor=2)
    sampler = DistributedSampler(DATA, num_replicas=1, rank=0)
    expected = list(StatefulDataLoader(DATA, 4, sampler=sampler, config=config))
    positional: list[tuple[Any, ...]] = [(sampler, config), (None, config)]
    for rest in positional:
        loader = StatefulDataLoader(DATA, 4, *rest)
        assert_same(list(loader), expected)
        assert len(loader) == 5  # of 23 samples: the incomplete last batch is dropped
        assert loader.epoch == 1


def test_the_loader_is_a_subclass_of_torchs() -> None:
    assert isinstance(StatefulDataLoader(DATA), DataLoader)


class Asking(Squares):
    """A dataset that returns what a worker knows about the worker and its dataset."""

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        return info.id, info.num_workers, info.seed, torch.initial_seed(), info.dataset is self, self.size


def enlarge(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    data: Any = info.dataset
    data.size += 100 + worker


def test_workers_see_the_same_dataset_seed_and_number_as_torchs() -> None:
    case = {"dataset": Asking(8), "num_workers": 2, "batch_size": None, "worker_init_fn": enlarge}
    assert_same(batches(StatefulDataLoader, case, 1), batches(DataLoader, case, 1))


def test_collated_batches_become_tensors_without_a_copy() -> None:
    data = Gathered(8)
    batch = next(iter(StatefulDataLoader(data, batch_size=3, collate_fn=None)))
    assert batch["x"].tolist() == data.data[:3].tolist()
    assert batch["x"].dtype == torch.int64


@pytest.mark.parametrize("workers", [0, 2])
def test_collated_batches_equal_those_fetched_sample_by_sample(workers: int) -> None:
    torch.manual_seed(2)
    one = list(DataLoader(Gathered(23), batch_size=4, shuffle=True, collate_fn=stack))
    torch.manual_seed(2)
    assert_same(list(StatefulDataLoader(Gathered(23), batch_size=4, shuffle=True, num_workers=workers)), one)


def stack(batch: Any) -> Any:
    return {"x": torch.from_numpy(batch["x"])}


def test_a_stream_longer_than_its_length_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Short(Stateless):
        def __len__(self) -> int:
            return 4

    loader = StatefulDataLoader(Short([10]), batch_size=2)
    assert sum(1 for _ in loader) == 5
    assert not caplog.records  # no code has asked for the length
    assert len(loader) == 2
    list(loader)
    assert all("reported to be 4 " in message for message in caplog.messages)
    assert [re.findall(r"but (\d+) samples have", message) for message in caplog.messages] == [["6"], ["8"], ["10"]]
    assert {record.levelname for record in caplog.records} == {"WARNING"}


def test_workers_with_whole_streams_are_logged_as_in_torch(caplog: pytest.LogCaptureFixture) -> None:
    class Short(Stateless):
        def __len__(self) -> int:
            return 10

    def passage(message: object) -> str:
        return str(message).split("replica")[0].split("but")[1]

    def iterate(kind: Any) -> None:
        loader = kind(Short([10, 10]), num_workers=2)
        assert len(loader) == 10
        list(loader)

    with pytest.warns(UserWarning, match="samples have been fetched") as warned:
        iterate(DataLoader)
    iterate(StatefulDataLoader)
    # Python 3.12 and later also warn about a fork in a process with threads, which pytest may have started.
    torchs = [passage(warning.message) for warning in warned if warning.category is UserWarning]
    assert len(torchs) == 10
    assert [passage(message) for message in caplog.messages] == torchs


def test_pinning_without_an_accelerator_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    loader = StatefulDataLoader(DATA, pin_memory=True)
    list(loader), list(loader)
    assert caplog.messages == ([] if can_pin() else ["pin_memory=True has no effect: there is no accelerator"])


@pytest.mark.parametrize("data", [range(3), Stateless([2, 1])], ids=["map", "iterable"])
@pytest.mark.parametrize(("asked", "possible"), [(True, True), (True, False), (False, True)])
def test_batches_are_pinned_where_that_is_asked_for_and_possible(
    data: Any, asked: bool, possible: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[Any] = []

    def pin(batch: Any) -> Any:
        pinned.append(batch)
        return batch

    monkeypatch.setattr(loader_module, "can_pin", lambda: possible)
    monkeypatch.setattr(loader_module, "pin", pin)
    batches = list(StatefulDataLoader(data, batch_size=None, pin_memory=asked))
    assert pinned == (batches if asked and possible else [])


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
@pytest.mark.parametrize("data", [range(3), Stateless([2, 1])], ids=["map", "iterable"])
@pytest.mark.slow
def test_several_iterators_at_once_behave_as_torchs(data: Any, workers: dict[str, Any]) -> None:
    """No iterator may end early because another one began."""
    torchs = DataLoader(data, batch_size=None, **workers)
    ours = StatefulDataLoader(data, batch_size=None, **workers)
    assert [(a, b) for a in ours for b in ours] == [(a, b) for a in torchs for b in torchs]
    assert list(zip(ours, ours, strict=False)) == list(zip(torchs, torchs, strict=False))
    older = iter(ours)
    next(older), next(older)
    newer = iter(ours)
    assert next(newer) == 0
    assert ours.state_dict()["batches_yielded"] == 1  # the newest's


def test_an_older_iterator_with_a_prefetch_thread_continues() -> None:
    ours = StatefulDataLoader(Gathered(12), batch_size=4, num_workers=2)
    pairs = [(a["x"], b["x"]) for a, b in zip(ours, ours, strict=True)]
    assert len(pairs) == 3
    assert all(torch.equal(a, b) for a, b in pairs)

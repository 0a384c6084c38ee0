"""Resumed equals uninterrupted: every kind of dataset and sampler, cut anywhere, any number of times."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loading import (
    Augmented,
    CursorSampler,
    EpochSampler,
    Gathered,
    Generated,
    GlobalSampler,
    Listed,
    Noisy,
    OwnIterator,
    Restarting,
    Squares,
    Stateless,
    WithCursor,
    identity,
    take_batches,
)
from properties import given_in_tiers
from resume import assert_resumes_exactly, assert_same
from torch.utils.data import IterableDataset, RandomSampler, Sampler, SubsetRandomSampler

from exactdata import DistributedSampler, ElasticSampler, MixtureSampler, StatefulDataLoader
from exactdata.loading.protocols import LoaderStateError
from exactdata.order.weights import SamplerStateError

SIZE = 23
Make = Callable[..., Any]


def mapped(data: Any, **fixed: Any) -> Make:
    return lambda **more: StatefulDataLoader(data, **{**fixed, **more})


def sampled(data: Any, sampler: Callable[[], Any]) -> Make:
    return lambda **more: StatefulDataLoader(data, sampler=sampler(), **more)


def configured(**more: Any) -> Any:
    config = SimpleNamespace(num_workers=more.pop("num_workers", 0), pin_memory=False, prefetch_factor=None)
    return StatefulDataLoader(Gathered(SIZE), config=config, sampler=distributed(), **more)


def distributed() -> Any:
    return DistributedSampler(Squares(SIZE), num_replicas=2, rank=1, seed=3)


def elastic() -> Any:
    return ElasticSampler({"a": 10, "b": 13}, {"a": 1.0, "b": 2.0}, num_replicas=2, rank=1, seed=3, global_batch_size=4)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(9)


MAPS: dict[str, Make] = {
    "in order": mapped(Squares(SIZE)),
    "shuffled": mapped(Squares(SIZE), shuffle=True),
    "with __getitems__": mapped(Listed(SIZE), shuffle=True),
    "collated": mapped(Gathered(SIZE), shuffle=True),
    "augmented": mapped(Augmented(SIZE), shuffle=True),
    "generator of the user": lambda **more: StatefulDataLoader(
        Squares(SIZE), shuffle=True, generator=generator(), **more
    ),
    "generator of the sampler": sampled(Squares(SIZE), lambda: RandomSampler(Squares(SIZE), generator=generator())),
    "with replacement": sampled(Squares(SIZE), lambda: RandomSampler(Squares(SIZE), replacement=True, num_samples=50)),
    "subset": sampled(Squares(SIZE), lambda: SubsetRandomSampler(range(2, 19))),
    "a sampler without a state": sampled(Squares(SIZE), lambda: GlobalSampler(SIZE)),
    "a sampler with a state": sampled(Squares(SIZE), lambda: EpochSampler(SIZE)),
    "a sampler whose iterator has a state": sampled(Squares(SIZE), lambda: CursorSampler(SIZE)),
    "distributed": sampled(Augmented(SIZE), distributed),
    "elastic": sampled(Augmented(SIZE), elastic),
    "with config": configured,
}
STREAMS: dict[str, Make] = {
    "cursor": lambda **more: StatefulDataLoader(WithCursor([3, 20]), **more),
    "random cursor": lambda **more: StatefulDataLoader(WithCursor([3, 20], random=True), **more),
    "generated": lambda **more: StatefulDataLoader(Generated([3, 20]), **more),
    "generated, stays at its end": lambda **more: StatefulDataLoader(Generated([3, 20], stays=True), **more),
    "restarting": lambda **more: StatefulDataLoader(Restarting([3, 20]), **more),
    "stateless": lambda **more: StatefulDataLoader(Stateless([3, 20]), **more),
}
KINDS = {**MAPS, **STREAMS}


def seeded(make: Make, first: int = 1, **more: Any) -> Callable[[], Any]:
    """Make loaders; after the first `first` of them the global generator differs, as in a restarted program."""
    left = iter(range(first))

    def again() -> Any:
        torch.manual_seed(99 if next(left, None) is None else 1)
        return make(**more)

    return again


def check(make: Make, cuts: list[int], total: int, **more: Any) -> None:
    whole = take_batches(seeded(make, **more)(), total)
    first = seeded(make, **more)
    found: list[Any] = []
    loader = first()
    for cut in cuts:
        found += take_batches(loader, min(cut, total - len(found)))
        state = loader.state_dict()
        loader = first()
        loader.load_state_dict(state)
        at_the_end = loader.epoch == state["epoch"] + 1 and state["batches_yielded"]
        assert at_the_end or loader.epoch == state["epoch"]
        assert loader.batches_yielded == (0 if at_the_end else state["batches_yielded"])
    found += take_batches(loader, total - len(found))
    assert_same(found, whole)


IN_PROCESS = [name for name in KINDS if name != "random cursor"]  # it draws from the process's own generator


@pytest.mark.parametrize("name", IN_PROCESS)
@given_in_tiers(data=st.data(), few=5, many=60)
def test_resume_in_this_process(name: str, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=5), label="cuts")
    batch_size = data.draw(st.sampled_from([1, 4, 5, 23]), label="batch size")
    drop_last = data.draw(st.booleans(), label="drop last")
    check(KINDS[name], cuts, 20, batch_size=batch_size, drop_last=drop_last)


@pytest.mark.parametrize("name", [name for name in IN_PROCESS if name not in ("elastic", "with config")])
def test_resume_without_batching(name: str) -> None:
    check(KINDS[name], [7, 0, 16, 2], 60, batch_size=None)


def test_the_check_shared_by_all_stateful_things_agrees() -> None:
    make = seeded(MAPS["shuffled"], first=2, batch_size=4)  # the uninterrupted and the interrupted one
    assert_resumes_exactly(make, [2, 0, 4, 5], total=20, take=take_batches)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=6)
@given(data=st.data())
def test_resume_in_worker_processes(name: str, data: st.DataObject) -> None:
    options = {
        "num_workers": data.draw(st.sampled_from([1, 2]), label="workers"),
        "batch_size": data.draw(st.sampled_from([1, 4]), label="batch size"),
        "prefetch_factor": data.draw(st.sampled_from([1, 2, 5]), label="prefetch"),
        "persistent_workers": data.draw(st.booleans(), label="persistent"),
        "snapshot_every_n_steps": data.draw(st.sampled_from([0, 1, 2, 3]), label="snapshots"),
    }
    if name == "with config":
        options = {key: options[key] for key in ("num_workers", "batch_size")}
    cuts = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3), label="cuts")
    check(KINDS[name], cuts, 16, **options)


@pytest.mark.parametrize("name", ["shuffled", "collated", "augmented", "a sampler with a state", "distributed"])
def test_the_worker_count_may_change_at_a_resume(name: str) -> None:
    make = MAPS[name]
    whole = take_batches(seeded(make, batch_size=4)(), 14)
    fresh = seeded(make, batch_size=4)
    loader, found, states = fresh(), [], []
    for workers, count in ((2, 2), (0, 3), (1, 9)):
        found += take_batches(loader, count)
        states.append(loader.state_dict())
        loader = make(batch_size=4, num_workers=workers)
        loader.load_state_dict(states[-1])
    assert_same(found, whole)


@pytest.mark.parametrize("name", ["shuffled", "distributed", "elastic", "a sampler with a state"])
def test_resume_at_another_batch_size_takes_the_next_sample(name: str) -> None:
    def samples(batches: list[Any]) -> list[Any]:
        return [item for batch in batches for item in batch]

    make = MAPS[name]
    whole = samples(take_batches(seeded(make, batch_size=1, collate_fn=identity)(), 11))
    fresh = seeded(make, batch_size=2, collate_fn=identity)
    loader = fresh()
    found = samples(take_batches(loader, 2))
    state = loader.state_dict()
    loader = make(batch_size=3, collate_fn=identity)
    loader.load_state_dict(state)
    found += samples(take_batches(loader, 1))
    loader2 = make(batch_size=4, collate_fn=identity)
    loader2.load_state_dict(loader.state_dict())
    found += samples(take_batches(loader2, 1))
    assert_same(found, whole)


def test_sample_rng_does_not_depend_on_workers_or_batch_size() -> None:
    def run(**more: Any) -> list[tuple[int, float]]:
        torch.manual_seed(4)
        loader = StatefulDataLoader(Augmented(SIZE), sampler=distributed(), collate_fn=identity, **more)
        return [item for _ in range(2) for batch in loader for item in batch]

    expected = run(batch_size=4)
    assert run(batch_size=3) == expected == run(batch_size=4, num_workers=2)
    assert len({value for _, value in expected}) == len(expected)


@pytest.mark.parametrize("persistent", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_states_of_a_dataset_in_workers_are_restored(persistent: bool) -> None:
    check(mapped(Noisy(SIZE)), [3, 4], 12, batch_size=3, num_workers=2, persistent_workers=persistent)


def test_a_dataset_that_is_its_own_iterator_has_one_epoch() -> None:
    loader = StatefulDataLoader(OwnIterator(10), batch_size=3)
    iterator = iter(loader)
    next(iterator)
    state, rest = loader.state_dict(), list(iterator)
    again = StatefulDataLoader(OwnIterator(10), batch_size=3)
    again.load_state_dict(state)
    assert_same(list(again), rest)
    assert list(again) == []


@pytest.mark.parametrize("name", IN_PROCESS)
def test_states_are_json_if_the_datasets_are(name: str) -> None:
    loader = seeded(KINDS[name], batch_size=4)()
    list(zip(range(2), loader, strict=False))
    state = loader.state_dict()
    again = KINDS[name](batch_size=4)
    again.load_state_dict(json.loads(json.dumps(state)))
    assert_same(take_batches(again, 7), take_batches(loaded(KINDS[name](batch_size=4), state), 7))


def loaded(loader: Any, state: Any) -> Any:
    loader.load_state_dict(state)
    return loader


def test_states_at_both_ends_of_an_epoch_resume() -> None:
    make = seeded(MAPS["shuffled"], batch_size=5)
    loader = make()
    before = loader.state_dict()
    first_epoch = []
    for batch in loader:
        first_epoch.append(batch)
        last = loader.state_dict()
    after = loader.state_dict()
    second_epoch = list(loader)
    assert_same(list(loaded(make(), before)), first_epoch)
    at_last = loaded(make(), last)
    assert (at_last.epoch, at_last.batches_yielded) == (1, 0)
    assert_same(list(at_last), second_epoch)
    assert_same(list(loaded(make(), after)), second_epoch)


ENDING: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in MAPS if name not in ("elastic", "with replacement", "subset")),
    ("shuffled", {"num_workers": 2}),
    ("a sampler with a state", {"num_workers": 2, "persistent_workers": True}),
]


@pytest.mark.parametrize(("name", "more"), ENDING)
@pytest.mark.parametrize("batch_size", [4, 11])
def test_a_state_after_the_last_batch_begins_the_next_epoch(name: str, more: Any, batch_size: int) -> None:
    """Trainers that count batches save it before they see the end, and begin the next epoch after a resume."""
    make = seeded(MAPS[name], batch_size=batch_size, **more)
    whole, first = make(), make()
    epochs = [list(whole) for _ in range(3)]
    for number, epoch in enumerate(epochs[:2]):
        stream = iter(first)
        assert_same([next(stream) for _ in epoch], epoch)
        first = loaded(make(), first.state_dict())
        assert (first.epoch, first.batches_yielded, len(first)) == (number + 1, 0, len(epochs[2]))
    assert_same(list(first), epochs[2])


class Unsized(EpochSampler):
    __len__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("workers", [0, 2])
def test_state_of_unknown_length_has_an_empty_rest(workers: int) -> None:
    def make() -> Any:
        return StatefulDataLoader(Squares(SIZE), 5, sampler=Unsized(SIZE), num_workers=workers)

    loader, whole = make(), make()
    epochs = [list(whole), list(whole)]
    stream = iter(loader)
    for _ in epochs[0]:
        next(stream)
    again = loaded(make(), loader.state_dict())
    assert list(again) == []
    assert_same(list(again), epochs[1])


class DrawnAtOnce(Sampler[int]):
    """A sampler whose `__iter__` draws the next order, counted in its state."""

    def __init__(self) -> None:
        self.drawn = 0

    def __iter__(self) -> Iterator[int]:
        self.drawn += 1
        return iter([(self.drawn + 5 * place) % SIZE for place in range(SIZE)])

    def __len__(self) -> int:
        return SIZE

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.drawn = state["drawn"]


def test_drawn_unstarted_order_is_drawn_again_at_a_resume() -> None:
    make = sampled(Squares(SIZE), DrawnAtOnce)
    loader = make(batch_size=5)
    iterator = iter(loader)
    state = loader.state_dict()
    assert_same(list(loaded(make(batch_size=5), state)), list(iterator))


def test_loaded_state_is_returned_unchanged_at_first() -> None:
    for make in KINDS.values():
        loader = seeded(make, batch_size=4)()
        take_batches(loader, 2)
        state = loader.state_dict()
        again = loaded(make(batch_size=4), state)
        assert_same([again.state_dict()], [state])
        iter(again)
        assert_same([again.state_dict()], [state])


class Changing:
    """A sampler by position with one state object, which it keeps changing."""

    def __init__(self, size: int) -> None:
        self.size, self.state = size, {"place": [0]}

    def set_epoch(self, epoch: int) -> None: ...

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))

    def __len__(self) -> int:
        return self.size

    def state_dict_at(self, samples: int) -> dict[str, Any]:
        self.state["place"][0] = samples
        return self.state


def test_a_state_is_not_changed_by_the_batches_after_it() -> None:
    """The state may be written while training continues, although the sampler changes its state."""
    loader = StatefulDataLoader(Squares(12), 2, sampler=Changing(12))
    stream = iter(loader)
    next(stream)
    state = loader.state_dict()
    assert state["sampler"] == {"place": [2]}
    before = json.dumps(state)
    next(stream)
    assert loader.state_dict()["sampler"] == {"place": [4]}
    assert json.dumps(state) == before


def test_state_from_mid_epoch_resumes_there() -> None:
    for more in ({}, {"num_workers": 2, "persistent_workers": True}):
        loader = seeded(MAPS["shuffled"], batch_size=5, **more)()
        iterator = iter(loader)
        state = loader.state_dict()
        expected = list(iterator)
        next(iter(loader))
        assert_same(list(loaded(loader, state)), expected)


@pytest.mark.parametrize("name", MAPS)
def test_last_of_two_loaded_states_counts(name: str) -> None:
    """A state within an epoch must leave nothing behind for a state between two epochs."""
    make = seeded(MAPS[name], batch_size=4)
    loader = make()
    take_batches(loader, 2)
    within = loader.state_dict()
    loader.end_epoch()
    between = loader.state_dict()
    expected = take_batches(loader, 4)
    assert_same(take_batches(loaded(loaded(make(), within), between), 4), expected)


def mixture() -> Any:
    return MixtureSampler([0, 10, SIZE], [1.0, 2.0], num_replicas=2, rank=1, seed=3)


@pytest.mark.parametrize("sampler", [distributed, mixture])
def test_seeded_sampler_resumes_behind_its_loader(sampler: Any) -> None:
    """Iterate over the sampler instead of the loader: it yields the rest of the epoch."""
    loader = StatefulDataLoader(Squares(SIZE), batch_size=4, sampler=sampler())
    expected = list(sampler())[8:]
    take_batches(loader, 2)
    resumed = sampler()
    loaded(StatefulDataLoader(Squares(SIZE), batch_size=4, sampler=resumed), loader.state_dict())
    assert list(resumed) == expected


def test_loading_a_state_ends_the_old_prefetch_thread() -> None:
    """The dataset may be changed then, so no thread may read it."""
    before = set(threading.enumerate())
    loader = StatefulDataLoader(Gathered(40), batch_size=4, num_workers=2)
    older = iter(loader)
    next(older)
    assert set(threading.enumerate()) - before
    loader.load_state_dict(loader.state_dict())
    assert not set(threading.enumerate()) - before


def test_a_second_iter_in_the_middle_of_an_epoch_begins_it_again() -> None:
    loader = StatefulDataLoader(Squares(SIZE), batch_size=5, sampler=distributed())
    first = next(iter(loader))
    assert_same([next(iter(loader))], [first])
    assert loader.epoch == 0
    assert loader.batches_yielded == 1


def test_the_state_does_not_grow_with_the_position() -> None:
    loader = StatefulDataLoader(Squares(2000), batch_size=5, shuffle=True)
    iterator = iter(loader)
    sizes = []
    for _ in range(399):
        next(iterator)
        sizes.append(len(json.dumps(loader.state_dict())))
    assert max(sizes) - min(sizes) < 20


def test_without_an_order_of_batches_no_state_is_taken_or_loaded() -> None:
    """Batches that overtook others would be repeated with another number of workers, ranks or samples per batch."""
    state = StatefulDataLoader(Squares(12), 2).state_dict()
    for dataset in (Squares(12), Counting()):
        loader: Any = StatefulDataLoader(dataset, 2, num_workers=2, in_order=False)
        for refused in (loader.state_dict, lambda loader=loader: loader.load_state_dict(state)):
            with pytest.raises(LoaderStateError, match="set in_order=True to save or load a state"):
                refused()


class Counting(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


class Interrupted(Squares):
    """A dataset in which Ctrl-C strikes once, at one sample."""

    at = 9

    def __getitem__(self, index: int) -> Any:
        if index == self.at:
            self.at = -1
            raise KeyboardInterrupt
        return index


class InterruptedStream(Counting):
    strikes = True

    def __iter__(self) -> Iterator[int]:
        for index in range(SIZE):
            if index == 9 and self.strikes:
                self.strikes = False
                raise KeyboardInterrupt
            yield index


class InterruptedSampler(CursorSampler):
    strikes = True

    def __iter__(self) -> Iterator[int]:
        for index in super().__iter__():
            if index == 9 and self.strikes:
                self.strikes = False
                raise KeyboardInterrupt
            yield index


@pytest.mark.parametrize(
    "make",
    [
        lambda: StatefulDataLoader(Interrupted(SIZE), 4, collate_fn=list, sampler=EpochSampler(SIZE)),
        lambda: StatefulDataLoader(Squares(SIZE), 4, collate_fn=numbers, sampler=InterruptedSampler(SIZE)),
        lambda: StatefulDataLoader(InterruptedStream(), 4, collate_fn=list),
    ],
    ids=["dataset", "sampler", "stream"],
)
def test_ctrl_c_while_a_batch_is_fetched_loses_nothing(make: Make) -> None:
    loader, found = make(), []
    with pytest.raises(KeyboardInterrupt):
        found.extend(loader)
    again = make()
    again.dataset.at = again.dataset.strikes = again.sampler.strikes = False
    found += list(loaded(again, loader.state_dict()))
    assert sorted(index for batch in found for index in batch) == list(range(SIZE))


def numbers(samples: list[Any]) -> list[int]:
    return [int(sample["x"][0]) for sample in samples]


def test_mid_epoch_state_is_refused_if_weights_changed() -> None:
    def make(*weights: float) -> Any:
        sampler = MixtureSampler([0, 12, 24], weights, num_replicas=1)
        return StatefulDataLoader(Squares(24), batch_size=2, sampler=sampler)

    first = make(1, 1)
    stream = iter(first)
    at_start = first.state_dict()
    next(stream)
    other = make(2, 1)
    other.load_state_dict(first.state_dict())
    with pytest.raises(SamplerStateError, match="within an epoch drawn with counts"):
        next(iter(other))
    other.load_state_dict(at_start)
    assert len(list(other)) == 12


@pytest.mark.parametrize("samples", [-4, 1000, 2.0])
def test_edited_counts_of_samples_are_refused(samples: Any) -> None:
    loader = StatefulDataLoader(Squares(24), batch_size=2, sampler=DistributedSampler(range(24), num_replicas=1))
    next(iter(loader))
    with pytest.raises(LoaderStateError, match="samples_yielded in this state is"):
        loader.load_state_dict({**loader.state_dict(), "samples_yielded": samples})

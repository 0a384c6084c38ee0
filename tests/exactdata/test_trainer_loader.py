"""TrainerLoader: each sample once, in one order, under any trainer, ranks and batch; committed batches."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exactdata import ElasticSampler, LoaderStateError, SamplerStateError, StatefulDataLoader, TrainerLoader
from exactdata.loading.protocols import DataEndedError, LoaderError
from exactdata.trainer_loader import committed_batches

SIZE = 200


class Numbers:
    """Numbers from `first` on, each with a draw from a global generator."""

    def __init__(self, first: int, size: int = SIZE) -> None:
        self.first, self.size = first, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"id": self.first + index, "draw": random.random()}


def loaders(ranks: int, batch: int = 8, mixed: bool = False, **others: Any) -> list[TrainerLoader]:
    data: Any = {"a": Numbers(0, 150), "b": Numbers(1000, 50)} if mixed else Numbers(0)
    return [
        TrainerLoader(data, global_batch_size=batch, num_replicas=ranks, rank=rank, seed=3, **others)
        for rank in range(ranks)
    ]


def ids(batches: list[dict[str, Any]]) -> list[int]:
    """Return the ids of a step, in the order of the positions."""
    lists = [batch["id"].tolist() for batch in batches]
    return [one for group in zip(*lists, strict=True) for one in group]


def steps(ranks: list[TrainerLoader], count: int | None = None) -> list[list[int]]:
    """Return the ids of the steps of one pass, or of the first `count` of them."""
    iterators = [iter(one) for one in ranks]
    return [ids(list(batches)) for batches in islice(zip(*iterators, strict=True), count)]


def flat(lists: list[list[int]]) -> list[int]:
    return [one for each in lists for one in each]


def saved(ranks: list[TrainerLoader]) -> dict[str, str]:
    states = [one.state_dict() for one in ranks]
    assert all(one == states[0] for one in states)
    return states[0]


@pytest.mark.parametrize("mixed", [False, True], ids=["one source", "mixture"])
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (2, 1), (1, 2)])
@pytest.mark.parametrize("stop", [10, 25])
def test_resume_on_other_ranks_keeps_the_undisturbed_order(before: int, after: int, stop: int, mixed: bool) -> None:
    whole = loaders(1, mixed=mixed, epoch_samples=SIZE)
    expected = steps(whole) + steps(whole)
    assert len(expected) == 50
    first = loaders(before, mixed=mixed, epoch_samples=SIZE)
    done = steps(first, stop)
    again = loaders(after, mixed=mixed, epoch_samples=SIZE)
    for one in again:
        one.load_state_dict(saved(first))
        assert len(one) == 25
    rest = steps(again) + (steps(again) if stop == 10 else [])
    assert done + rest == expected
    assert sorted(flat(expected[:25])) == sorted(flat(expected[25:]))  # each id once in each pass


@given(
    size=st.integers(5, 60),
    shapes=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 12)), min_size=1, max_size=6),
)
@settings(max_examples=20, deadline=None)
def test_any_sequence_of_shapes_yields_the_positions_in_turn(size: int, shapes: list[tuple[int, int, int]]) -> None:
    data, state, seen = Numbers(0, size), None, []
    for ranks, per_rank, count in shapes:
        mine = [
            TrainerLoader(data, global_batch_size=ranks * per_rank, epoch_samples=size, num_replicas=ranks, rank=rank)
            for rank in range(ranks)
        ]
        if state is not None:
            for one in mine:
                one.load_state_dict(state)
        left = count
        while left:
            length = len(mine[0])
            new = steps(mine, left)
            assert new, "a pass without a batch"
            assert length == len(mine[0]) or len(new) < left
            seen += flat(new)
            left -= len(new)
        state = saved(mine)
    sampler = ElasticSampler({"data": size}, [size], global_batch_size=1, num_replicas=1)
    assert seen == list(islice(sampler, len(seen)))


def test_another_global_batch_ends_each_pass_at_its_place() -> None:
    first = loaders(2, batch=8, epoch_samples=SIZE)
    done = flat(steps(first, 10))
    again = loaders(2, batch=16, epoch_samples=SIZE)
    for one in again:
        one.load_state_dict(saved(first))
    assert len(again[0]) == 18  # 10 of 8 samples, 7 of 16, and one of 8
    done += flat(steps(again))
    assert sorted(done) == list(range(SIZE))
    assert (len(again[0]), sorted(flat(steps(again)))) == (13, list(range(SIZE)))


def test_abandoned_iterator_is_continued() -> None:
    (loader,) = loaders(1, epoch_samples=SIZE)
    taken = steps([loader], 3)
    loader.set_epoch(7)
    loader.elastic_sampler.set_epoch(7)
    assert len(loader) == 25
    taken += steps([loader])
    assert taken == steps(loaders(1, epoch_samples=SIZE))


def test_loop_that_counts_batches_may_skip_the_end_of_a_pass() -> None:
    (loader,) = loaders(1, epoch_samples=SIZE, samples=2 * SIZE)
    taken = steps([loader], 25)
    taken += steps([loader], 1)
    assert len(loader) == 25
    taken += steps([loader], 24)
    assert taken == steps(whole := loaders(1, epoch_samples=SIZE)) + steps(whole)
    with pytest.raises(DataEndedError):
        iter(loader)


def test_an_older_iterator_ends_and_changes_nothing() -> None:
    (loader,) = loaders(1, epoch_samples=SIZE)
    older = iter(loader)
    taken = [next(older)["id"].tolist() for _ in range(3)]
    state = loader.state_dict()
    newer = iter(loader)
    assert next(older, None) is None
    taken.append(next(newer)["id"].tolist())
    assert len(loader) == 25
    loader.load_state_dict(state)
    assert next(newer, None) is None
    assert taken[:3] + steps([loader]) == steps(loaders(1, epoch_samples=SIZE))


def test_a_state_is_loaded_into_an_iterator_that_has_not_begun() -> None:
    """Some trainers make the iterator before they load the state."""
    (loader,) = loaders(1, epoch_samples=SIZE)
    taken = steps([loader], 3)
    (again,) = loaders(1, epoch_samples=SIZE)
    iterator = iter(again)
    again.load_state_dict(loader.state_dict())
    taken += [batch["id"].tolist() for batch in iterator]
    assert taken == steps(loaders(1, epoch_samples=SIZE))


def test_state_without_length_is_of_the_batch_before() -> None:
    (loader,) = loaders(1, fetched_ahead=1)
    with pytest.raises(TypeError, match="pass epoch_samples="):
        len(loader)
    fetched = steps([loader], 5)
    (again,) = loaders(1, fetched_ahead=1)
    again.load_state_dict(loader.state_dict())
    assert steps([again], 1) == fetched[4:]


@pytest.mark.parametrize("stop", [10, 24, 25, 26])
def test_pass_without_length_ends_at_its_place(stop: int) -> None:
    """Iterate as Lightning does: fetch one batch before training on the previous one, also at the end of a pass."""

    def train(loader: TrainerLoader, count: int | None) -> Iterator[list[int]]:
        while count is None or count > 0:
            iterator = iter(loader)
            ahead = next(iterator, None)
            while ahead is not None and (count is None or count > 0):
                batch, ahead = ahead, next(iterator, None)
                count = None if count is None else count - 1
                yield batch["id"].tolist()
            if count is None:
                return

    (loader,) = loaders(1, epoch_samples=SIZE, has_length=False, fetched_ahead=1)
    with pytest.raises(TypeError, match="has_length=False"):
        len(loader)
    done = flat(list(train(loader, stop)))
    (again,) = loaders(1, batch=16, epoch_samples=SIZE, has_length=False, fetched_ahead=1)
    again.load_state_dict(loader.state_dict())
    done += flat(list(train(again, None)))
    assert len(done) == SIZE * (2 if stop >= 25 else 1)
    assert done == flat(steps(whole := loaders(1, epoch_samples=SIZE)) + steps(whole))[: len(done)]


def test_random_transforms_do_not_depend_on_shape_or_resumes() -> None:
    def draws(ranks: list[TrainerLoader], count: int) -> list[float]:
        found = [list(islice(one, count)) for one in ranks]
        return [
            draw
            for step in zip(*found, strict=True)
            for pair in zip(*(b["draw"].tolist() for b in step), strict=True)
            for draw in pair
        ]

    whole = draws(loaders(1), 8)
    first = loaders(2, num_workers=2)
    done = draws(first, 4)
    (again,) = loaders(1)
    again.load_state_dict(saved(first))
    assert done + draws([again], 4) == whole


def test_the_data_end_once() -> None:
    (loader,) = loaders(1, epoch_samples=SIZE, samples=SIZE + 20)
    assert [len(one) for one in (steps([loader]), steps([loader]))] == [25, 3]
    with pytest.raises(DataEndedError, match=r"all 220 samples were yielded.*raise samples="):
        iter(loader)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 4}, "batch_size=4: TrainerLoader takes global_batch_size"),
        ({"drop_last": True}, "takes epoch_samples, a multiple of global_batch_size"),
        ({"epoch_samples": 0}, "epoch_samples 0: it must be 1 or more"),
        ({"fetched_ahead": -1}, "fetched_ahead -1: it must be 0 or more"),
    ],
)
def test_wrong_arguments_name_the_right_ones(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loaders(1, **arguments)


def test_a_dataset_without_a_length_is_refused() -> None:
    with pytest.raises(LoaderError, match="has no length: TrainerLoader takes map-style datasets"):
        TrainerLoader(iter([1]), global_batch_size=1)


@pytest.mark.parametrize(
    "state",
    [{}, {"epoch": 1}, [], {"place": 3}, {"place": "{"}, {"place": "[]"}, {"place": '{"version": 1}'}],
    ids=repr,
)
def test_other_values_are_refused_as_a_state_in_one_line(state: Any) -> None:
    (loader,) = loaders(1)
    with pytest.raises(LoaderStateError, match="this state") as raised:
        loader.load_state_dict(state)
    assert "\n" not in str(raised.value)


def test_an_edited_position_is_refused() -> None:
    (loader,) = loaders(1)
    steps([loader], 2)
    place = json.loads(loader.state_dict()["place"])
    place["sampler"]["position"] = 8
    with pytest.raises(SamplerStateError):
        loader.load_state_dict({"place": json.dumps(place)})


def test_passes_of_a_sampler_in_torchs_own_loader() -> None:
    sampler = ElasticSampler({"data": SIZE}, [1.0], global_batch_size=8, num_replicas=1, epoch_samples=SIZE)
    loader: Any = torch.utils.data.DataLoader(Numbers(0), batch_size=8, sampler=sampler)  # type: ignore[arg-type]
    passes = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert len(loader) == 25
        passes.append([batch["id"].tolist() for batch in loader])
    assert passes == [steps(whole := loaders_0()), steps(whole)]


def loaders_0() -> list[TrainerLoader]:
    return [TrainerLoader(Numbers(0), [1.0], global_batch_size=8, num_replicas=1, epoch_samples=SIZE)]


@pytest.mark.parametrize("stop", [0, 3, 24, 25])
def test_passes_of_a_sampler_in_the_stateful_loader(stop: int) -> None:
    def make() -> tuple[ElasticSampler, StatefulDataLoader[Any]]:
        sampler = ElasticSampler({"data": SIZE}, [1.0], global_batch_size=8, num_replicas=1, epoch_samples=SIZE)
        return sampler, StatefulDataLoader(Numbers(0), 8, sampler=sampler)  # type: ignore[arg-type]

    expected = steps(whole := loaders_0()) + steps(whole) + steps(whole)
    _, first = make()
    done = [batch["id"].tolist() for batch in islice(first, stop)]
    sampler, again = make()
    again.load_state_dict(first.state_dict())
    assert again.epoch == (stop == 25)
    for epoch in range(again.epoch, 3):
        sampler.set_epoch(epoch)
        assert len(again) == 25
        done += [batch["id"].tolist() for batch in again]
    assert done == expected


def test_committed_batches_follow_the_commits() -> None:
    sampler = ElasticSampler({"data": SIZE}, [1.0], global_batch_size=4, num_replicas=1, samples=SIZE)
    committed, seen, rng = 0, [], random.Random(1)
    places: list[tuple[int, int | None]] = [(0, None)] * 3
    replicas = [committed_batches(sampler, Numbers(0), 4, partial(places.__getitem__, at)) for at in range(3)]
    while committed * 4 < SIZE:
        present = sorted(rng.sample(range(3), rng.randint(1, 3)))
        for at in range(3):
            places[at] = committed, present.index(at) if at in present else None
        batches = [next(one)["id"].tolist() for one in replicas]
        if rng.random() < 0.3:
            continue  # not committed
        seen += [one for at in present for one in batches[at]]
        committed += len(present)
    places[:] = [(committed, at) for at in range(3)]
    assert all(next(one, None) is None for one in replicas)
    assert seen[:SIZE] == list(sampler)

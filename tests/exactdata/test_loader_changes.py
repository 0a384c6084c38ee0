"""A change of the order during a run acts at the next batch, however it is fetched and prefetched."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loading import Augmented, Gathered, Noisy, Squares, identity, take_batches
from properties import given_in_tiers
from resume import assert_same

from exactdata import ElasticSampler, StatefulDataLoader

SIZES = {"a": 30, "b": 50}
TOTAL = sum(SIZES.values())


class Run:
    """A loader with its sampler; `changes` are made through the sampler, as a user makes them."""

    def __init__(self, dataset: Any, loaded: Any = None, capped: bool = True, **more: Any) -> None:
        self.again: Callable[[Any], Run] = lambda state: Run(dataset, state, capped, **more)
        caps = {"a": 2, "b": 1.5} if capped else None
        self.sampler = ElasticSampler(
            SIZES, [1, 2], num_replicas=2, rank=1, seed=3, global_batch_size=6, max_epochs=caps
        )
        self.loader: Any = StatefulDataLoader(dataset, batch_size=3, sampler=self.sampler, **more)
        if loaded is not None:
            self.loader.load_state_dict(loaded)

    def state(self) -> dict[str, Any]:
        return {key: value for key, value in self.loader.state_dict().items() if key != "digest"}


def act(run: Run, action: Any) -> Run:
    kind, value = action
    if kind == "weights":
        run.sampler.update_weights([value, 1.0], temperature=1.0 + value)
    elif kind == "exclude":
        run.sampler.exclude([f"a:{value}-{value + 3}"])
    elif kind == "resume":
        run = run.again(run.loader.state_dict())
    return run


def history(run: Run, steps: list[tuple[int, Any]]) -> list[Any]:
    """Return a run's batches and sampler states, with changes and resumes after the given numbers of batches."""
    found: list[Any] = []
    for batches, action in steps:
        stream = iter(run.loader)
        found += [batch for _, batch in zip(range(batches), stream, strict=False)]
        run = act(run, action)
        found.append(run.state()["sampler"])
        if action[0] != "resume":
            found += [batch for _, batch in zip(range(2), stream, strict=False)]
            run = act(run, ("resume", 0))
    return [*found, *take_batches(run.loader, 4), run.state()["sampler"]]


weights = st.tuples(st.just("weights"), st.sampled_from([0.0, 0.5, 9.0]))
exclusions = st.tuples(st.just("exclude"), st.sampled_from([0, 7, 20]))
resumes = st.tuples(st.just("resume"), st.just(0))
histories = st.lists(st.tuples(st.integers(0, 6), weights | exclusions | resumes), min_size=1, max_size=4)


@given_in_tiers(
    steps=histories,
    depth=st.sampled_from([1, 2, 40]),
    workers=st.sampled_from([1, 2]),
    capped=st.booleans(),
    few=6,
    many=60,
)
def test_changes_with_a_prefetch_thread_equal_those_without(steps: Any, depth: int, workers: int, capped: bool) -> None:
    expected = history(Run(Gathered(TOTAL), capped=capped), steps)
    config = {"num_workers": workers, "prefetch_factor": depth}
    assert_same(history(Run(Gathered(TOTAL), capped=capped, **config), steps), expected)


@pytest.mark.slow
@settings(max_examples=8)
@given(
    steps=histories,
    depth=st.sampled_from([1, 2, 20]),
    workers=st.sampled_from([1, 2]),
    persistent=st.booleans(),
    capped=st.booleans(),
)
def test_changes_with_workers_equal_those_without(
    steps: Any, depth: int, workers: int, persistent: bool, capped: bool
) -> None:
    expected = history(Run(Augmented(TOTAL), capped=capped), steps)
    config = {"num_workers": workers, "prefetch_factor": depth, "persistent_workers": persistent}
    assert_same(history(Run(Augmented(TOTAL), capped=capped, **config), steps), expected)


CONFIGS: list[dict[str, Any]] = [{"num_workers": 0}, {"num_workers": 2, "prefetch_factor": 2}]


@pytest.mark.parametrize("dataset", [Gathered(TOTAL), Augmented(TOTAL)], ids=["thread", "workers"])
@pytest.mark.parametrize("batch_size", [3, None])
def test_new_weights_act_at_the_next_batch(dataset: Any, batch_size: int | None) -> None:
    runs = []
    for config in CONFIGS:
        sampler = ElasticSampler(SIZES, [1, 0], num_replicas=1, seed=3, global_batch_size=3)
        loader = StatefulDataLoader(dataset, batch_size, sampler=sampler, **config)
        stream: Any = loader.iter_recorded()
        found = [next(stream)[1].indices for _ in range(4)]
        sampler.update_weights([0, 1])
        assert sampler.order.segments[-1].start == 4 * (batch_size or 1)
        runs.append([array.tolist() for array in [*found, *(next(stream)[1].indices for _ in range(4))]])
    assert runs[0] == runs[1]
    assert all(index < SIZES["a"] for batch in runs[0][:4] for index in batch)
    assert all(index >= SIZES["a"] for batch in runs[0][4:] for index in batch)


def test_a_change_between_a_resume_and_the_first_batch_is_saved() -> None:
    run = Run(Gathered(TOTAL))
    expected = take_batches(run.loader, 2)
    run = run.again(run.loader.state_dict())
    run.sampler.update_weights([0, 1])
    twice = run.again(run.loader.state_dict())
    assert_same(take_batches(twice.loader, 3), take_batches(run.loader, 3))
    assert len(expected) == 2


class Failing(Squares):
    """A mixture whose second source raises an error."""

    def __getitem__(self, index: int) -> Any:
        if index >= SIZES["a"]:
            raise ValueError(f"sample {index}")
        return index


@pytest.mark.parametrize("config", CONFIGS[1:])
def test_an_error_in_a_batch_that_is_discarded_is_not_raised(config: Any) -> None:
    sampler = ElasticSampler(SIZES, [1, 0], num_replicas=1, global_batch_size=2, segments=[(4, {"a": 0, "b": 1})])
    loader: Any = StatefulDataLoader(Failing(TOTAL), 2, sampler=sampler, collate_fn=identity, **config)
    stream = iter(loader)
    next(stream), next(stream)
    sampler.update_weights([1, 0])
    assert all(index < SIZES["a"] for _ in range(6) for index in next(stream))


@pytest.mark.parametrize("config", [*CONFIGS, {"num_workers": 2, "persistent_workers": True}])
def test_failed_batch_is_skipped_by_every_way_of_fetching(config: Any) -> None:
    planned = [(2, {"a": 0, "b": 1}), (4, {"a": 1, "b": 0})]
    sampler = ElasticSampler(SIZES, [1, 0], num_replicas=1, global_batch_size=2, segments=planned)
    loader: Any = StatefulDataLoader(Failing(TOTAL), 2, sampler=sampler, collate_fn=identity, **config)
    stream = iter(loader)
    next(stream)
    with pytest.raises(ValueError, match="sample"):
        next(stream)
    sampler.update_weights([1, 0], 3.0)
    assert sampler.order.segments[-1].start == 4
    assert loader.state_dict()["samples_yielded"] == 2
    next(stream)
    assert loader.state_dict()["samples_yielded"] == 6


@pytest.mark.parametrize("config", CONFIGS)
def test_a_first_batch_that_fails_after_a_resume_does_not_count(config: Any) -> None:
    def make() -> Any:
        planned = [(4, {"a": 0, "b": 1}), (6, {"a": 1, "b": 0})]
        sampler = ElasticSampler(SIZES, [1, 0], num_replicas=1, global_batch_size=2, segments=planned)
        return StatefulDataLoader(Failing(TOTAL), 2, sampler=sampler, collate_fn=identity, **config)

    first = make()
    take_batches(first, 2)
    again = make()
    again.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="sample"):
        next(iter(again))
    assert again.state_dict() == first.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("cut", [0, 1, 5])
def test_worker_dataset_state_goes_back_with_discarded_work(cut: int) -> None:
    run = Run(Noisy(TOTAL), num_workers=2, prefetch_factor=3)
    stream = iter(run.loader)
    for _ in range(3):
        next(stream)
    run.sampler.update_weights([5, 1])
    states = [run.loader.state_dict()]
    rest = []
    for _ in range(8):
        rest.append(next(stream))
        states.append(run.loader.state_dict())
    again = run.again(states[cut])
    assert_same(take_batches(again.loader, 8 - cut), rest[cut:])


def test_an_older_iterator_continues_from_its_place() -> None:
    run = Run(Gathered(TOTAL), num_workers=2)
    older: Any = run.loader.iter_recorded()
    first = [next(older)[1].positions.tolist() for _ in range(3)]
    newer: Any = run.loader.iter_recorded()
    again = [next(newer)[1].positions.tolist()]
    run.sampler.update_weights([1, 5], position=2000)
    again += [next(newer)[1].positions.tolist() for _ in range(2)]
    assert again == first
    assert next(older)[1].positions.tolist() == [19, 21, 23]


def test_a_sampler_in_use_by_a_loader_can_be_pickled() -> None:
    run = Run(Gathered(TOTAL), num_workers=2)
    stream = iter(run.loader)
    next(stream)
    assert pickle.loads(pickle.dumps(run.sampler)).state_dict() == run.sampler.state_dict()

"""States: a damaged one gives one clear error or no difference, and a state depends on the place alone."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from loading import Augmented, CursorSampler, Gathered, Generated, Squares, Stateless, take_batches
from properties import given_in_tiers
from resume import assert_same
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.utils.data import DistributedSampler as TorchSampler
from torch.utils.data import Sampler

from exactdata import DistributedSampler, ElasticSampler, LoaderStateError, MixtureSampler, StatefulDataLoader
from exactdata.order.ledger import DataLedger
from exactdata.order.segments import Segment, segments_from_json
from exactdata.order.weights import SamplerStateError
from runner.checkpoint import restore_train_state
from runner.checkpoint.tensors.state import build_train_state

SIZE = 24
SIZES = {"a": 10, "b": 14}


def elastic(rank: int = 0, of: int = 2, **more: Any) -> ElasticSampler:
    return ElasticSampler(SIZES, [1, 2], num_replicas=of, rank=rank, seed=3, global_batch_size=4 * of, **more)


def distributed(rank: int = 0, of: int = 2, **more: Any) -> DistributedSampler:
    return DistributedSampler(range(SIZE), of, rank, **{"seed": 3, **more})


def mixture(rank: int = 0, of: int = 2) -> MixtureSampler:
    return MixtureSampler([0, 10, SIZE], [1, 2], of, rank, seed=3)


def ledger() -> DataLedger:
    return DataLedger(list(SIZES), list(SIZES.values()))


LOADERS: dict[str, Callable[..., Any]] = {
    "distributed": lambda **more: StatefulDataLoader(Augmented(SIZE), 3, sampler=distributed(), **more),
    "mixture": lambda **more: StatefulDataLoader(Gathered(SIZE), 3, sampler=mixture(), **more),
    "elastic": lambda **more: StatefulDataLoader(Gathered(SIZE), 3, sampler=elastic(), **more),
    "torch's sampler": lambda **more: StatefulDataLoader(
        Squares(SIZE), 3, sampler=TorchSampler(Squares(SIZE), 2, 0), **more
    ),
    "shuffled": lambda **more: StatefulDataLoader(Squares(SIZE), 3, shuffle=True, **more),
    "sampler with a state": lambda **more: StatefulDataLoader(Squares(SIZE), 3, sampler=CursorSampler(SIZE), **more),
    "stream": lambda **more: StatefulDataLoader(Generated([12, 12]), 3, **more),
    "stream without a state": lambda **more: StatefulDataLoader(Stateless([12, 12]), 3, **more),
}


def made(name: str, **more: Any) -> Any:
    torch.manual_seed(5)
    return LOADERS[name](**more)


def loaded(thing: Any, state: Any) -> Any:
    thing.load_state_dict(state)
    return thing


# --- damage --------------------------------------------------------------------------------------

JUNK: list[Any] = [None, True, False, -1, 0, 1, 7, 10**9, 10**30, -(10**30), 0.5, 2.0, float("nan"), float("inf")]
JUNK += ["", "x", "7", "line\nline", b"x", [], [None], [1, 2], {}, {"a": 1}, (), object()]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return every key and index in a nested state, as a path to it."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield (*path, key)
        yield from places(inner, (*path, key))


@st.composite
def damaged(draw: Any, state: Any) -> tuple[Any, tuple[Any, ...]]:
    """Draw a state with one value deleted or replaced. Return it with the path."""
    path = draw(st.sampled_from(list(places(state))))
    result = copy.deepcopy(state)
    parent = result
    for key in path[:-1]:
        parent = parent[key]
    if draw(st.booleans()):
        del parent[path[-1]]
    else:
        parent[path[-1]] = draw(st.sampled_from(JUNK))
    return result, path


def refused(thing: Any, state: Any) -> bool:
    """Return whether it was refused with one clear line, and nothing of it was loaded."""
    before = copy.deepcopy(thing.state_dict())
    message = None
    try:
        thing.load_state_dict(state)
    except (LoaderStateError, SamplerStateError) as error:
        message = str(error)
    if message is not None:
        assert "\n" not in message
        assert_same([thing.state_dict()], [before])
    return message is not None


VALID = {name: made(name) for name in LOADERS}
for _loader in VALID.values():
    take_batches(_loader, 2)
STATES = {name: loader.state_dict() for name, loader in VALID.items()}
RESTS = {name: take_batches(loaded(made(name), state), 5) for name, state in STATES.items()}


@pytest.mark.parametrize("name", LOADERS)
@given_in_tiers(data=st.data(), few=20, many=300)
def test_damaged_loader_state_is_refused_or_harmless(name: str, data: st.DataObject) -> None:
    state, _ = data.draw(damaged(STATES[name]))
    loader = made(name)
    if not refused(loader, state):
        assert_same(take_batches(loader, 5), RESTS[name])


@pytest.mark.parametrize("name", ["distributed", "elastic", "stream"])
@given_in_tiers(data=st.data(), few=15, many=200)
def test_damaged_state_of_all_ranks_is_refused_or_harmless(name: str, data: st.DataObject) -> None:
    loader = made(name)
    state, _ = data.draw(damaged(loader.aggregate_state_dict([STATES[name]])))
    if not refused(loader, state):
        assert_same(take_batches(loader, 5), RESTS[name])


SAMPLERS: dict[str, Callable[[], Any]] = {"distributed": distributed, "mixture": mixture, "elastic": elastic}


@pytest.mark.parametrize("name", SAMPLERS)
@given_in_tiers(data=st.data(), few=30, many=300)
def test_damaged_sampler_state_is_refused_or_harmless(name: str, data: st.DataObject) -> None:
    def rest(sampler: Any) -> list[int]:
        return [index for index, _ in zip(sampler, range(9), strict=False)]

    sampler = SAMPLERS[name]()
    rest(sampler)
    valid = sampler.state_dict()
    state, path = data.draw(damaged(valid))
    assume(not (path == ("epoch",) and type(state.get("epoch")) is int))  # it may be any, in these four numbers
    other = SAMPLERS[name]()
    if not refused(other, state):
        assert rest(other) == rest(loaded(SAMPLERS[name](), valid))


@given_in_tiers(data=st.data(), few=40, many=400)
def test_a_damaged_ledger_is_refused(data: st.DataObject) -> None:
    mine = ledger()
    for first in (0, 8):
        mine.consume(np.arange(first, first + 8), np.arange(first, first + 8))
        mine.commit(mine.local())
    state, _ = data.draw(damaged(mine.state_dict()))
    other = ledger()
    assert refused(other, state) or other.state_dict() == mine.state_dict()


SHORT = ("epoch", "batches_yielded", "samples_yielded", "batch_size", "sampler")


@pytest.mark.parametrize("name", ["distributed", "mixture", "elastic", "torch's sampler"])
@given_in_tiers(data=st.data(), few=20, many=300)
def test_damaged_foreign_state_is_refused_or_a_place(name: str, data: st.DataObject) -> None:
    """Without a digest it may name any place that exists."""
    state, _ = data.draw(damaged({key: STATES[name][key] for key in SHORT}))
    loader = made(name)
    if not refused(loader, state):
        loader.load_state_dict(state)
        assert take_batches(loader, 5) or loader.epoch > 0 or state["batches_yielded"] == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples_yielded": 10**9}, r"samples_yielded in this state is 1000000000, but an epoch has 12 samples"),
        ({"samples_yielded": 1}, "samples_yielded in this state is 1, in 2 batches; it must be 2 or more"),
        ({"batches_yielded": True}, "batches_yielded in this state is True; it must be an integer of 0 or more"),
        ({"epoch": 1}, "truncated or edited; use another checkpoint"),
        ({"in_epoch": 1}, "in_epoch in this state is 1; it must be true or false"),
        ({"seeds": {"chained": True}}, r"seeds.base_seed in this state is missing; it must be None or an integer"),
    ],
)
def test_the_error_names_key_value_and_allowed_values(change: dict[str, Any], message: str) -> None:
    with pytest.raises(LoaderStateError, match=message):
        made("distributed").load_state_dict({**STATES["distributed"], **change})


@pytest.mark.parametrize("key", ["dataset", "order", "sampler"])
def test_a_damaged_state_may_be_nested_deeply(key: str) -> None:
    """A state deeper than Python's recursion limit is an error in one line, too."""
    nested: Any = {}
    for _ in range(10_000):
        nested = {"a": nested}
    for name in ("stream", "sampler with a state", "torch's sampler"):
        with pytest.raises(LoaderStateError, match="this state") as raised:
            made(name).load_state_dict({**STATES[name], key: nested})
        assert "\n" not in str(raised.value)


def test_changes_of_weights_that_are_out_of_order_are_refused() -> None:
    """Changes out of order would act at other places."""
    made = [Segment(3 * change, {"a": 1.0, "b": 1.0 + change % 7}) for change in range(120)]
    saved = [one.to_json() for one in made]
    assert segments_from_json(saved) == tuple(made)
    for damaged in (saved[::-1], [*saved, saved[-1]], []):
        with pytest.raises(ValueError, match="segments that do not follow one another"):
            segments_from_json(damaged)


def test_place_from_another_loader_must_be_in_the_epoch() -> None:
    for batches, fits in ((3, True), (4, True), (5, False), (10**9, False)):
        loader = StatefulDataLoader(Augmented(SIZE), 3, sampler=distributed())
        assert refused(loader, {"epoch": 0, "batches_yielded": batches}) != fits
    loader = StatefulDataLoader(Squares(SIZE), 3, sampler=list(range(12)))
    loader.load_state_dict({"epoch": 0, "batches_yielded": 5})
    with pytest.raises(LoaderStateError, match="15 items into an epoch of list, which has fewer"):
        iter(loader)  # before that, its length is unknown
    with pytest.raises(LoaderStateError, match="sampler in this state is missing; it must be that of ElasticSampler"):
        made("elastic").load_state_dict({"epoch": 0, "batches_yielded": 3})


@pytest.mark.parametrize("one", [1, np.int64(1), np.uint8(1), np.bool_(True), torch.tensor(1)], ids=repr)
def test_states_hold_every_valid_argument(one: Any) -> None:
    """The program reads every state that it wrote, and the state is JSON."""
    made: list[Any] = [elastic(shuffle=one), distributed(shuffle=one, drop_last=one)]
    if not isinstance(one, np.bool_):
        config = SimpleNamespace(num_workers=one - one)
        made.append(StatefulDataLoader(Squares(SIZE), 2, distributed(), config))
        made.append(StatefulDataLoader(Generated([SIZE]), 2, config=config))
    for thing in made:
        next(iter(thing))
        state = thing.state_dict()
        assert json.loads(json.dumps(state)) == state
        thing.load_state_dict(state)


class Scaled(Squares):
    """A source whose state has a numpy number, which JSON writes like Python's."""

    def state_dict(self) -> dict[str, Any]:
        return {"scale": np.float64(1e-7)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == self.state_dict()


def test_state_with_numpy_numbers_survives_json() -> None:
    def make() -> Any:
        return StatefulDataLoader(Scaled(SIZE), 3, sampler=distributed())

    loader = make()
    take_batches(loader, 2)
    state = loader.state_dict()
    again = loaded(make(), json.loads(json.dumps(state)))
    assert again.state_dict() == state


# --- ranks ---------------------------------------------------------------------------------------


def of_ranks(make: Callable[[int], Any], batches: tuple[int, ...]) -> list[Any]:
    states = []
    for rank, count in enumerate(batches):
        loader = make(rank)
        take_batches(loader, count)
        states.append(loader.state_dict())
    return states


RANKS: dict[str, Callable[[int], Any]] = {
    "distributed": lambda rank: StatefulDataLoader(Squares(SIZE), 2, sampler=distributed(rank)),
    "elastic": lambda rank: StatefulDataLoader(Squares(SIZE), 2, sampler=elastic(rank)),
    "torch's sampler": lambda rank: StatefulDataLoader(Squares(SIZE), 2, sampler=TorchSampler(Squares(SIZE), 2, rank)),
    "shuffled": lambda rank: StatefulDataLoader(Squares(SIZE), 2, shuffle=True),
    "stream": lambda rank: StatefulDataLoader(Generated([24]), 2),
}


@pytest.mark.parametrize("name", RANKS)
@settings(max_examples=10)
@given(first=st.integers(0, 15), second=st.integers(0, 15))
def test_ranks_at_different_steps_are_not_combined(name: str, first: int, second: int) -> None:
    states = of_ranks(RANKS[name], (first, second))
    loader = RANKS[name](0)
    if first == second:
        loader.load_state_dict(loader.aggregate_state_dict(states[:1]))
        loader.aggregate_state_dict(states)
        return
    with pytest.raises(LoaderStateError, match=r"the ranks were saved at different places: .* on rank 0 and .* rank 1"):
        loader.aggregate_state_dict(states)
    forged = {**loader.aggregate_state_dict(states[:1]), "ranks": states}
    with pytest.raises(LoaderStateError, match="the ranks were saved at different places"):
        loader.deaggregate_state_dict(forged, 0, 2)
    saved = {**build_train_state(3, 9), "dataloader": states[0], "dataloader_by_rank": states}
    with pytest.raises(LoaderStateError, match="the ranks were saved at different places"):
        restore_train_state(saved, dataloader=loader)


@pytest.mark.parametrize(
    ("key", "other"),
    [
        ("seed", StatefulDataLoader(Squares(SIZE), 2, sampler=distributed(1, seed=4))),
        ("batch_size", StatefulDataLoader(Squares(SIZE), 3, sampler=distributed(1))),
        ("shuffle", StatefulDataLoader(Squares(SIZE), 2, sampler=distributed(1, shuffle=False))),
        ("style", StatefulDataLoader(Generated([24]), 2)),
        ("sampler", StatefulDataLoader(Squares(SIZE), 2, sampler=elastic(1))),
    ],
)
def test_ranks_with_different_settings_are_not_combined(key: str, other: Any) -> None:
    states = [RANKS["distributed"](0).state_dict(), other.state_dict()]
    with pytest.raises(LoaderStateError, match=rf"{key}.* on rank 0 and .* on rank 1"):
        other.aggregate_state_dict(states)


def test_streams_of_unequal_ranks_may_be_in_different_epochs() -> None:
    def make(rank: int) -> Any:
        return StatefulDataLoader(Generated([[8], [6]][rank]), 2)

    states = of_ranks(make, (8, 8))
    assert len({state["epoch"] for state in states}) == 2
    make(0).aggregate_state_dict(states)


class OwnEpochs(Sampler[int]):
    """A sampler of another package; ranks get parts of different length."""

    def __init__(self, rank: int, of: int = 2) -> None:
        self.part, self.epoch = range(rank, SIZE - 1, of), 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.part)

    def __iter__(self) -> Iterator[int]:
        return iter(self.part)


@pytest.mark.parametrize("batches", range(1, 14))
def test_samplers_of_unequal_ranks_combine_after_any_step(batches: int) -> None:
    def make(rank: int) -> Any:
        return StatefulDataLoader(Squares(SIZE), 2, sampler=OwnEpochs(rank))

    states = of_ranks(make, (batches, batches))
    aggregated = make(0).aggregate_state_dict(states)
    for rank in range(2):
        assert make(0).deaggregate_state_dict(aggregated, rank, 2) == states[rank]
    with pytest.raises(LoaderStateError, match=r"the ranks were saved at different places: .* on rank 0 and .* rank 1"):
        make(0).aggregate_state_dict(of_ranks(make, (batches, batches + 1)))


@pytest.mark.parametrize("kind", [OwnEpochs, lambda rank, of: TorchSampler(Squares(SIZE), of, rank)])
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_sampler_that_cannot_redistribute_is_refused(kind: Any, ranks: int) -> None:
    def make(rank: int, of: int = 2) -> Any:
        return StatefulDataLoader(Squares(SIZE), 2, sampler=kind(rank, of))

    aggregated = make(0).aggregate_state_dict(of_ranks(make, (3, 3)))
    message = rf"saved by 2 ranks, now there are {ranks}, .* resume with 2 ranks, or use ElasticSampler"
    for rank in range(ranks):
        with pytest.raises(LoaderStateError, match=message):
            make(rank, ranks).deaggregate_state_dict(aggregated, rank, ranks)


# --- the same place, the same state --------------------------------------------------------------


def states_at(name: str, stops: list[int], **more: Any) -> Any:
    """Return the state after the last stop, with a resume at each other stop; and the state before `iter()`."""
    loader, at = made(name, **more), 0
    for stop in stops:
        take_batches(loader, stop - at)
        state, at = loader.state_dict(), stop
        loader = loaded(made(name, **more), state)
        assert_same([loader.state_dict()], [state])
    return state


@pytest.mark.parametrize("name", LOADERS)
@given_in_tiers(
    stops=st.lists(st.integers(1, 20), min_size=1, max_size=4), every=st.sampled_from([0, 1, 3]), few=6, many=60
)
def test_a_state_depends_on_the_place_alone(name: str, stops: list[int], every: int) -> None:
    end = max(stops)
    expected = states_at(name, [end], snapshot_every_n_steps=every)
    assert_same([states_at(name, sorted(stops), snapshot_every_n_steps=every)], [expected])


@pytest.mark.slow
@pytest.mark.parametrize("name", LOADERS)
@settings(max_examples=5)
@given(
    stops=st.lists(st.integers(1, 14), min_size=1, max_size=3),
    every=st.sampled_from([0, 1, 2, 3]),
    prefetch=st.sampled_from([1, 2, 5]),
    workers=st.sampled_from([1, 2]),
    persistent=st.booleans(),
)
def test_a_state_depends_on_the_place_alone_with_workers(
    name: str, stops: list[int], every: int, prefetch: int, workers: int, persistent: bool
) -> None:
    more = {"num_workers": workers, "snapshot_every_n_steps": every, "persistent_workers": persistent}
    expected = states_at(name, [max(stops)], prefetch_factor=2, **more)
    assert_same([states_at(name, sorted(stops), prefetch_factor=prefetch, **more)], [expected])


@pytest.mark.parametrize("name", ["distributed", "mixture", "elastic"])
def test_a_state_does_not_depend_on_how_torch_was_seeded(name: str) -> None:
    """torch.distributed.checkpoint takes keys from any rank, and ranks seed torch differently."""
    states = []
    for seed in range(3):
        torch.manual_seed(seed)
        loader = made(name, num_workers=2 * (seed == 2))
        take_batches(loader, 3)
        states.append(loader.state_dict())
    assert_same(states, [states[0]] * 3)


class Asked(Augmented):
    """A source that counts its requests, so that each worker has a state of its own."""

    asked = 0

    def __getitem__(self, index: int) -> Any:
        self.asked += 1
        return super().__getitem__(index)

    def state_dict(self) -> dict[str, int]:
        return {"asked": self.asked}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.asked = state["asked"]


@pytest.mark.parametrize("seeds", [(0, 1, 5), (7, 8, 9)])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_survives_torch_distributed_checkpoint(tmp_path: Path, workers: int, seeds: tuple[int, ...]) -> None:
    def loader(seed: int, workers: int = workers) -> Any:
        torch.manual_seed(seed)
        return StatefulDataLoader(Asked(SIZE), 3, sampler=elastic(samples=SIZE), num_workers=workers)

    whole = list(loader(seeds[0]))
    first = loader(seeds[0])
    found = take_batches(first, 2)
    save({"loader": first}, checkpoint_id=tmp_path, no_dist=True)
    again = loader(seeds[1])
    load({"loader": again}, checkpoint_id=tmp_path, no_dist=True)
    assert_same([*found, *again], whole)


def test_keys_that_a_trainer_adds_with_an_underscore_are_ignored() -> None:
    loader = made("elastic")
    take_batches(loader, 2)
    state = loader.state_dict()
    again = loaded(made("elastic"), {**state, "_iterator_finished": True, "_rng": [1]})
    assert_same(take_batches(again, 3), take_batches(loaded(made("elastic"), state), 3))
    assert again.state_dict() == loaded(made("elastic"), again.state_dict()).state_dict()


def test_many_sources_in_many_segments_make_a_small_state() -> None:
    sizes = {f"source_{number}": 1000 for number in range(200)}
    sampler = ElasticSampler(sizes, dict.fromkeys(sizes, 1.0), global_batch_size=8, num_replicas=1)
    stream = sampler.iter_batches(8, True)
    for change in range(30):
        next(stream)
        sampler.update_weights({**dict.fromkeys(sizes, 1.0), "source_3": 2.0 + change})
    state = sampler.state_dict()
    assert len(json.dumps(state)) < 8_000
    again = ElasticSampler(sizes, dict.fromkeys(sizes, 1.0), global_batch_size=8, num_replicas=1)
    again.load_state_dict(state)
    assert again.state_dict() == state
    assert_same([next(again.iter_batches(8, True))], [next(stream)])

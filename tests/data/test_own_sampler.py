"""`sampler._target_`: any user's sampler is dealt out to the ranks, counted, and resumed exactly."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from composing import compose
from loading import Squares, identity
from orders import Drawing
from torch.utils.data import SequentialSampler

from exactdata import ElasticSampler, StatefulDataLoader
from exactdata.order.ledger import DataLedger
from exactdata.order.weights import SamplerError, SamplerStateError
from exactdata.own_sampler import own_sampler
from runner.config.schema import Config
from runner.errors import UserError
from runner.training.data.consumption import OwnConsumption
from runner.training.data.order import check_epoch, make_own_sampler

SIZES = {"a": 14, "b": 11}
SIZE = sum(SIZES.values())


def sampler_of(target: str, num_replicas: int = 1, rank: int = 0, **options: Any) -> Any:
    """Make a sampler from `sampler._target_` and its options."""
    return make_own_sampler(config_of(target, **options), range(SIZE), SIZES, num_replicas, rank)


@cache
def composed() -> Config:
    return compose(["sampler=own", "sampler._target_=orders.Shuffled"]).config


def config_of(target: str, **options: Any) -> Config:
    """Compose a config with another `sampler._target_`."""
    sampler = replace(composed().sampler, _target_=target)
    sampler.options = options
    return replace(composed(), sampler=sampler)


def loader_of(target: str, workers: int = 0, num_replicas: int = 1, rank: int = 0) -> Any:
    config = types.SimpleNamespace(num_workers=workers)
    sampler = sampler_of(target, num_replicas, rank)
    return StatefulDataLoader(Squares(SIZE), 4, sampler=sampler, config=config, collate_fn=identity)


RANKLESS = ["orders.Shuffled", "orders.Drawing", "orders.Curriculum"]
ALL = [*RANKLESS, "torch.utils.data.DistributedSampler", "orders.Blocks"]


@pytest.mark.parametrize("target", ALL)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_index_is_used_once_on_any_number_of_ranks(target: str, ranks: int) -> None:
    torch.manual_seed(0)
    samplers = []
    for rank in range(ranks):
        torch.manual_seed(rank)  # as in a run, where every rank has a stream of its own
        samplers.append(sampler_of(target, ranks, rank))
    for epoch in range(2):
        parts = []
        for rank, sampler in enumerate(samplers):
            torch.manual_seed(rank), np.random.seed(rank)
            sampler.set_epoch(epoch)
            parts.append(list(sampler))
            assert len(parts[-1]) == len(sampler)
        taken = sorted(index for part in parts for index in part)
        if target not in ("orders.Curriculum", "orders.Blocks"):
            assert len(set(taken)) == len(taken) == SIZE // ranks * ranks
        if target in RANKLESS and ranks > 1:
            alone = sampler_of(target)
            for past in range(epoch + 1):
                alone.set_epoch(past)
                whole = list(alone)
            assert parts == [whole[rank : SIZE // ranks * ranks : ranks] for rank in range(ranks)]


def take(loader: Any, count: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < count:
        found += list(islice(loader, count - len(found)))
    return [sample["y"] for batch in found for sample in batch]


@pytest.mark.parametrize(
    ("target", "workers"),
    [
        *((target, 0) for target in ALL),
        ("orders.Curriculum", 1),
        *(pytest.param(target, 1, marks=pytest.mark.slow) for target in ALL if target != "orders.Curriculum"),
    ],
)
def test_a_resume_anywhere_continues_the_order(target: str, workers: int) -> None:
    def make() -> Any:
        torch.rand(1)  # another state of the generators, as in a restarted program
        return loader_of(target, workers, num_replicas=2, rank=1)

    cuts = [2, 0, 1, 3, 5] if not workers else [2, 3]
    whole = take(make(), 12)
    found: list[Any] = []
    loader = make()
    for cut in cuts:
        found += take(loader, cut)
        state = loader.state_dict()
        loader = make()
        loader.load_state_dict(state)
    assert found + take(loader, 12 - sum(cuts)) == whole


def test_samples_are_counted_and_verified_after_a_resume() -> None:
    def opened() -> OwnConsumption:
        loader = loader_of("orders.Blocks", num_replicas=2)
        ledger = DataLedger(list(SIZES), list(SIZES.values()))
        return OwnConsumption(loader, loader.sampler, ledger, {}, num_replicas=2)

    first, other = opened(), opened()
    other.sampler.rank = 1
    other.sampler.own.rank = 1
    other.rank = 1
    for one, theirs in zip(islice(first.batches(), 2), islice(other.batches(), 2), strict=True):
        first.consume(one[1])
        other.consume(theirs[1])
        where = first.sources(one[1])
        assert where is not None
        assert set(where.tolist()) == {0}  # this rank gets every second one of an alternation
        both = (first.control().view(np.uint64) + other.control().view(np.uint64)).view(np.int64)
        for consumption in (first, other):
            consumption.commit(both)
    assert first.totals(1)["sources"]["a"]["samples"] == 8
    again = opened()
    again.load_state_dict(first.state_dict())
    changed = opened()
    changed.sampler.own.order = changed.sampler.own.order[::-1]
    changed.sampler.make = lambda *_: changed.sampler.own
    with pytest.raises(UserError):
        changed.load_state_dict(first.state_dict())


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("orders.Beyond", "yields 25 at 1 in epoch 0, outside of the data, 0 to 24"),
        ("orders.Floats", "yields 0.5 at 0 in epoch 0, which is no integer"),
        ("orders.Batches", "yields [0, 1] at 0 in epoch 0, which is no integer"),
        ("orders.Endless", "has no __len__"),
        ("orders.Forgetful", "has neither set_epoch(epoch) nor a state: shuffle with the epoch in set_epoch(epoch)"),
        ("torch.utils.data.RandomSampler", "DistributedSampler shuffles as torch's does"),
        ("builtins.object", "check the options under sampler"),
        ("padded.Padding", "has no __iter__"),
        ("orders.Short", "yields 24 indices in epoch 0, but its __len__ is 25"),
        ("orders.Shuffled", "'bogus'"),
    ],
)
def test_a_mistake_in_a_sampler_is_one_line(target: str, words: str) -> None:
    options = {"bogus": 3} if "bogus" in words else {}
    with pytest.raises(UserError) as error:
        list(sampler_of(target, **options))
    assert words in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["sampler=own"], "sampler._target_ is missing"),
        (["sampler=elastic", "sampler._target_=orders.Shuffled"], "is unused by sampler=elastic: choose sampler=own"),
        (["sampler.shufle=false"], "did you mean 'shuffle'?"),
        (["sampler=own", "sampler._target_=orders.Shufled"], "did you mean 'Shuffled'?"),
        (["sampler=own", "sampler._target_=orders.Shuffled", "sampler.exclude=[1]"], "sampler.exclude works with"),
    ],
)
def test_a_mistake_in_the_config_is_one_line(overrides: list[str], words: str) -> None:
    with pytest.raises(UserError) as error:
        compose(overrides)
    assert words in str(error.value)


def test_options_beside_the_target_are_passed() -> None:
    composed = [compose(["sampler=own", "sampler._target_=orders.Shuffled", f"sampler.salt={salt}"]) for salt in (1, 2)]
    found = [list(make_own_sampler(one.config, range(SIZE), SIZES, 1, 0)) for one in composed]
    assert found[0] == np.random.default_rng([1, 0]).permutation(SIZE).tolist()
    assert found[0] != found[1]
    assert composed[0].run_dir != composed[1].run_dir


def test_fewer_samples_than_a_batch_are_one_line() -> None:
    config = config_of("orders.Tiny")
    with pytest.raises(UserError, match=r"train\.batch_size=16 is more than the 3 samples that a rank gets"):
        check_epoch(config, sampler_of("orders.Tiny"))


def test_the_global_generators_do_not_move() -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore[index]
    first, again = (own_sampler(lambda *_: Drawing(range(SIZE)), False, SIZE, 1, 0, 3) for _ in range(2))
    found = []
    for epoch in (0, 1):
        first.set_epoch(epoch)
        found.append(list(first))
    again.set_epoch(1)
    assert list(again) == found[1] != found[0]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]  # type: ignore[index]


class DrawnAtCreation:
    """A sampler that draws its order when it is made, and yields the part of its rank."""

    def __init__(self, num_replicas: int, rank: int) -> None:
        self.indices = torch.randperm(SIZE).tolist()[rank::num_replicas][: SIZE // num_replicas]

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)

    def set_epoch(self, epoch: int) -> None:
        """Ignore the epoch, since all epochs are the same."""


def test_draws_of_a_samplers_constructor_agree_across_ranks() -> None:
    first, other = (own_sampler(DrawnAtCreation, True, SIZE, 2, rank, 3) for rank in (0, 1))
    before = torch.get_rng_state()
    assert first.indices_at(np.arange(6), 0).tolist() == [*np.stack([list(first), list(other)], 1).reshape(-1)[:6]]
    assert torch.equal(torch.get_rng_state(), before)


def test_sampler_with_the_packages_contract_is_used_as_it_is() -> None:
    def make(num_replicas: int, rank: int) -> Any:
        return ElasticSampler(SIZES, [1.0, 1.0], global_batch_size=4, num_replicas=num_replicas, rank=rank)

    assert type(own_sampler(make, True, SIZE, 2, 1, 0)) is ElasticSampler
    with pytest.raises(SamplerError, match="does not take num_replicas and rank: it works on one rank only"):
        own_sampler(make, False, SIZE, 2, 1, 0)
    partly = type("Partly", (SequentialSampler,), {"set_skip": lambda self, skip: None})
    with pytest.raises(SamplerError, match="lacks iter_batches, set_epoch, state_dict, load_state_dict"):
        own_sampler(lambda *_: partly(range(3)), False, SIZE, 1, 0, 0)


def test_a_state_of_another_sampler_is_refused() -> None:
    state = sampler_of("orders.Shuffled").state_dict()
    with pytest.raises(SamplerStateError, match="has sampler 'Shuffled', this sampler has 'Drawing'"):
        sampler_of("orders.Drawing").load_state_dict(state)
    with pytest.raises(SamplerStateError, match="num_replicas 1, this sampler has 2"):
        sampler_of("orders.Shuffled", 2).load_state_dict(state)

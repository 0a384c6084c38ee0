"""A loader's length and its end: by samples, by epochs, on any ranks, with and without a resume."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loading import Gathered, Squares, identity, take_batches
from properties import given_in_tiers
from resume import assert_same
from torch.utils.data import BatchSampler, Sampler, SequentialSampler

from exactdata import DistributedSampler, ElasticSampler, SamplerError, StatefulDataLoader
from exactdata.loading.protocols import DataEndedError

SIZES = {"a": 30, "b": 20, "unused": 10}
TOTAL = sum(SIZES.values())


def sampler(rank: int = 0, of: int = 1, **more: Any) -> ElasticSampler:
    return ElasticSampler(SIZES, [1, 2, 0], num_replicas=of, rank=rank, seed=3, global_batch_size=of, **more)


def loader(rank: int = 0, of: int = 1, batch_size: int = 4, drop_last: bool = False, **more: Any) -> Any:
    return StatefulDataLoader(Gathered(TOTAL), batch_size, sampler=sampler(rank, of, **more), drop_last=drop_last)


@given_in_tiers(samples=st.integers(0, 200), ranks=st.integers(1, 5), batch_size=st.integers(1, 7), few=15, many=150)
def test_every_rank_ends_after_its_part_of_the_samples(samples: int, ranks: int, batch_size: int) -> None:
    endless = sampler()
    order = [index for index, _ in zip(endless, range(samples), strict=False)]
    part = samples // ranks
    for rank in range(ranks):
        mine = sampler(rank, ranks, samples=samples)
        assert len(mine) == part
        assert list(mine) == order[: part * ranks][rank::ranks]
        batches = loader(rank, ranks, batch_size, samples=samples)
        assert len(batches) == len(list(batches)) == -(-part // batch_size)


def test_epochs_count_the_sources_that_are_drawn() -> None:
    assert len(list(sampler(epochs=1))) == 50
    assert len(sampler(epochs=4.35)) == int(4.35 * 50)
    assert len(sampler(epochs=0.58)) == 29  # in binary 0.58 * 50 is a little less
    assert len(sampler(epochs=3, max_epochs=1)) == 50  # whichever ends first


@given_in_tiers(
    cuts=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    ranks=st.lists(st.integers(1, 3), min_size=4),
    few=10,
    many=100,
)
def test_run_resumed_on_other_ranks_ends_at_the_same_sample(cuts: list[int], ranks: list[int]) -> None:
    order = [index for index, _ in zip(sampler(), range(96), strict=False)]
    state, found = None, []
    for cut, of in zip([*cuts, 100], [*ranks, 2], strict=False):
        loaders = [loader(rank, of, 2, samples=96) for rank in range(of)]
        if state is not None:
            for rank, each in enumerate(loaders):
                each.load_state_dict(each.deaggregate_state_dict(state, rank, of))
        batches = [take_batches(each, cut) for each in loaders]
        for step in zip(*batches, strict=True):
            found += [int(row[0]) // 4 for rows in zip(*[batch["x"] for batch in step], strict=True) for row in rows]
        state = loaders[0].aggregate_state_dict([each.state_dict() for each in loaders])
    assert found == order[: len(found)]
    assert 96 - len(found) < 3 or len(cuts) > len(ranks)


def test_length_is_of_the_whole_run_before_and_after_a_resume() -> None:
    """Loops compare the number of batches with the length."""
    first = loader(samples=90)
    stream = iter(first)
    for batches in range(1, 24):
        next(stream, None)
        again = loader(samples=90)
        again.load_state_dict(first.state_dict())
        assert len(again) == len(first) == 23
        assert len(list(again)) == 23 - batches


@pytest.mark.parametrize(("before", "of", "batch_size"), [(2, 1, 8), (2, 1, 4), (1, 2, 4), (1, 4, 4), (3, 2, 5)])
def test_length_on_other_ranks_counts_yielded_batches(before: int, of: int, batch_size: int) -> None:
    """Trainers stop at the length: 45 instead of 50 would leave out the last samples."""
    first = loader(0, before, samples=400)
    take_batches(first, 10)
    again = loader(0, of, batch_size, samples=400)
    assert len(again) == len(list(loader(0, of, batch_size, samples=400)))
    again.load_state_dict(first.state_dict())
    total = len(again)
    stream = iter(again)
    for yielded in range(10, total):
        assert len(again) == total, yielded
        next(stream)
    assert next(stream, None) is None


@pytest.mark.parametrize("drop_last", [False, True])
def test_length_at_another_batch_size_counts_yielded_batches(drop_last: bool) -> None:
    def make(batch_size: int) -> Any:
        return StatefulDataLoader(Gathered(100), batch_size, shuffle=True, drop_last=drop_last)

    first = make(10)
    take_batches(first, 3)
    again = make(7)
    again.load_state_dict(first.state_dict())
    assert len(again) == 3 + 10 == 3 + len(list(again))
    assert len(again) == (14 if drop_last else 15)  # of the next epoch


def test_an_endless_loader_has_no_length_and_names_the_remedy() -> None:
    for one in (loader(), sampler()):
        with pytest.raises(TypeError, match=r"pass samples=N or epochs=N to ElasticSampler, or cap every source"):
            len(one)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"samples": 5, "epochs": 1}, "samples=5 and epochs=1: pass one of the two"),
        ({"samples": -1}, "samples -1: it must be 0 or more"),
        ({"samples": 1.5}, "samples 1.5: it must be an integer"),
        ({"epochs": -1}, "epochs -1: it must be a finite number of 0 or more"),
        ({"epochs": float("nan")}, "epochs nan"),
        ({"epochs": "2"}, "epochs '2'"),
    ],
)
def test_lengths_that_make_no_sense_are_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(SamplerError, match=message):
        sampler(**more)


class CountingLoop:
    """A training loop that knows the length, like Lightning's.

    It never asks for a batch after the last one, counts batches in its state, and saves the loader's state with it.
    """

    def __init__(self, loader: Any, saved: Any = None) -> None:
        self.loader, self.done = loader, 0
        if saved is not None:
            self.done = saved["done"]
            loader.load_state_dict(saved["loader"])

    def __iter__(self) -> Iterator[Any]:
        stream = iter(self.loader)
        length = len(self.loader)
        while self.done < length:
            batch = next(stream)
            self.done += 1
            yield batch

    def state(self) -> Any:
        return {"done": self.done, "loader": self.loader.state_dict()}


@pytest.mark.parametrize("cut", [1, 4, 22])
def test_a_loop_that_counts_batches_resumes_exactly(cut: int) -> None:
    whole = list(CountingLoop(loader(samples=90)))
    loop = CountingLoop(loader(samples=90))
    found = [batch for _, batch in zip(range(cut), loop, strict=False)]
    assert_same([*found, *CountingLoop(loader(samples=90), loop.state())], whole)


CONFIGURED: dict[str, Any] = {
    "distributed": lambda: StatefulDataLoader(
        Gathered(24), 5, sampler=DistributedSampler(range(24), 2, 1), drop_last=True
    ),
    "batch sampler": lambda: StatefulDataLoader(
        Squares(24), batch_sampler=BatchSampler(SequentialSampler(range(24)), 5, False), collate_fn=identity
    ),
    "elastic": lambda: loader(samples=24),
}


@pytest.mark.parametrize("name", CONFIGURED)
def test_next_epoch_begins_without_a_stop_iteration(name: str) -> None:
    plain, counted = CONFIGURED[name](), CONFIGURED[name]()
    for _ in range(1 if name == "elastic" else 2):  # it ends for good
        expected = list(plain)
        stream = iter(counted)
        assert_same([next(stream) for _ in expected], expected)
    assert counted.epoch == plain.epoch - 1
    with pytest.raises(DataEndedError, match="would be empty") if name == "elastic" else nullcontext():
        iter(counted)
    assert counted.epoch == plain.epoch


@settings(max_examples=20)
@given(first=st.integers(1, 11), left=st.integers(0, 2), batch_size=st.integers(1, 5), drop_last=st.booleans())
def test_epoch_after_a_short_one_ends_where_the_samples_do(
    first: int, left: int, batch_size: int, drop_last: bool
) -> None:
    """An `iter()` within an epoch repeats it; one after its last batch does not."""
    one = loader(samples=60, batch_size=batch_size, drop_last=drop_last)
    take_batches(one, first)
    one.end_epoch()
    again = loader(samples=60, batch_size=batch_size, drop_last=drop_last)
    again.load_state_dict(one.state_dict())
    rest = list(again)
    second = max(1, len(rest) - left)
    assert_same([batch for _, batch in zip(range(second), one, strict=False)], rest[:second])
    ended = second == len(rest)
    if not ended:
        assert_same(list(one), rest)
    with pytest.raises(DataEndedError, match="would be empty, since ElasticSampler has yielded all its samples: raise"):
        iter(one)
    assert one.epoch == 2


class Growing(Sampler[list[int]]):
    """A batch sampler with more batches in every epoch, the first of which is empty."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 3 + 2 * self.epoch

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[], *([index] for index in range(len(self) - 1))])


@pytest.mark.parametrize("cut", range(1, 16))
def test_batch_sampler_may_have_empty_batches(cut: int) -> None:
    def make(state: Any = None) -> Any:
        made: Any = StatefulDataLoader(Squares(24), batch_sampler=Growing(), collate_fn=identity)
        if state is not None:
            made.load_state_dict(state)
        return made

    def take(loader: Any, count: int) -> list[Any]:
        found: list[Any] = []
        while len(found) < count:
            loader.batch_sampler.set_epoch(loader.epoch)
            found += [batch for _, batch in zip(range(count - len(found)), loader, strict=False)]
        return found

    whole, first = take(make(), 16), make()
    assert_same(take(first, cut) + take(make(first.state_dict()), 16 - cut), whole)

"""Streams on several ranks and workers: whatever their numbers at a resume, every item comes once per epoch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from loading import Blocks, identity
from properties import given_in_tiers
from shards import played
from torch.utils.data import IterableDataset

from exactdata import LoaderStateError, ShardedStream, StatefulDataLoader, shard

EPOCH = 1000  # more than the items of an epoch


class Units(ShardedStream):
    """Units of the given sizes, numbered from 0 plus `EPOCH` times the epoch, in an epoch-dependent order."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes

    def units(self) -> list[range]:
        starts = [sum(self.sizes[:unit]) for unit in range(len(self.sizes))]
        units = [range(start, start + size) for start, size in zip(starts, self.sizes, strict=True)]
        return units[self.epoch % 2 :] + units[: self.epoch % 2]

    def read(self, unit: range, position: int | None) -> Iterator[tuple[int, int]]:
        return (
            (self.epoch * EPOCH + item, item + 1) for item in unit[0 if position is None else position - unit.start :]
        )


class Parts(IterableDataset[int]):
    """A stream that redistributes its remaining items. Its state does not show whether it has begun or ended."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self.left: list[list[int]] | None = None

    def __iter__(self) -> Iterator[int]:
        if self.left is None:
            number, shards = shard()
            self.left = [[unit, 0] for unit in range(len(self.sizes))][number::shards]
        while self.left:
            unit, at = self.left[0]
            for item in range(at, self.sizes[unit]):
                self.left[0][1] = item + 1
                if item + 1 == self.sizes[unit]:
                    del self.left[0]
                yield sum(self.sizes[:unit]) + item
            if not self.sizes[unit]:
                del self.left[0]
        self.left = None

    def state_dict(self) -> dict[str, Any]:
        return {"left": None if self.left is None else [list(part) for part in self.left]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left = None if state["left"] is None else [list(part) for part in state["left"]]

    def aggregate_state_dict(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {"left": sorted(part for state in states for part in state["left"] or [])}

    def deaggregate_state_dict(self, aggregated: dict[str, Any], number: int, shards: int) -> dict[str, Any]:
        return {"left": aggregated["left"][number::shards]}


class Ranks:
    """The loaders of all ranks of a run, in lockstep."""

    def __init__(self, data: Any, count: int, workers: int, batch_size: int, state: Any = None, **options: Any) -> None:
        self.count = count
        self.loaders: list[Any] = []
        self.iterators: list[Any] = []
        for rank in range(count):
            with played(rank, count):
                loader = StatefulDataLoader(data(), batch_size, num_workers=workers, collate_fn=identity, **options)
                if state is not None:
                    loader.load_state_dict(loader.deaggregate_state_dict(state, rank, count))
                self.loaders.append(loader)

    def begin(self) -> None:
        self.iterators = []
        for rank, loader in enumerate(self.loaders):
            with played(rank, self.count):
                self.iterators.append(iter(loader))

    def take(self, batches: int | None) -> tuple[list[Any], bool]:
        """Return the items of every rank's next batch, and whether the epoch has ended (no items on any rank)."""
        found: list[Any] = []
        while batches is None or batches > 0:
            ended = 0
            for rank, iterator in enumerate(self.iterators):
                with played(rank, self.count):
                    batch = next(iterator, None)
                ended += batch is None
                found += batch or []
            if ended == self.count:
                return found, True
            batches = None if ended or batches is None else batches - 1
        return found, False

    def state(self) -> Any:
        states = []
        for rank, loader in enumerate(self.loaders):
            with played(rank, self.count):
                states.append(loader.state_dict())
        return json.loads(json.dumps(self.loaders[0].aggregate_state_dict(states)))


STREAMS: dict[str, Callable[[list[int]], Any]] = {
    "units": Units,
    "parts": Parts,
    "blocks": lambda sizes: Blocks(sum(sizes)),
}


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, Any]:
    workers = draw(st.integers(0, 4))
    return {
        "count": draw(st.integers(1, 3)),
        "workers": workers,
        "batch_size": draw(st.integers(1, 4)),
        "persistent_workers": bool(workers) and draw(st.booleans()),
        "snapshot_every_n_steps": draw(st.integers(1, 3)),
    }


CUTS = st.one_of(st.none(), st.integers(0, 6))  # before the first iter(); after so many batches of each rank


class Account:
    """The items read in the current epoch.

    Args:
        items: number of items in an epoch.
        counts: whether the items show their epoch.
    """

    def __init__(self, items: int, counts: bool) -> None:
        self.everything, self.found, self.epoch, self.counts = list(range(items)), list[int](), 0, counts

    def read(self, ranks: Ranks, batches: int | None) -> None:
        """Read that many batches of every rank."""
        ranks.begin()
        more, ended = ranks.take(batches)
        self.found += more
        epochs = {item // EPOCH for item in self.found}
        assert epochs <= {self.epoch} if self.counts else len(epochs) <= 1
        if ended:
            assert sorted(item % EPOCH for item in self.found) == self.everything
            self.found, self.epoch = [], self.epoch + 1


REFUSED = "the ranks were saved at different places|the states of the ranks are of the epochs"  # not in lockstep


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("stream", STREAMS)
@given_in_tiers(
    sizes=st.lists(st.integers(0, 6), max_size=8),
    epochs=st.integers(0, 2),
    resumes=st.lists(st.tuples(shapes(), CUTS), min_size=1, max_size=4),
    last=shapes(),
    few=8,
    many=100,
)
def test_every_item_comes_once_per_epoch(
    stream: str, sizes: list[int], epochs: int, resumes: list[tuple[dict[str, Any], int | None]], last: dict[str, Any]
) -> None:
    account, state = Account(sum(sizes), stream == "units"), None
    try:
        for shape, cut in resumes:
            ranks = Ranks(lambda: STREAMS[stream](sizes), state=state, **shape)
            for _ in range(epochs if state is None else 0):
                account.read(ranks, None)
            if cut is not None:
                account.read(ranks, cut)
            if len({(loader.epoch, loader.batches_yielded) for loader in ranks.loaders}) > 1:
                return
            state = ranks.state()
        ranks = Ranks(lambda: STREAMS[stream](sizes), state=state, **last)
        for _ in range(2):
            account.read(ranks, None)
    except LoaderStateError as error:
        if not re.match(REFUSED, str(error)):
            raise


@pytest.mark.parametrize("workers", [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("persistent", [(False, False), (True, False), (False, True)])
def test_ranks_in_different_epochs_resume_in_their_own(workers: tuple[int, int], persistent: tuple[bool, bool]) -> None:
    """Workers that do not outlive an epoch start with a copy of a dataset that has read no epoch."""
    found: list[int] = []
    state = None
    for count, stays, batches in zip(workers, persistent, (3, None), strict=True):
        options = {"persistent_workers": bool(count) and stays}
        ranks = Ranks(lambda: Units([4, 4, 4]), 2, count, 2, state=state, **options)
        for rank, loader in enumerate(ranks.loaders):
            left = batches
            while loader.epoch < 2 and left != 0:
                with played(rank, 2):
                    iterator = iter(loader)
                while left != 0 and (batch := next(iterator, None)) is not None:
                    found += batch
                    left = None if left is None else left - 1
        if batches is not None:
            assert [loader.epoch for loader in ranks.loaders] == [0, 1]
            state = ranks.state()
    assert sorted(found) == [epoch * EPOCH + item for epoch in range(2) for item in range(12)]


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize(("count", "workers"), [(1, 0), (3, 0), (1, 2)])
def test_rank_at_its_end_gives_nothing_to_other_ranks(stream: str, count: int, workers: int) -> None:
    """After two batches, one of two ranks has found the end of its epoch."""
    ranks = Ranks(lambda: STREAMS[stream]([4, 4, 5]), 2, 0, 3)
    ranks.begin()
    found: list[int] = []
    for rank, iterator in enumerate(ranks.iterators):
        with played(rank, 2):
            found += next(iterator) + next(iterator)
    with played(1, 2):
        assert next(ranks.iterators[1], None) is None
    again = Ranks(lambda: STREAMS[stream]([4, 4, 5]), count, workers, 3, state=ranks.state())
    again.begin()
    rest, ended = again.take(None)
    assert ended
    assert sorted(item % EPOCH for item in found + rest) == list(range(13))


@pytest.mark.parametrize("count", [1, 3])
def test_rank_before_its_epoch_gives_its_shards_to_others(count: int) -> None:
    """The other rank has found the end of its epoch, so it has no items."""
    ranks = Ranks(lambda: Units([0, 0, 3, 4]), 2, 2, 3)
    with played(0, 2):
        assert list(ranks.loaders[0]) == []
    again = Ranks(lambda: Units([0, 0, 3, 4]), count, 0, 3, state=ranks.state())
    again.begin()
    assert sorted(again.take(None)[0]) == list(range(7))


class Keeping(IterableDataset[int]):
    """A stream that takes its items out of the state that was loaded into it."""

    def __init__(self) -> None:
        self.left = list(range(6))

    def __iter__(self) -> Iterator[int]:
        while self.left:
            yield self.left.pop(0)
        self.left = list(range(6))

    def state_dict(self) -> dict[str, Any]:
        return {"left": list(self.left)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left = state["left"]


@pytest.mark.parametrize("cut", [1, None])
def test_state_can_be_loaded_again_after_the_stream_used_it(cut: int | None) -> None:
    ranks = Ranks(Keeping, 1, 0, 2)
    ranks.begin()
    ranks.take(cut)
    state = ranks.loaders[0].state_dict()
    read = []
    for _ in range(2):
        again = Ranks(Keeping, 1, 0, 2)
        again.loaders[0].load_state_dict(state)
        again.begin()
        read.append(again.take(None)[0])
    assert read == [list(range(0 if cut is None else 2, 6))] * 2


class Counting(IterableDataset[int]):
    """A stream with a state that it cannot redistribute."""

    def __init__(self, size: int) -> None:
        self.size, self.at = size, 0

    def __iter__(self) -> Iterator[int]:
        number, shards = shard()
        for item in range(self.size)[number::shards][self.at :]:
            self.at += 1
            yield item
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("cut", [1, None], ids=["in an epoch", "between two"])
@pytest.mark.parametrize(("count", "workers"), [(1, 2), (2, 1), (3, 0)])
def test_a_stream_that_cannot_be_dealt_out_is_refused(count: int, workers: int, cut: int | None) -> None:
    ranks = Ranks(lambda: Counting(12), 1, 0, 2)
    ranks.begin()
    ranks.take(cut)
    again = Ranks(lambda: Counting(12), count, workers, 2, state=ranks.state())
    now = f"is of 1 shards of Counting, now there are {count * max(workers, 1)} "
    with pytest.raises(LoaderStateError, match=now):
        again.begin()


def test_a_state_before_the_first_iteration_begins_anywhere() -> None:
    state = Ranks(lambda: Counting(12), 2, 0, 2).state()
    ranks = Ranks(lambda: Counting(12), 1, 2, 2, state=state)
    ranks.begin()
    assert sorted(ranks.take(None)[0]) == list(range(12))


def test_the_state_of_one_rank_is_not_taken_for_that_of_all() -> None:
    ranks = Ranks(lambda: Units([3, 3, 3, 3]), 2, 0, 2)
    ranks.begin()
    ranks.take(1)
    alone = Ranks(lambda: Units([3, 3, 3, 3]), 1, 0, 2)
    alone.loaders[0].load_state_dict(ranks.loaders[1].state_dict())
    with pytest.raises(LoaderStateError, match="load what aggregate_state_dict"):
        alone.begin()


def test_units_that_changed_are_refused() -> None:
    ranks = Ranks(lambda: Units([3, 3]), 1, 0, 2)
    ranks.begin()
    ranks.take(1)
    again = Ranks(lambda: Units([3, 3, 3]), 1, 0, 2, state=ranks.state())
    again.begin()
    with pytest.raises(LoaderStateError, match="of 2 units of Units, now there are 3"):
        again.take(1)


class Lines(ShardedStream):
    """The lines of files, in the order of the list."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = files

    def units(self) -> Sequence[Path]:
        return self.files

    def read(self, unit: Path, position: int | None) -> Iterator[tuple[str, int]]:
        lines = unit.read_text().split()
        return ((line, at + 1) for at, line in enumerate(lines) if at >= (position or 0))


def files_in(folder: Path, count: int = 6) -> list[Path]:
    folder.mkdir()
    for number in range(count):
        (folder / f"{number}.txt").write_text("".join(f"{number}-{line}\n" for line in range(5)))
    return sorted(folder.iterdir())


def replaced(files: list[Path]) -> list[Path]:
    other = files[3].with_name("other.txt")
    other.write_text(files[3].read_text())
    return [*files[:3], other, *files[4:]]


def shrunk(files: list[Path]) -> list[Path]:
    files[4].write_text(files[4].read_text()[:8])
    return files


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("change", [replaced, shrunk, lambda files: files[::-1]], ids=["replaced", "shrunk", "order"])
def test_units_that_changed_are_refused_at_a_resume(tmp_path: Path, change: Any, ranks: int) -> None:
    files = files_in(tmp_path / "data")
    first = Ranks(lambda: Lines(files), 1, 0, 2)
    first.begin()
    first.take(4)
    again = Ranks(lambda: Lines(change(files)), ranks, 0, 2, first.state())
    again.begin()
    with pytest.raises(LoaderStateError, match="was replaced, grew or shrank, or their order is another one"):
        again.take(1)


def test_units_that_were_moved_resume_where_they_were(tmp_path: Path) -> None:
    files = files_in(tmp_path / "data")
    first = Ranks(lambda: Lines(files), 1, 0, 2)
    first.begin()
    found, _ = first.take(4)
    state = first.state()
    (tmp_path / "data").rename(tmp_path / "scratch")
    again = Ranks(lambda: Lines(sorted((tmp_path / "scratch").iterdir())), 1, 0, 2, state)
    again.begin()
    rest, _ = again.take(None)
    assert [*found, *rest] == [f"{number}-{line}" for number in range(6) for line in range(5)]


def test_ranks_that_list_units_differently_are_not_saved(tmp_path: Path) -> None:
    files = files_in(tmp_path / "data")
    orders = iter([files, files[::-1]])
    ranks = Ranks(lambda: Lines(next(orders)), 2, 0, 2)
    ranks.begin()
    ranks.take(1)
    with pytest.raises(LoaderStateError, match=r"have different units of Lines in epoch 0: .*sort what glob returns"):
        ranks.state()

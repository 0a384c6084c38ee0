"""What goes wrong: datasets that raise, workers that die or hang, signals, states that do not fit."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from loading import Augmented, Blocks, Gathered, Generated, Squares, Stateless, over_epochs, same
from resume import assert_same
from torch.utils.data import Dataset, IterableDataset, IterDataPipe, get_worker_info

from runner.data import (
    DistributedSampler,
    ElasticSampler,
    MixtureDataset,
    RestartableDataLoader,
    StatefulDataLoader,
    sample_rng,
    shard,
)
from runner.data.randomness import NoSampleError
from runner.data.restartable import LoaderError, LoaderStateError
from runner.data.workers import WorkerStart
from runner.errors import UserError
from runner.lease import process_state

HERE = Path(__file__).parent


class Broken(Squares):
    """Raises at one index, as long as the flag file is missing."""

    def __init__(self, size: int, at: int, error: Exception) -> None:
        super().__init__(size)
        self.at, self.error, self.repaired = at, error, False

    def __getitem__(self, index: int) -> Any:
        if index == self.at and not self.repaired:
            raise self.error
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("error", [ValueError("rotten"), KeyError("rotten"), OSError(5, "rotten")])
def test_error_of_a_dataset_names_sample_source_and_process(workers: int, error: Exception) -> None:
    data = MixtureDataset([Squares(10), Broken(10, 4, error)], ["good", "bad"])
    loader = StatefulDataLoader(data, batch_size=4, num_workers=workers, collate_fn=same)
    iterator = iter(loader)
    expected = [next(iterator) for _ in range(3)]
    with pytest.raises(type(error), match="rotten") as caught:
        next(iterator)
    text = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert "4 of source 'bad' (index 14)" in text
    assert ("in worker 1 (pid" if workers else "in the main process") in text
    assert len(expected) == 3
    assert loader.batches_yielded == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_state_after_an_error_resumes_with_the_batch_that_failed(workers: int) -> None:
    data = Broken(20, 9, ValueError("rotten"))
    loader = StatefulDataLoader(data, batch_size=4, num_workers=workers)
    iterator = iter(loader)
    found = [next(iterator), next(iterator)]
    with pytest.raises(ValueError, match="rotten"):
        next(iterator)
    state = loader.state_dict()
    data.repaired = True
    again = StatefulDataLoader(data, batch_size=4, num_workers=workers)
    again.load_state_dict(state)
    assert_same(found + list(again), list(StatefulDataLoader(Squares(20), batch_size=4)))


@pytest.mark.parametrize("workers", [0, 2])
def test_who_goes_on_after_an_error_leaves_the_batch_out(workers: int) -> None:
    loader = StatefulDataLoader(Broken(20, 9, ValueError("rotten")), batch_size=4, num_workers=workers)
    iterator = iter(loader)
    found = [next(iterator), next(iterator)]
    with pytest.raises(ValueError, match="rotten"):
        next(iterator)
    found.append(next(iterator))
    state = loader.state_dict()
    again = StatefulDataLoader(Squares(20), batch_size=4)
    again.load_state_dict(state)
    whole = list(StatefulDataLoader(Squares(20), batch_size=4))
    assert_same(found + list(again), whole[:2] + whole[3:])


@pytest.mark.parametrize("workers", [0, 1])
def test_error_of_a_stream_says_where(workers: int) -> None:
    class Cracked(IterableDataset[int]):
        def __iter__(self) -> Any:
            yield from range(5)
            raise ValueError("rotten")

    loader = StatefulDataLoader(Cracked(), batch_size=3, num_workers=workers)
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match=r"rotten \[while loading sample 2 of the next batch of Cracked"):
        next(iterator)


class Deadly(Squares):
    def __init__(self, size: int, at: int, how: str) -> None:
        super().__init__(size)
        self.at, self.how = at, how

    def __getitem__(self, index: int) -> Any:
        if index == self.at and get_worker_info() is not None:
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600)
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("how", "timeout", "message"),
    [("kill", 0, "is killed by signal|exited unexpectedly"), ("hang", 5, "timed out after 5")],
)
def test_a_dead_or_late_worker_is_named_and_the_state_is_good(how: str, timeout: int, message: str) -> None:
    loader = StatefulDataLoader(Deadly(40, 14, how), batch_size=4, num_workers=2, timeout=timeout)
    iterator = iter(loader)
    found: list[Any] = []
    with pytest.raises(RuntimeError, match=message) as caught:
        found.extend(iterator)  # how far it comes is a matter of chance: a killed worker's last batches may be lost
    # Of several batches that it was given, nobody knows at which a killed worker was.
    assert re.search(r"worker 1 was loading .*batch 3 of epoch 0: samples 12 of Deadly", str(caught.value))
    state = loader.state_dict()
    assert state["batches_yielded"] == len(found)
    assert list(iterator) == []
    loader = StatefulDataLoader(Squares(40), batch_size=4)
    loader.load_state_dict(state)
    assert_same(found + list(loader), list(StatefulDataLoader(Squares(40), batch_size=4)))


class Slow(Squares):
    def __getitem__(self, index: int) -> Any:
        time.sleep(0.02)
        return super().__getitem__(index)


def children() -> set[psutil.Process]:
    """The live children of this process; other tests may have left some that are not yet collected."""
    found = psutil.Process().children()
    return {child for child in found if child.is_running() and child.status() != psutil.STATUS_ZOMBIE}


def ended(workers: set[psutil.Process], seconds: float = 120) -> bool:
    """Whether they are gone, which is at once unless the machine is busy."""
    end = time.monotonic() + seconds
    while workers & children() and time.monotonic() < end:
        time.sleep(0.05)
    return not workers & children()


def test_workers_ignore_the_signals_of_a_scheduler() -> None:
    before = children()
    loader = StatefulDataLoader(Slow(60), batch_size=4, num_workers=2)
    iterator = iter(loader)
    found = [next(iterator), next(iterator)]  # one of each worker, which has its handlers by then
    workers = children() - before
    assert len(workers) == 2
    for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"):
        for worker in workers:
            worker.send_signal(getattr(signal, name))
    found += list(iterator)
    assert_same(found, list(StatefulDataLoader(Squares(60), batch_size=4)))


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_end_with_their_iterator(persistent: bool) -> None:
    before = children()
    loader = StatefulDataLoader(Squares(60), batch_size=4, num_workers=2, persistent_workers=persistent)
    next(iter(loader))
    workers = children() - before
    assert len(workers) == 2
    del loader
    assert ended(workers)


def test_workers_end_where_the_garbage_collector_takes_their_iterator() -> None:
    before = children()
    loader = StatefulDataLoader(Squares(60), batch_size=4, num_workers=2)
    iterator = iter(loader)
    next(iterator)
    workers = children() - before
    assert len(workers) == 2
    cycle: list[Any] = [iterator, loader]
    cycle.append(cycle)
    del loader, iterator, cycle
    gc.collect()
    assert ended(workers)


PARENT = """
    import sys, time
    sys.path.insert(0, {here!r})
    from loading import Squares
    from runner.data import StatefulDataLoader

    class Stuck(Squares):
        def __getitem__(self, index):
            if index > 20:
                time.sleep(600)
            return super().__getitem__(index)

    loader = StatefulDataLoader(Stuck(1000), batch_size=4, num_workers=2, timeout={timeout})
    iterator = iter(loader)
    next(iterator)
    import psutil
    print(*[child.pid for child in psutil.Process().children()], flush=True)
    {then}
"""


def children_of(then: str, timeout: int = 0) -> tuple[subprocess.Popen[str], list[int]]:
    script = textwrap.dedent(PARENT).format(here=str(HERE), then=then, timeout=timeout)
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    return parent, pids


def wait_until_gone(pids: list[int], seconds: float = 120) -> list[int]:
    """Those that still live; one whose parent is gone may stay a zombie."""
    end = time.monotonic() + seconds
    while (left := [pid for pid in pids if (process_state(pid) or "Z")[0] not in "ZXx"]) and time.monotonic() < end:
        time.sleep(0.05)
    return left


@pytest.mark.slow
def test_workers_die_with_a_killed_parent_even_in_the_middle_of_a_sample() -> None:
    parent, pids = children_of("time.sleep(600)")
    parent.kill()
    parent.wait()
    assert wait_until_gone(pids) == []


@pytest.mark.slow
def test_a_worker_that_hangs_does_not_keep_its_parent_from_leaving() -> None:
    parent, pids = children_of("sys.exit(3)")
    assert parent.wait(timeout=400) == 3
    assert wait_until_gone(pids) == []


STATES: list[tuple[Any, str]] = [
    ({}, "'epoch', 'batches_yielded' missing; it was written by an unknown loader"),
    ({"_snapshot": {}, "_steps_since_snapshot": 0}, "torchdata's StatefulDataLoader"),
    ([], "cannot load a list"),
    ({"epoch": -1, "batches_yielded": 0}, "epoch in this state is -1"),
    ({"epoch": 0, "batches_yielded": "x"}, "batches_yielded in this state is 'x'"),
    ({"epoch": 0, "batches_yielded": 0, "version": 99}, "version 99"),
    ({"epoch": 0, "batches_yielded": 0, "style": "iterable"}, "iterable-style"),
    ({"epoch": 0, "batches_yielded": 3, "dataset_size": 24}, "dataset of 24 samples, this one has 20"),
]


@pytest.mark.parametrize(("state", "message"), STATES)
def test_a_state_that_does_not_fit_is_refused_in_one_line(state: Any, message: str) -> None:
    loader = StatefulDataLoader(Squares(20), batch_size=4)
    with pytest.raises(LoaderStateError, match=re.escape(message)) as caught:
        loader.load_state_dict(state)
    assert isinstance(caught.value, UserError)
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)
    assert len(list(loader)) == 5


def test_a_state_of_the_reference_loader_is_taken() -> None:
    sampler = DistributedSampler(Squares(20), num_replicas=1, rank=0)
    whole = list(StatefulDataLoader(Squares(20), batch_size=4, sampler=sampler))
    loader = StatefulDataLoader(
        Squares(20), batch_size=4, sampler=DistributedSampler(Squares(20), num_replicas=1, rank=0)
    )
    reference = {"epoch": 0, "seed": 0, "num_replicas": 1, "rank": 0}
    loader.load_state_dict({"epoch": 0, "batches_yielded": 2, "sampler": {**sampler.state_dict(), **reference}})
    assert_same(list(loader), whole[2:])


def test_streams_on_another_number_of_workers_are_refused_or_dealt_anew() -> None:
    loader = StatefulDataLoader(Generated([20]), batch_size=4)
    next(iter(loader))
    state = loader.state_dict()
    again = StatefulDataLoader(Generated([10, 10]), batch_size=4, num_workers=2)
    again.load_state_dict(state)
    with pytest.raises(LoaderStateError, match=r"1 shards of Generated \(num_workers=0\) and now there are 2"):
        iter(again)
    stateless = StatefulDataLoader(Stateless([20]), batch_size=4)
    next(iter(stateless))
    other = StatefulDataLoader(Stateless([10, 10]), batch_size=4, num_workers=2)
    other.load_state_dict(stateless.state_dict())
    with pytest.raises(LoaderStateError, match="now there are 2 a rank"):
        iter(other)


@pytest.mark.parametrize("plan", [(0, 2), (2, 1), (2, 0)])
def test_a_stream_that_says_how_goes_on_with_another_number_of_workers(plan: tuple[int, int]) -> None:
    before, after = plan
    loader = StatefulDataLoader(Blocks(50), batch_size=3, num_workers=before)
    found = [item for _, batch in zip(range(5), loader, strict=False) for item in batch.tolist()]
    again = StatefulDataLoader(Blocks(50), batch_size=3, num_workers=after)
    again.load_state_dict(loader.state_dict())
    iterator = iter(again)
    found += next(iterator).tolist()
    state = again.state_dict()
    third = StatefulDataLoader(Blocks(50), batch_size=3, num_workers=after)
    third.load_state_dict(state)
    found += [item for batch in third for item in batch.tolist()]
    assert sorted(found) == list(range(50))


def aggregated(states: list[Any]) -> Any:
    return StatefulDataLoader(Squares(4)).aggregate_state_dict(states)


def test_ranks_are_aggregated_and_taken_apart_again() -> None:
    def make(rank: int, of: int) -> Any:
        return StatefulDataLoader(
            Augmented(24), batch_size=2, sampler=DistributedSampler(Squares(24), num_replicas=of, rank=rank)
        )

    loaders = [make(rank, 2) for rank in range(2)]
    whole = [over_epochs(make(rank, 2), 8) for rank in range(2)]
    taken = [over_epochs(loader, 3) for loader in loaders]
    state = aggregated([loader.state_dict() for loader in loaders])
    for rank in range(2):
        again = make(rank, 2)
        again.load_state_dict(again.deaggregate_state_dict(state, rank, 2))
        assert_same(taken[rank] + over_epochs(again, 5), whole[rank])
    alone = make(0, 1)
    with pytest.raises(UserError, match="2"):  # the seeded sampler cannot share out anew, and says so
        alone.load_state_dict(state)


def test_the_elastic_sampler_goes_on_with_another_number_of_ranks_and_another_batch_size() -> None:
    def make(rank: int, of: int, batch_size: int) -> Any:
        sampler = ElasticSampler(
            {"a": 24}, {"a": 1.0}, num_replicas=of, rank=rank, seed=0, global_batch_size=4, max_epochs={"a": 1}
        )
        return StatefulDataLoader(Squares(24), batch_size=batch_size, sampler=sampler, collate_fn=same)

    def indices(batches: list[Any]) -> list[int]:
        return [int(sample["x"][0]) for batch in batches for sample in batch]

    loaders = [make(rank, 2, 2) for rank in range(2)]
    found = [index for loader in loaders for index in indices(over_epochs(loader, 2))]
    state = aggregated([loader.state_dict() for loader in loaders])
    for rank in range(4):
        again = make(rank, 4, 1)
        again.load_state_dict(again.deaggregate_state_dict(state, rank, 4))
        found += indices(list(again))
    assert sorted(found) == list(range(24))


def test_streams_of_all_ranks_are_dealt_anew() -> None:
    loader = StatefulDataLoader(Blocks(12), batch_size=2)
    list(zip(range(2), loader, strict=False))
    state = aggregated([loader.state_dict()])
    parts = [loader.deaggregate_state_dict(state, rank, 2) for rank in range(2)]
    assert all(part["reshared"] for part in parts)
    with pytest.raises(LoaderStateError, match="rank=2 is outside"):
        loader.deaggregate_state_dict(state, 2, 2)
    with pytest.raises(LoaderStateError, match="'ranks' missing"):
        loader.deaggregate_state_dict(loader.state_dict(), 0, 1)
    with pytest.raises(LoaderStateError, match="no state"):
        loader.aggregate_state_dict([])


def test_the_loader_is_a_restartable_one() -> None:
    assert isinstance(StatefulDataLoader(Squares(3)), RestartableDataLoader)
    assert not isinstance([1], RestartableDataLoader)


def test_sample_rng_outside_a_sample_is_an_error() -> None:
    with pytest.raises(NoSampleError, match="while no sample is being fetched"):
        sample_rng()


def test_main_process_is_one_shard() -> None:
    assert shard() == (0, 1)


def test_two_loaders_at_once_do_not_disturb_each_other() -> None:
    torch.manual_seed(0)
    one = StatefulDataLoader(Squares(20), batch_size=4, num_workers=1, shuffle=True)
    other = StatefulDataLoader(Gathered(20), batch_size=4, num_workers=2)
    alone = [list(one), list(other)]
    torch.manual_seed(0)
    one = StatefulDataLoader(Squares(20), batch_size=4, num_workers=1, shuffle=True)
    pairs = list(zip(one, other, strict=True))
    assert_same([pair[0] for pair in pairs], alone[0])
    assert_same([pair[1] for pair in pairs], alone[1])


@pytest.mark.parametrize("workers", [0, 2])
def test_ending_an_epoch_early_begins_the_next_one(workers: int) -> None:
    def make() -> Any:
        return StatefulDataLoader(Gathered(20), batch_size=4, num_workers=workers, sampler=distributed())

    def distributed() -> Any:
        return DistributedSampler(Squares(20), num_replicas=1, rank=0)

    epochs = make()
    _, second = list(epochs), list(epochs)
    loader = make()
    next(iter(loader))
    state = loader.state_dict()
    loader.end_epoch()
    assert (loader.epoch, loader.batches_yielded) == (1, 0)
    assert_same(list(make_loaded(make(), loader.state_dict())), second)
    assert_same(list(loader), second)
    resumed = make_loaded(make(), state)
    assert resumed.batches_yielded == 1
    resumed.end_epoch()
    assert_same(list(resumed), second)


def make_loaded(loader: Any, state: Any) -> Any:
    loader.load_state_dict(state)
    return loader


def test_the_loop_learns_what_it_was_given() -> None:
    sampler = DistributedSampler(Squares(20), num_replicas=2, rank=1, shuffle=False)
    loader = StatefulDataLoader(Squares(20), batch_size=4, sampler=sampler, num_workers=2)
    iterator = iter(loader)
    assert (loader.last_indices, loader.last_positions) == (None, None)
    next(iterator)
    next(iterator)
    found: Any = loader
    assert found.last_indices.tolist() == [9, 11, 13, 15]
    assert found.last_positions.tolist() == [9, 11, 13, 15]


class Empty(Dataset[int]):
    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: int) -> int:
        raise IndexError(index)


def test_an_empty_dataset_gives_empty_epochs() -> None:
    loader = StatefulDataLoader(Empty(), batch_size=4)
    assert list(loader) == []
    assert list(loader) == []
    assert loader.epoch == 2


def test_a_data_pipe_with_several_workers_is_refused() -> None:
    class Pipe(IterDataPipe[int]):
        def __iter__(self) -> Any:
            return iter(range(5))

    assert [batch.tolist() for batch in StatefulDataLoader(Pipe(), batch_size=3)] == [[0, 1, 2], [3, 4]]
    with pytest.raises(LoaderError, match="num_workers=2 for the data pipe Pipe"):
        StatefulDataLoader(Pipe(), num_workers=2)


class OneHandle(Gathered):
    """Reads its samples by one place in a file, as a handle has: it does not bear two threads."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.at = 0

    def __getitems__(self, indices: Any) -> Any:
        rows = []
        for index in np.asarray(indices):
            self.at = int(index)
            time.sleep(0.0002)
            rows.append(self.data[self.at])
        return {"x": np.stack(rows)}


def test_two_prefetching_threads_are_never_in_one_dataset() -> None:
    dataset = OneHandle(200)
    loader = StatefulDataLoader(dataset, batch_size=10, num_workers=2)
    older = iter(loader)
    for round_ in range(4):
        batches = iter(loader)
        for number in range(3):
            for iterator, first in ((batches, number), (older, round_ * 3 + number)):
                expected = torch.from_numpy(dataset.data[first * 10 : first * 10 + 10])
                assert torch.equal(next(iterator)["x"], expected)
        loader.end_epoch()
        assert torch.equal(next(iter(loader))["x"], torch.from_numpy(dataset.data[:10]))


AT_EXIT = """
import numpy as np, torch
from torch.utils.data import Dataset
from runner.data import StatefulDataLoader

class Slow(Dataset):
    collated, prefetch = True, "thread"

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        raise NotImplementedError

    def __getitems__(self, indices):
        for _ in range(200):
            torch.rand(200, 200) @ torch.rand(200, 200)
        return {"x": np.asarray(indices)}

iterator = iter(StatefulDataLoader(Slow(), batch_size=2, num_workers=2))
next(iterator)
"""


@pytest.mark.slow
def test_a_process_ends_in_order_while_a_batch_is_fetched_ahead() -> None:
    """An interpreter that goes while a thread is inside torch aborts, and the status of the run is lost."""
    for _ in range(3):
        command = [sys.executable, "-c", AT_EXIT]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=HERE.parent, check=False)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("prefetch", ["thread", None])
def test_a_thread_fetches_only_where_the_dataset_says_that_it_may(prefetch: str | None) -> None:
    """One that draws from the global generators would draw between the training's own draws, at any moment."""
    dataset = Gathered()
    dataset.prefetch = prefetch  # type: ignore[assignment]
    before = children()
    iterator = iter(StatefulDataLoader(dataset, batch_size=4, num_workers=1))
    next(iterator)
    assert bool(children() - before) == (prefetch is None)
    mixed = MixtureDataset([Gathered(), dataset], ["a", "b"])
    assert mixed.prefetch == prefetch


def test_a_worker_whose_parent_was_killed_at_once_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would watch for the end of the process that took its parent's place, which never comes."""

    def leave(status: int) -> None:
        raise SystemExit(status)

    side = types.SimpleNamespace(worker=-1, ranks=(0, 1), closing=threading.Event(), parent=12345, fetcher=None)
    side.fetcher = types.SimpleNamespace(dataset=None)
    info = types.SimpleNamespace(dataset=side)
    monkeypatch.setattr("runner.data.workers.get_worker_info", lambda: info)
    monkeypatch.setattr("runner.data.workers.ignore_signals", lambda closing: None)
    monkeypatch.setattr("runner.data.workers.os.getppid", lambda: 1)
    monkeypatch.setattr("runner.data.workers.os._exit", leave)
    with pytest.raises(SystemExit):
        WorkerStart(None)(0)

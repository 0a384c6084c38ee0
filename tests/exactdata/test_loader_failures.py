"""Failures: datasets that raise, workers that die or hang, signals, states that do not fit."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from loading import (
    Augmented,
    Blocks,
    Cursor,
    CursorSampler,
    Gathered,
    Generated,
    Squares,
    Stateless,
    identity,
    take_batches,
)
from resume import assert_same
from torch.utils.data import Dataset, IterableDataset, IterDataPipe, RandomSampler, get_worker_info

from exactdata import (
    DistributedSampler,
    MixtureDataset,
    RestartableDataLoader,
    StatefulDataLoader,
    sample_rng,
    shard,
)
from exactdata.errors import UserError
from exactdata.loading import worker_exit
from exactdata.loading.protocols import LoaderError, LoaderStateError
from exactdata.loading.randomness import NoSampleError
from exactdata.loading.worker_exit import Shutdown, end_all
from exactdata.loading.workers import WorkerInit

ROOT = Path(__file__).parents[2]


class Broken(Squares):
    """A dataset that raises at one index until it is repaired."""

    def __init__(self, size: int, at: int, error: Exception) -> None:
        super().__init__(size)
        self.at, self.error, self.repaired = at, error, False

    def __getitem__(self, index: int) -> Any:
        if index == self.at and not self.repaired:
            raise self.error
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("error", [ValueError("rotten"), KeyError("rotten"), OSError(5, "rotten")])
def test_dataset_error_names_sample_source_and_process(workers: int, error: Exception) -> None:
    data = MixtureDataset([Squares(10), Broken(10, 4, error)], ["good", "bad"])
    loader = StatefulDataLoader(data, batch_size=4, num_workers=workers, collate_fn=identity)
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
def test_state_after_an_error_resumes_at_the_batch_that_failed(workers: int) -> None:
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
def test_iterating_on_after_an_error_skips_the_failed_batch(workers: int) -> None:
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


def stop(*_: Any) -> Any:
    raise StopIteration


class Stopping(Squares):
    def __getitem__(self, index: int) -> Any:
        return stop() if index == 5 else index


class StoppingBatch(Gathered):
    def __getitems__(self, indices: Any) -> Any:
        return stop() if 5 in indices else super().__getitems__(indices)


class Mapped(IterableDataset[int]):
    """A stream whose transform raises StopIteration at the sixth sample."""

    def __iter__(self) -> Any:
        return map(Stopping(12).__getitem__, range(12))


def stop_at_five(samples: Any) -> Any:
    return stop() if 5 in samples else samples


STOPPING: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "__getitem__": (lambda: Stopping(12), {}),
    "unbatched": (lambda: Stopping(12), {"batch_size": None}),
    "__getitems__": (lambda: StoppingBatch(12), {}),
    "collate_fn": (lambda: range(12), {"collate_fn": stop_at_five}),
    "transform of a stream": (Mapped, {}),
    "collate_fn of a stream": (lambda: Stateless([12]), {"collate_fn": stop_at_five}),
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", STOPPING)
def test_stop_iteration_is_an_error_and_not_the_end_of_the_epoch(kind: str, workers: int) -> None:
    make, options = STOPPING[kind]
    options = {"batch_size": 2, **options}
    loader: Any = StatefulDataLoader(make(), num_workers=workers, **options)
    found = []
    with pytest.raises(RuntimeError, match="raised StopIteration, which only the end") as caught:
        found.extend(loader)
    assert workers or isinstance(caught.value.__cause__, StopIteration)
    before = 5 if options["batch_size"] is None else 2
    assert len(found) == loader.batches_yielded == loader.state_dict()["batches_yielded"] == before
    again: Any = StatefulDataLoader(make(), num_workers=workers, **options)
    again.load_state_dict(loader.state_dict())
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        next(iter(again))  # the same batch


def test_function_that_ends_a_library_iterator_may_say_so() -> None:
    class Called(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(iter(range(5)).__next__, None)

    class Inner(IterableDataset[int]):
        def __iter__(self) -> Any:
            return map(abs, Cursor(0, 5))

    for data in (Called(), Inner()):
        assert [batch.tolist() for batch in StatefulDataLoader(data, batch_size=3)] == [[0, 1, 2], [3, 4]]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("at", [0, 3, 9])
def test_stream_state_after_an_error_is_of_the_batch_before(at: int, workers: int) -> None:
    def make(broken: int | None) -> Any:
        def collate(samples: list[int]) -> list[int]:
            if broken in samples:
                raise ValueError("rotten")
            return samples

        return StatefulDataLoader(Blocks(12), batch_size=2, num_workers=workers, collate_fn=collate)

    whole, loader = list(make(None)), make(at)
    found: list[Any] = []
    with pytest.raises(ValueError, match="rotten"):
        found.extend(loader)
    again = make(None)
    again.load_state_dict(loader.state_dict())
    assert all(at not in batch for batch in found)
    assert found + list(again) == whole


def test_sampler_state_after_an_error_is_of_the_batch_before() -> None:
    loader = StatefulDataLoader(Broken(20, 9, ValueError("rotten")), batch_size=4, sampler=CursorSampler(20))
    found: list[Any] = []
    with pytest.raises(ValueError, match="rotten"):
        found.extend(loader)
    again = StatefulDataLoader(Squares(20), batch_size=4, sampler=CursorSampler(20))
    again.load_state_dict(loader.state_dict())
    assert_same(found + list(again), list(StatefulDataLoader(Squares(20), batch_size=4)))


@pytest.mark.parametrize("workers", [0, 1])
def test_error_of_a_stream_names_the_sample(workers: int) -> None:
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
@pytest.mark.slow
def test_dead_or_late_worker_is_named_and_the_state_stays_valid(how: str, timeout: int, message: str) -> None:
    loader = StatefulDataLoader(Deadly(40, 14, how), batch_size=4, num_workers=2, timeout=timeout)
    iterator = iter(loader)
    found: list[Any] = []
    with pytest.raises(RuntimeError, match=message) as caught:
        found.extend(iterator)  # a killed worker's last batches may be lost, or not
    # The batch that a killed worker was loading is one of several that it was sent.
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
    """Return the live children of this process. Some may be left over from other tests."""
    found = psutil.Process().children()
    return {child for child in found if child.is_running() and child.status() != psutil.STATUS_ZOMBIE}


def ended(workers: set[psutil.Process], seconds: float = 120) -> bool:
    """Check that they exit in time, which takes long only on a busy machine."""
    end = time.monotonic() + seconds
    while workers & children() and time.monotonic() < end:
        time.sleep(0.05)
    return not workers & children()


def test_workers_ignore_the_signals_of_a_scheduler() -> None:
    before = children()
    loader = StatefulDataLoader(Slow(60), batch_size=4, num_workers=2)
    iterator = iter(loader)
    found = [next(iterator), next(iterator)]  # a batch from each worker, so that their handlers are installed
    workers = children() - before
    assert len(workers) == 2
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"):
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


def test_workers_end_when_their_iterator_is_collected() -> None:
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
    sys.path.insert(0, {support!r})
    from loading import Squares
    from exactdata import StatefulDataLoader

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
    script = textwrap.dedent(PARENT).format(support=str(ROOT / "tests" / "support"), then=then, timeout=timeout)
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    return parent, pids


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(pids: list[int], seconds: float = 120) -> list[int]:
    """Return the processes that are still alive. Zombies, whose parent may be gone, do not count."""
    end = time.monotonic() + seconds
    while (left := [pid for pid in pids if _runs(pid)]) and time.monotonic() < end:
        time.sleep(0.05)
    return left


@pytest.mark.slow
def test_workers_die_with_a_killed_parent() -> None:
    parent, pids = children_of("time.sleep(600)")
    parent.kill()
    parent.wait()
    assert wait_until_gone(pids) == []


@pytest.mark.slow
def test_a_hanging_worker_does_not_keep_its_parent_from_exiting() -> None:
    parent, pids = children_of("sys.exit(3)")
    assert parent.wait(timeout=400) == 3
    assert wait_until_gone(pids) == []


class Hung(Squares):
    """A sample that blocks for ever and holds the interpreter's lock, so that no handler or thread runs."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.may_hang = multiprocessing.RawValue("b", 0)
        self.hangs = multiprocessing.RawValue("b", 0)

    def __getitem__(self, index: int) -> Any:
        if index == 1:
            while not self.may_hang.value:  # the sample before is sent by a thread, which needs the lock
                time.sleep(0.01)
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            self.hangs.value = 1
            ctypes.PyDLL(None).sleep(600)
        return super().__getitem__(index)


MANY = 24_576  # a pipe does not hold as many indices


class Late(Squares):
    """A dataset whose second batch is slow, so that the indices of the third wait."""

    def __getitem__(self, index: int) -> Any:
        if index == MANY:
            time.sleep(0.2)
        return index


def leave(how: str, method: str) -> None:
    """Stop an iteration whose worker has more indices waiting than a pipe holds."""
    hung, size = Hung(MANY), MANY if how != "hang" else 1
    data = Late(4 * MANY) if how != "hang" else hung
    loader = StatefulDataLoader(data, size, num_workers=1, collate_fn=len, multiprocessing_context=method)
    iterator = iter(loader)
    next(iterator)
    if how == "del":
        del iterator, loader
    elif how == "exit":
        sys.exit(1)
    elif how == "kill":
        psutil.Process().children()[-1].kill()
        list(iterator)
    elif how == "hang":
        worker_exit.GRACE = 0.1
        hung.may_hang.value = 1
        while not hung.hangs.value:
            time.sleep(0.01)
    raise RuntimeError("left")


SLOW = [pytest.param(outer, method, "raise", marks=pytest.mark.slow) for outer, method in ("fs", "sf", "ss")]


@pytest.mark.parametrize(
    ("outer", "method", "how"), [*(("f", "f", how) for how in ("raise", "exit", "del", "kill", "hang")), *SLOW]
)
def test_no_way_to_leave_an_iteration_blocks_the_exit(outer: str, method: str, how: str) -> None:
    names = {"f": "fork", "s": "spawn"}
    process: Any = multiprocessing.get_context(names[outer])
    process = process.Process(target=leave, args=(how, names[method]))
    process.start()
    process.join(200)
    workers = psutil.Process(process.pid).children() if process.exitcode is None else []
    for left in [*workers, process]:
        left.kill()
    assert process.exitcode == 1


def test_a_fork_of_the_main_process_leaves_its_workers_alone() -> None:
    shutdown = Shutdown(multiprocessing, 1)
    pid = os.fork()
    if not pid:
        shutdown.set()
        end_all()
        os._exit(0)
    os.waitpid(pid, 0)
    assert not shutdown.is_set()
    shutdown.set()
    assert shutdown.is_set()


class Paused(Gathered):
    """A dataset whose batches wait for permission to continue."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.may_go_on = threading.Event(), threading.Event()

    def __getitems__(self, indices: Any) -> Any:
        self.begun.set()
        self.may_go_on.wait()
        return super().__getitems__(indices)


def test_fork_during_a_prefetch_can_iterate_the_dataset() -> None:
    data = Paused()
    threading.Thread(target=lambda: next(iter(StatefulDataLoader(data, batch_size=4, num_workers=1)))).start()
    data.begun.wait()
    pid = os.fork()
    if not pid:
        data.may_go_on = threading.Event()
        data.may_go_on.set()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest's, to end the test
        signal.alarm(60)
        os._exit(len(list(StatefulDataLoader(data, batch_size=4, num_workers=1))))
    data.may_go_on.set()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 6


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
def test_a_state_that_does_not_fit_is_refused_with_one_line(state: Any, message: str) -> None:
    loader = StatefulDataLoader(Squares(20), batch_size=4)
    with pytest.raises(LoaderStateError, match=re.escape(message)) as caught:
        loader.load_state_dict(state)
    assert isinstance(caught.value, UserError)
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)
    assert len(list(loader)) == 5


def test_a_state_of_the_reference_loader_is_accepted() -> None:
    sampler = DistributedSampler(Squares(20), num_replicas=1, rank=0)
    whole = list(StatefulDataLoader(Squares(20), batch_size=4, sampler=sampler))
    loader = StatefulDataLoader(
        Squares(20), batch_size=4, sampler=DistributedSampler(Squares(20), num_replicas=1, rank=0)
    )
    reference = {"epoch": 0, "seed": 0, "num_replicas": 1, "rank": 0}
    loader.load_state_dict({"epoch": 0, "batches_yielded": 2, "sampler": {**sampler.state_dict(), **reference}})
    assert_same(list(loader), whole[2:])


@pytest.mark.parametrize("had_generator", [True, False])
def test_state_is_refused_if_only_one_sampler_has_a_generator(had_generator: bool) -> None:
    def make(has_generator: bool) -> StatefulDataLoader[Any]:
        generator = torch.Generator().manual_seed(1) if has_generator else None
        return StatefulDataLoader(Squares(20), 4, sampler=RandomSampler(Squares(20), generator=generator))

    loader = make(had_generator)
    next(iter(loader))
    again = make(not had_generator)
    with pytest.raises(LoaderStateError, match=f"saved with a sampler {'with' if had_generator else 'without'} a gen"):
        again.load_state_dict(loader.state_dict())
    assert len(list(again)) == 5


def test_fixed_streams_are_refused_on_another_worker_count() -> None:
    loader = StatefulDataLoader(Generated([20]), batch_size=4)
    next(iter(loader))
    state = loader.state_dict()
    again = StatefulDataLoader(Generated([10, 10]), batch_size=4, num_workers=2)
    again.load_state_dict(state)
    with pytest.raises(LoaderStateError, match=r"is of 1 shards of Generated, now there are 2 \(1 ranks of 2\)"):
        iter(again)
    stateless = StatefulDataLoader(Stateless([20]), batch_size=4)
    next(iter(stateless))
    other = StatefulDataLoader(Stateless([10, 10]), batch_size=4, num_workers=2)
    other.load_state_dict(stateless.state_dict())
    with pytest.raises(LoaderStateError, match="is of 1 shards of Stateless, now there are 2"):
        iter(other)


@pytest.mark.parametrize("plan", [(0, 2), (2, 1), (2, 0)])
def test_redistributing_stream_resumes_on_other_workers(plan: tuple[int, int]) -> None:
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


def test_states_of_all_ranks_are_aggregated_and_split_again() -> None:
    def make(rank: int, of: int) -> Any:
        return StatefulDataLoader(
            Augmented(24), batch_size=2, sampler=DistributedSampler(Squares(24), num_replicas=of, rank=rank)
        )

    loaders = [make(rank, 2) for rank in range(2)]
    whole = [take_batches(make(rank, 2), 8) for rank in range(2)]
    taken = [take_batches(loader, 3) for loader in loaders]
    state = aggregated([loader.state_dict() for loader in loaders])
    for rank in range(2):
        again = make(rank, 2)
        again.load_state_dict(again.deaggregate_state_dict(state, rank, 2))
        assert_same(taken[rank] + take_batches(again, 5), whole[rank])
    alone = make(0, 1)
    with pytest.raises(UserError, match="2"):  # the seeded sampler cannot redistribute its state
        alone.load_state_dict(state)


def test_states_of_ranks_that_cannot_be_split_are_refused() -> None:
    loader = StatefulDataLoader(Blocks(12), batch_size=2)
    state = aggregated([loader.state_dict()])
    with pytest.raises(LoaderStateError, match="rank=2 is outside"):
        loader.deaggregate_state_dict(state, 2, 2)
    with pytest.raises(LoaderStateError, match="'ranks' missing"):
        loader.deaggregate_state_dict(loader.state_dict(), 0, 1)
    with pytest.raises(LoaderStateError, match="no states"):
        loader.aggregate_state_dict([])


def test_the_loader_implements_the_protocol() -> None:
    assert isinstance(StatefulDataLoader(Squares(3)), RestartableDataLoader)
    assert not isinstance([1], RestartableDataLoader)


def test_sample_rng_outside_a_sample_is_an_error() -> None:
    with pytest.raises(NoSampleError, match="while no sample is being fetched"):
        sample_rng()


def test_the_main_process_is_one_shard() -> None:
    assert shard() == (0, 1)


def test_two_loaders_at_once_do_not_affect_each_other() -> None:
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
def test_after_an_epoch_ended_early_the_next_one_begins(workers: int) -> None:
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


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("data", [Squares(20), Gathered(20)], ids=["process", "thread"])
def test_each_batch_has_its_record_despite_prefetching(data: Any, workers: int) -> None:
    def make() -> Any:
        sampler = DistributedSampler(data, num_replicas=2, rank=1, shuffle=False)
        return StatefulDataLoader(data, batch_size=4, sampler=sampler, num_workers=workers)

    loader = make()
    for epoch in range(2):
        pairs = list(loader.iter_recorded())
        assert_same([batch for batch, _ in pairs], list(make()))
        assert [record.indices.tolist() for _, record in pairs] == [[1, 3, 5, 7], [9, 11, 13, 15], [17, 19]]
        assert [record.positions.tolist() for _, record in pairs] == [[1, 3, 5, 7], [9, 11, 13, 15], [17, 19]]
        assert all(record.indices.dtype == record.positions.dtype == np.int64 for _, record in pairs)
        assert [record.epoch for _, record in pairs] == [epoch] * 3


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_record_omits_unknown_fields(workers: int) -> None:
    sizes = [5, 5] if workers else [10]
    _, record = next(StatefulDataLoader(Stateless(sizes), batch_size=4, num_workers=workers).iter_recorded())
    assert (record.indices, record.positions, record.epoch) == (None, None, 0)
    _, record = next(StatefulDataLoader(Squares(9), batch_size=4, num_workers=workers).iter_recorded())
    assert (np.asarray(record.indices).tolist(), record.positions) == ([0, 1, 2, 3], None)


def test_persistent_workers_records_go_to_the_newer_iterator() -> None:
    loader = StatefulDataLoader(Squares(12), batch_size=2, num_workers=1, persistent_workers=True)
    older = loader.iter_recorded()
    list(islice(older, 3))
    newer = loader.iter_recorded()
    found = [next(iterator) for iterator in (newer, older, older)]
    assert [np.asarray(record.indices).tolist() for _, record in found] == [[0, 1], [2, 3], [4, 5]]
    assert [batch["y"][0].tolist() for batch, _ in found] == [[0, 1], [4, 9], [16, 25]]


class Empty(Dataset[int]):
    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: int) -> int:
        raise IndexError(index)


def test_an_empty_dataset_has_empty_epochs() -> None:
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
    """A dataset with one position, like a file handle: it is not thread-safe."""

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


def test_prefetch_threads_never_share_a_dataset() -> None:
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
from exactdata import StatefulDataLoader

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
def test_a_process_exits_cleanly_while_a_batch_is_prefetched() -> None:
    """An interpreter that exits while a thread is inside torch aborts, and the exit status is lost."""
    for _ in range(3):
        command = [sys.executable, "-c", AT_EXIT]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("prefetch", ["thread", None])
def test_a_thread_prefetches_only_if_the_dataset_allows_it(prefetch: str | None) -> None:
    """A dataset that draws from the global generators would draw at random moments of the training."""
    dataset = Gathered()
    dataset.prefetch = prefetch  # type: ignore[assignment]
    before = children()
    iterator = iter(StatefulDataLoader(dataset, batch_size=4, num_workers=1))
    next(iterator)
    assert bool(children() - before) == (prefetch is None)
    mixed = MixtureDataset([Gathered(), dataset], ["a", "b"])
    assert mixed.prefetch == prefetch


def test_worker_of_a_parent_killed_early_exits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would wait for the exit of the process that adopted it, which never happens."""

    def exit_(status: int) -> None:
        raise SystemExit(status)

    shutdown = types.SimpleNamespace(enter=lambda worker: None)
    runner = types.SimpleNamespace(worker=-1, ranks=(0, 1), shutdown=shutdown, parent=12345, fetcher=None)
    runner.fetcher = types.SimpleNamespace(dataset=None)
    info = types.SimpleNamespace(dataset=runner)
    monkeypatch.setattr("exactdata.loading.workers.get_worker_info", lambda: info)
    monkeypatch.setattr("exactdata.loading.workers.ignore_signals", lambda shutdown: None)
    monkeypatch.setattr("exactdata.loading.workers.os.getppid", lambda: 1)
    monkeypatch.setattr("exactdata.loading.workers.os._exit", exit_)
    with pytest.raises(SystemExit):
        WorkerInit(None)(0)

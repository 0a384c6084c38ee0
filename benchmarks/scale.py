"""Measure what grows with ranks, samples and sources, with ranks simulated one after the other in one process.

- Each rank's sampler is constructed, and yields a batch and its state, at 99 % of 10^12 samples. The samples of all
  ranks are compared with the global batch, which detects a rank with another rank's samples.
- The vector that ranks exchange in every step (stop flags, digest and counts by source) is summed by real processes.
- One look of a rank at the heartbeats of all others, in a real store of torch's: its cost for that rank, and for the
  process that serves the store to all of them.
- The index of a checkpoint, made of the parts of simulated ranks, each of which has a part of every tensor.
- A small model is saved and loaded by up to 64 real ranks, which have a 64th of it each: files, bytes, fsyncs, and the
  bytes that rank 0 gathers.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from multiprocessing import SimpleQueue, get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn, start_processes

from benchmarks.results import Table, table
from benchmarks.timing import seconds
from exactdata.elastic import ElasticSampler
from exactdata.order.ledger import DataLedger
from launch.rendezvous import free_port
from runner.checkpoint import TrainStateManager, build_train_state
from runner.checkpoint.files.manifest import Manifest
from runner.checkpoint.files.store import FileRecord
from runner.checkpoint.tensors import layout
from runner.system import files
from runner.system.distributed import World
from runner.training.ranks.peer_watch import MAX_INTERVAL_S, PeerWatch
from runner.training.ranks.peers import connect

dist: Any = distributed  # its stores are not typed
SAMPLES, EACH = 10**12, 8
RANKS = (8, 1_000, 10_000)
SOURCES = (4, 1_000)
STEPS, TURNS = 20, 15
TENSORS = 900
"""Of a model of 300 parameters with AdamW."""


def sampler(ranks: int, rank: int, sources: int, position: int) -> ElasticSampler:
    """Create the sampler of a rank that continues at a position."""
    sizes = {f"source{number}": SAMPLES // sources for number in range(sources)}
    weights = [number % 7 + 1 for number in range(sources)]
    made = ElasticSampler(sizes, weights, global_batch_size=EACH * ranks, num_replicas=ranks, rank=rank)
    made.set_skip(position // ranks)
    return made


def every_rank(found: Table, ranks: int, sources: int) -> None:
    """Measure start, first batch and state of every rank, and check the samples of all ranks together."""
    position = SAMPLES * 99 // 100 // ranks * ranks
    starts, states, batches = [], [], []
    # Making a sampler of 1,000 sources takes so long that only 1,000 of more ranks are simulated, from all of them.
    simulated = range(0, ranks, 1 if sources < 100 else max(ranks // 1_000, 1))
    for rank in simulated:
        began = time.perf_counter()
        made = sampler(ranks, rank, sources, position)
        batches.append(next(made.iter_batches(EACH, True)))
        starts.append(time.perf_counter() - began)
        states.append(len(pickle.dumps(made.state_dict_at(position // ranks))))
    mine = np.stack(batches)
    whole = sampler(1, 0, sources, position)
    expected = next(whole.iter_batches(EACH * ranks, True)).reshape(EACH, ranks).T
    if not np.array_equal(mine, expected[list(simulated)]):
        raise AssertionError(f"{ranks} ranks do not get the samples of the global batch")
    tracemalloc.start()
    kept = sampler(ranks, ranks - 1, sources, position)
    next(kept.iter_batches(EACH, True))
    memory = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    row = f"{ranks:,} ranks, {sources:,} sources"
    found.add(row, "start, median", 1000 * statistics.median(starts), "ms")
    found.add(row, "slowest of 100", 1000 * sorted(starts)[len(starts) * 99 // 100], "ms")
    found.add(row, "state", max(states) / 1024, "KiB")
    found.add(row, "memory", memory / 1024, "KiB")


def told_each_step(sources: int) -> torch.Tensor:
    """Return the vector that a rank adds to the sum over all ranks in every step."""
    ledger = DataLedger([f"source{number}" for number in range(sources)], [10**9] * sources)
    return torch.cat([torch.zeros(2, dtype=torch.int64), torch.from_numpy(ledger.local().view(np.int64))])


def on_rank(rank: int, ranks: int, port: int, results: SimpleQueue[float]) -> None:
    """Sum over all ranks; rank 0 reports the median seconds of a sum, by number of sources."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    world = World(rank, ranks)
    world.start(torch.device("cpu"))
    for sources in SOURCES:
        vector = told_each_step(sources)

        def turn(vector: torch.Tensor = vector) -> None:
            for _ in range(STEPS):
                world.sum(vector)

        taken = [seconds(turn) / STEPS for _ in range(TURNS)]
        if world.is_main:
            results.put(statistics.median(taken))
    world.stop()


def sums(ranks: int) -> Iterator[tuple[int, float]]:
    """Yield (sources, seconds of a sum), with `ranks` real processes on this machine."""
    results = get_context("spawn").SimpleQueue()
    spawn(on_rank, (ranks, free_port(), results), ranks)  # type: ignore[no-untyped-call]
    return ((sources, results.get()) for sources in SOURCES)


def look(found: Table, ranks: int) -> None:
    """Measure one look of the peer watch at `ranks` ranks; a thread of this process serves the store."""
    port = free_port()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    server: Any = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    store = connect(60.0)
    watch = PeerWatch(World(0, ranks), 60.0, lambda: 1, print)
    sign = {
        "host": "node0001",
        "pid": 123_456,
        "step": 123_456,
        "beat": 12,
        "left": False,
        "phase": "compute",
        "hang": None,
    }
    for rank in range(ranks):
        store.set(f"alive/{rank}", json.dumps(sign))
    watch._look(store, 0.0)  # finds out who is there
    own, whole, times = [], [], max(2_000 // ranks, 5)
    for _ in range(TURNS):
        before = time.thread_time(), time.process_time()
        for _ in range(times):
            watch._look(store, 0.0)
        own.append((time.thread_time() - before[0]) / times)
        whole.append((time.process_time() - before[1]) / times)
    serving = statistics.median(whole) - statistics.median(own)
    row = f"{ranks:,} ranks"
    found.add(row, "signs read by a rank", ranks * len(json.dumps(sign)) / 1024, "KiB")
    found.add(row, "CPU of that rank", 1000 * statistics.median(own), "ms")
    found.add(row, "CPU of the store", 1000 * serving, "ms")
    found.add(row, "the store's share of a core", 100 * serving * ranks / MAX_INTERVAL_S, "%")
    del server


def index_of(found: Table, ranks: int) -> None:
    """Measure the index of a model with `TENSORS` tensors, the optimizer's included, sharded over `ranks` ranks."""
    each = 4096 // ranks + 1
    parts = [
        [
            layout.Part(
                f"model.layers.{number}.weight", torch.float32, (each * ranks, 64), (each * rank, 0), (each, 64)
            )
            for number in range(TENSORS)
        ]
        for rank in range(ranks)
    ]
    made: list[bytes] = []
    making = seconds(lambda: made.append(layout.index(parts)))
    record = FileRecord(2**40, "")
    manifest = Manifest(1, {layout.file_name(rank): record for rank in range(ranks)}, world_size=ranks)
    reading = seconds(lambda: layout.entries(made[0], manifest))
    row = f"{ranks:,} ranks"
    found.add(row, "index", len(made[0]) / 1e6, "MB")
    found.add(row, "made by rank 0 in", making, "s")
    found.add(row, "read by every rank in", reading, "s")


class Counted:
    """Count fsyncs of this process, and bytes that others sent to it, within a block."""

    def __init__(self) -> None:
        self.fsyncs = self.gathered = 0

    def __enter__(self) -> Counted:
        fsync, directory, gather = files.fsync_fd, files.fsync_dir, World.gather_on_main
        self._originals = fsync, directory, gather

        def counting_fsync(fd: int) -> None:
            self.fsyncs += 1
            fsync(fd)

        def counting_directory(path: Path) -> None:
            self.fsyncs += 1
            directory(path)

        def counting_gather(world: World, value: object) -> list[object]:
            values = gather(world, value)
            self.gathered += sum(len(pickle.dumps(each)) for each in values)
            return values

        files.fsync_fd, files.fsync_dir = counting_fsync, counting_directory  # type: ignore[assignment]
        World.gather_on_main = counting_gather  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        files.fsync_fd, files.fsync_dir = self._originals[:2]
        World.gather_on_main = self._originals[2]  # type: ignore[method-assign]


def saving(rank: int, ranks: int, port: int, folder: Path, results: SimpleQueue[tuple[float, ...]]) -> None:
    """Save twice and load; rank 0 reports files, all fsyncs, gathered bytes, seconds of a save and of a load."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    world = World(rank, ranks)
    world.start(torch.device("cpu"))
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
    if ranks > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    manager = TrainStateManager(folder, mode="sync")

    def save(step: int) -> None:
        manager.save(step, model, optimizer, build_train_state(step, 0))

    save(1)  # the plan of who writes what, and imports
    world.sum(torch.zeros(1))
    with Counted() as counted:
        took = seconds(lambda: save(2))
    fsyncs = int(world.sum(torch.tensor([counted.fsyncs])))
    loading = seconds(lambda: manager.load(model, optimizer))
    if world.is_main:
        found = list((folder / "step_00000002").iterdir())
        size = sum(each.stat().st_size for each in found)
        results.put((len(found), size, fsyncs, counted.gathered, took, loading))
    world.sum(torch.zeros(1))
    world.stop()


def checkpoints(found: Table, ranks: int) -> None:
    """Measure a checkpoint of `ranks` real ranks."""
    results = get_context("forkserver").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = ranks, free_port(), Path(folder), results
        start_processes(saving, arguments, ranks, start_method="forkserver")  # type: ignore[no-untyped-call]
    count, size, fsyncs, gathered, took, loading = results.get()
    row = f"{ranks} rank{'s' * (ranks > 1)}"
    found.add(row, "files", count, "files")
    found.add(row, "size", size / 1e6, "MB")
    found.add(row, "fsyncs", fsyncs, "fsyncs")
    found.add(row, "gathered by rank 0", gathered / 1024, "KiB")
    found.add(row, "save", took, "s")
    found.add(row, "load", loading, "s")


def main() -> None:
    """Measure all tables."""
    multiprocessing.set_forkserver_preload(["benchmarks.scale", "torch.distributed.checkpoint"])
    found = table("scale-checkpoint", "a checkpoint of 2 MB")
    for ranks in (1, 4, 16, 64):
        checkpoints(found, ranks)
    found = table("scale", "ElasticSampler at 10^12 samples")
    for sources in SOURCES:
        for ranks in RANKS:
            every_rank(found, ranks, sources)
    found = table("scale-index", f"a model of {TENSORS} tensors")
    for ranks in (8, 64, 1_000):
        index_of(found, ranks)
    found = table("scale-watch", "signs of life")
    for ranks in (10, 100, 1_000, 10_000):
        look(found, ranks)
    found = table("scale-step", "the sum of every step")
    for ranks in (2, 4, 8):
        for sources, taken in sums(ranks):
            row = f"{ranks} processes, {sources:,} sources"
            found.add(row, "bytes", told_each_step(sources).nbytes, "B")
            found.add(row, "time", 1e6 * taken, "µs")


if __name__ == "__main__":
    main()

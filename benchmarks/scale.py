"""What grows with ranks, samples and sources: every rank's part, simulated one after the other in one process.

- Each rank's sampler is made, gives a batch and its state, at 99 % of 10^12 samples. That of all ranks together is
  compared with the global batch: a rank that got another's samples would be noticed.
- What ranks tell each other in every step (stop flags, digest and counts by source) is summed by real processes.
"""

from __future__ import annotations

import os
import pickle
import statistics
import time
import tracemalloc
from collections.abc import Iterator
from multiprocessing import SimpleQueue, get_context

import numpy as np
import torch
from torch.multiprocessing.spawn import spawn

from benchmarks.results import Table, table
from benchmarks.timing import seconds
from launch.rendezvous import free_port
from runner.data.elastic import ElasticSampler
from runner.data.order.ledger import DataLedger
from runner.system.distributed import World

SAMPLES, EACH = 10**12, 8
RANKS = (8, 1_000, 10_000)
SOURCES = (4, 1_000)
STEPS, TURNS = 20, 15


def sampler(ranks: int, rank: int, sources: int, position: int) -> ElasticSampler:
    """That of a rank, which continues at a position."""
    sizes = {f"source{number}": SAMPLES // sources for number in range(sources)}
    weights = [number % 7 + 1 for number in range(sources)]
    made = ElasticSampler(sizes, weights, global_batch_size=EACH * ranks, num_replicas=ranks, rank=rank)
    made.set_skip(position // ranks)
    return made


def every_rank(found: Table, ranks: int, sources: int) -> None:
    """Start, first batch and state of every rank; which samples all of them together get."""
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
    """What a rank adds to the sum over all ranks in every step."""
    ledger = DataLedger([f"source{number}" for number in range(sources)], [10**9] * sources)
    return torch.cat([torch.zeros(2, dtype=torch.int64), torch.from_numpy(ledger.local().view(np.int64))])


def on_rank(rank: int, ranks: int, port: int, results: SimpleQueue[float]) -> None:
    """Sums by all ranks; the first one gives the median seconds of one, by number of sources."""
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
    """(sources, seconds of a sum), with so many real processes on this machine."""
    results = get_context("spawn").SimpleQueue()
    spawn(on_rank, (ranks, free_port(), results), ranks)  # type: ignore[no-untyped-call]
    return ((sources, results.get()) for sources in SOURCES)


def main() -> None:
    """Take all figures."""
    found = table("scale", "ElasticSampler at 10^12 samples")
    for sources in SOURCES:
        for ranks in RANKS:
            every_rank(found, ranks, sources)
    found = table("scale-step", "the sum of every step")
    for ranks in (2, 4, 8):
        for sources, taken in sums(ranks):
            row = f"{ranks} processes, {sources:,} sources"
            found.add(row, "bytes", told_each_step(sources).nbytes, "B")
            found.add(row, "time", 1e6 * taken, "µs")


if __name__ == "__main__":
    main()

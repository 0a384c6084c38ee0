"""Measure samplers: a start, an index, many changes and the state, against torch and other libraries.

python -m benchmarks.sampler              # up to 10^7 samples where a permutation has to be drawn
python -m benchmarks.sampler --large      # up to 10^8 (5 GB for torch's sampler)
python -m benchmarks.sampler --only start micro-batches
PEERS=/path/to/site-packages python -m benchmarks.sampler    # with torchdata, mosaicml-streaming, grain

All sides of a comparison run in turns in one process. A time is the median over the turns, a ratio the median of the
ratios of the turns. A sampler is of one of 8 ranks unless stated otherwise.

- start: until the first index, of an epoch that has to be drawn. Memory is the most that numpy and Python held.
- mixture: MixtureSampler's start against drawing the permutations that its order is made of.
- micro-batches: ElasticSampler's next batch as a loader draws it, over several blocks of those that it looks up at
  once, across segments and excluded ranges; the peer is torch's BatchSampler of its DistributedSampler.
- elastic: until the first batch of 32, new and at 99 % of the samples.
- index: one index of a batch that is looked up separately.
- peers: until the first index, and one of 24,576 that follow, of whatever library can be imported.
- changes: ElasticSampler with 1,000 excluded ranges, kept samples or segments, from what the user writes to the
  sampler; an index of the batches of 256 that follow.
- ledger: its state after so many steps that it is as large as it gets, and loading it with its verification.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from itertools import islice, pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import BatchSampler
from torch.utils.data.distributed import DistributedSampler as TorchSampler

from benchmarks.results import table
from benchmarks.timing import seconds
from exactdata.elastic import ElasticSampler
from exactdata.order.ledger import DataLedger
from exactdata.sampler import DistributedSampler, MixtureSampler, permutation

RANKS, RANK = 8, 3
SPELL = 32_768  # samples, several blocks of those that are looked up at once
SAMPLES = 10**7  # where micro-batches and changes are measured: more than are drawn
CHANGES = 1_000
APART = 1_000  # positions between the segments of `changes`
CHUNK, DRAWN = 1_024, 24_576  # samples that peers are asked for

Key = TypeVar("Key")
Action = Callable[[], object]


class Sized:
    """A dataset of which only the length is used."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size


def in_turns(actions: Mapping[Key, Action], turns: int) -> dict[Key, list[float]]:
    """Return the seconds of each action, taken in turns so that a busy machine slows all of them alike."""
    taken: dict[Key, list[float]] = {key: [] for key in actions}
    for _ in range(turns):
        for key, action in actions.items():
            taken[key].append(seconds(action))
    return taken


def ratio(mine: list[float], peer: list[float]) -> float:
    """Return the median of the ratios of the turns."""
    return statistics.median(a / b for a, b in zip(mine, peer, strict=True))


def memory(action: Action) -> tuple[int, int]:
    """Return the bytes held while the result exists, and the peak; torch's own allocations are not seen."""
    tracemalloc.start()
    kept = action()
    used = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del kept
    return used


def power(n: int) -> str:
    return f"10^{len(str(n)) - 1}"


def named(sources: int) -> str:
    return f"{sources:,} source{'s' * (sources > 1)}"


def torch_sampler(n: int) -> TorchSampler[Any]:
    return TorchSampler(Sized(n), RANKS, RANK)  # type: ignore[arg-type]


def mixture(n: int, ranks: int) -> MixtureSampler:
    return MixtureSampler([0, n // 4, n // 2, n // 4 * 3, n], [1, 2, 3, 4], ranks, ranks // 2)


def elastic(n: int, sources: int, **changes: Any) -> ElasticSampler:
    sizes = {f"source{i}": n // sources for i in range(sources)}
    weights = [i % 7 + 1 for i in range(sources)]
    return ElasticSampler(sizes, weights, global_batch_size=8 * RANKS, num_replicas=RANKS, rank=RANK, **changes)


def starts(large: bool) -> None:
    """Measure the start of an epoch against torch.randperm alone."""
    found = table("sampler-start", "start of an epoch, one of 8 ranks")
    for n, turns in ((10**6, 11), (10**7, 7), (10**8, 3))[: 3 if large else 2]:
        ours = {"DistributedSampler": DistributedSampler(Sized(n), RANKS, RANK), "MixtureSampler": mixture(n, RANKS)}
        samplers: dict[str, Any] = {**ours, "torch's DistributedSampler": torch_sampler(n)}
        first = {name: partial(lambda sampler: next(iter(sampler)), sampler) for name, sampler in samplers.items()}
        alone = partial(torch.randperm, n, generator=torch.Generator())
        taken = in_turns({"torch.randperm": alone, **first}, turns)
        for name, times in taken.items():
            sources = " of 4 sources" * (name == "MixtureSampler")
            row = f"{power(n)} samples, {name}{sources}"
            found.add(row, "time", 1e3 * statistics.median(times), "ms")
            if name in ours:
                found.add(row, "ratio to torch.randperm", ratio(times, taken["torch.randperm"]), at_most=1.1)
                most = memory(partial(iter, ours[name]))[1]
                found.add(row, "memory, a sample", most / n, "B", at_most=9)


def mixture_starts() -> None:
    """Measure the start of the mixture sampler against the permutations that its order consists of."""
    found = table("sampler-mixture", "MixtureSampler of 4 sources")
    for n, ranks in ((10**6, 1), (10**7, 1), (10**7, 8)):
        sampler = mixture(n, ranks)

        def permutations(n: int = n, sampler: MixtureSampler = sampler) -> None:
            generator = torch.Generator().manual_seed(0)
            for _ in range(4):
                permutation(n // 4, generator)
            permutation(sampler.num_samples, generator)

        taken = in_turns({"start": partial(lambda one: next(iter(one)), sampler), "own": permutations}, 7)
        row = f"{power(n)} samples, {ranks} rank{'s' * (ranks > 1)}"
        found.add(row, "start", 1e3 * statistics.median(taken["start"]), "ms")
        found.add(row, "its permutations", 1e3 * statistics.median(taken["own"]), "ms")
        found.add(row, "ratio", ratio(taken["start"], taken["own"]), at_most=1.1)


def draw(stream: Iterator[Any], count: int) -> None:
    for _ in islice(stream, count):
        pass


def spells(sampler: ElasticSampler, batch: int) -> Action:
    """Return an action that draws the next `SPELL` samples in batches."""
    stream = sampler.iter_batches(batch, True)
    next(stream)
    return partial(draw, stream, SPELL // batch)


def micro_batches() -> None:
    """Measure a batch of the elastic sampler as a loader draws it."""
    samples = [f"source0:{10_000 * at}-{10_000 * at + 9}" for at in range(100)]
    positions = [f"positions:{40_000 * at}-{40_000 * at + 9}" for at in range(100)]
    segments = [(40_000 * at, {"source0": 1 + at % 3}) for at in range(1, 101)]
    cases: dict[str, tuple[int, int, dict[str, Any], float | None]] = {
        "1 source, batch of 16": (1, 16, {}, 2),
        "4 sources, batch of 16": (4, 16, {}, 5),
        "4 sources, batch of 16, 100 segments": (4, 16, {"segments": segments}, 5),
        "4 sources, batch of 16, 100 ranges of samples excluded": (4, 16, {"exclude": samples}, 5),
        "4 sources, batch of 16, 100 ranges of positions excluded": (4, 16, {"exclude": positions}, 5),
        "1 source, batch of 32": (1, 32, {}, None),
        "4 sources, batch of 32": (4, 32, {}, None),
    }
    peers = {size: f"torch's BatchSampler, batch of {size}" for size in (16, 32)}
    actions: dict[str, Action] = {
        row: spells(elastic(SAMPLES, sources, **changes), size) for row, (sources, size, changes, _) in cases.items()
    }
    for size, row in peers.items():
        actions[row] = partial(draw, iter(BatchSampler(torch_sampler(SAMPLES), size, True)), SPELL // size)
        actions[row]()  # its start
    taken = in_turns(actions, 15)
    found = table("sampler-micro-batches", "a micro-batch of ElasticSampler, one of 8 ranks")
    for row, (_, size, _, goal) in cases.items():
        found.add(row, "time", 1e6 * statistics.median(taken[row]) * size / SPELL, "µs", at_most=goal)
        found.add(row, "ratio to torch's BatchSampler", ratio(taken[row], taken[peers[size]]))
    for size, row in peers.items():
        found.add(row, "time", 1e6 * statistics.median(taken[row]) * size / SPELL, "µs")


def elastic_starts() -> None:
    """Time the elastic sampler until its first batch, new and at 99 % of the samples."""
    found = table("sampler-elastic", "ElasticSampler")
    by_samples, by_sources = [(10**exponent, 4) for exponent in range(5, 13)], [(10**9, n) for n in (1, 10, 100, 1_000)]
    taken: dict[tuple[str, int, int], list[float]] = {}
    for cases in (by_samples, by_sources):  # apart: one of 1,000 sources leaves the next one no caches
        actions: dict[tuple[str, int, int], Action] = {}
        for n, sources in cases:
            actions["start", n, sources] = partial(first_batch, n, sources)
            state = elastic(n, sources).state_dict_at(n * 99 // 100 // RANKS)
            actions["resume", n, sources] = partial(first_batch, n, sources, state)
        taken |= in_turns(actions, 31)
    for n, sources in by_samples + by_sources:
        row, goal = f"{power(n)} samples, {named(sources)}", 1 if sources == 4 else None
        for what in ("start", "resume"):
            found.add(row, what, 1e3 * statistics.median(taken[what, n, sources]), "ms", at_most=goal)
        found.add(row, "memory", memory(partial(elastic, n, sources))[1] / 1024, "KiB")
    least, most = by_samples[0][0], by_samples[-1][0]
    for what in ("start", "resume"):
        times = ratio(taken[what, most, 4], taken[what, least, 4])
        found.add(f"{power(most)} / {power(least)} samples, 4 sources", what, times)


def first_batch(n: int, sources: int, state: dict[str, Any] | None = None) -> object:
    mine = elastic(n, sources)
    if state is not None:
        mine.load_state_dict(state)
    return next(mine.iter_batches(32, True))


def index_costs() -> None:
    """Measure an index of the elastic sampler in batches of several sizes."""
    found = table("sampler-index", "an index of ElasticSampler")
    goals = {(1, 1_024): 100.0, (4, 1_024): 250.0}
    actions: dict[tuple[int, int], Action] = {}
    for sources in (1, 2, 4, 10, 100, 1_000):
        mine = elastic(10**9, sources)
        for size in (256, 1_024, 8_192):
            actions[sources, size] = partial(mine.indices_at, mine.positions(123_456, size))
    for (sources, size), times in in_turns(actions, 51).items():
        each = 1e9 * statistics.median(times) / size
        found.add(named(sources), f"batches of {size:,}", each, "ns", at_most=goals.get((sources, size)))


def changes() -> None:
    """Measure 1,000 changes."""
    cases = written_changes()
    made = {row: partial(elastic, SAMPLES, 4, **more) for row, more in cases.items()}
    started = in_turns(made, 15)
    taken = in_turns({row: spells(make(), 256) for row, make in made.items()}, 15)
    found = table("sampler-changes", f"ElasticSampler of 4 sources, {power(SAMPLES)} samples")
    without = next(iter(cases))
    for row in cases:
        goals = {} if row == without else {"start": 5, "index": 1_000}
        found.add(row, "start", 1e3 * statistics.median(started[row]), "ms", at_most=goals.get("start"))
        found.add(row, "index", 1e9 * statistics.median(taken[row]) / SPELL, "ns", at_most=goals.get("index"))
        if goals:
            found.add(row, "index, ratio to none", ratio(taken[row], taken[without]))


def written_changes() -> dict[str, dict[str, Any]]:
    """Return the changes as a user writes them, by row."""
    samples = [text for number in range(4) for text in ranges(f"source{number}", SAMPLES // 4, CHANGES // 4)]
    left = np.sort(np.random.default_rng(1).choice(SAMPLES // 4 - 1, CHANGES, replace=False)).tolist()
    others = [f"source0:{before + 1}-{after - 1}" for before, after in pairwise([-1, *left]) if after > before + 1]
    others.append(f"source0:{left[-1] + 1}-{SAMPLES // 4 - 1}")
    segments = [(APART * at, {"source0": 1 + at % 3}) for at in range(1, CHANGES + 1)]
    return {
        "without changes": {},
        f"{CHANGES:,} ranges of samples excluded": {"exclude": samples},
        f"{CHANGES:,} ranges of positions excluded": {"exclude": ranges("positions", SAMPLES, CHANGES)},
        f"{CHANGES:,} samples of a source kept": {"exclude": others},
        f"{CHANGES:,} segments, one every {APART:,} positions": {"segments": segments},
    }


def ranges(name: str, stop: int, count: int) -> list[str]:
    """Return `count` random exclusions of 1 to 8 samples below `stop`."""
    numbers = np.random.default_rng(0)
    starts = np.sort(numbers.choice(stop - 8, count, replace=False)).tolist()
    return [f"{name}:{at}-{at + more}" for at, more in zip(starts, numbers.integers(0, 8, count).tolist(), strict=True)]


def ledgers() -> None:
    """Measure the ledger in the train state, by global batch."""
    sampler = elastic(10**9, 4)
    full = 70_000  # samples; digests of up to 65,536 are kept
    positions = np.arange(full)
    indices = sampler.indices_at(positions)
    made = {}
    for size in (1, 8, 32):
        made[size] = DataLedger(list(sampler.sizes), list(sampler.sizes.values()))
        for at in range(0, full, size):
            made[size].consume(indices[at : at + size], positions[at : at + size])
            made[size].commit(made[size].local())

    def load(ledger: DataLedger, state: dict[str, Any]) -> None:
        ledger.load_state_dict(state)
        ledger.verify(sampler.locate)

    saving = in_turns({size: ledger.state_dict for size, ledger in made.items()}, 51)
    loading = in_turns({size: partial(load, ledger, ledger.state_dict()) for size, ledger in made.items()}, 7)
    found = table("sampler-ledger", "the ledger in the train state")
    for size, ledger in made.items():
        row = f"global batch of {size}"
        found.add(row, "time in a save", 1e3 * statistics.median(saving[size]), "ms", at_most=0.1)
        found.add(row, "size", len(json.dumps(ledger.state_dict())) / 1024, "KiB", at_most=64)
        found.add(row, "loading and verifying", 1e3 * statistics.median(loading[size]), "ms")


def peers() -> None:
    """Measure start and index of every library that can be imported."""
    found = table("sampler-peers", "a sampler, one of 8 ranks")
    for n in (10**6, 10**7):
        makes = {}
        for name, (library, make, size) in PEERS.items():
            try:
                makes[name] = partial(make, import_module(library), n), size
            except ImportError as error:
                print(f"  {name}: {error}")
        starting = in_turns({name: partial(lambda make: next(make()), make) for name, (make, _) in makes.items()}, 5)
        streams = {name: make() for name, (make, _) in makes.items()}
        for stream in streams.values():
            next(stream)
        spell = {name: partial(draw, stream, DRAWN // makes[name][1]) for name, stream in streams.items()}
        drawing = in_turns(spell, 4)
        for name in makes:
            row = f"{power(n)} samples, {name}"
            found.add(row, "start", 1e3 * statistics.median(starting[name]), "ms")
            found.add(row, "index", 1e9 * statistics.median(drawing[name]) / DRAWN, "ns")


def _shuffled(streaming: Any, n: int) -> Iterator[Any]:
    shards = np.full(max(1, n // 10_000), min(n, 10_000), np.int64)
    return iter(streaming.get_shuffle_py1e(shards, 1, 0, 0, 160_000))


def _grain(grain: Any, n: int) -> Iterator[Any]:
    return map(grain.MapDataset.range(n).seed(0).shuffle().__getitem__, range(n))


# By name: a module, what makes an iterator with it and the number of samples, and how many samples each item is.
PEERS: dict[str, tuple[str, Callable[[Any, int], Iterator[Any]], int]] = {
    f"ElasticSampler, batches of {CHUNK:,}": (
        "runner",
        lambda module, n: elastic(n, 1).iter_batches(CHUNK, True),
        CHUNK,
    ),
    f"ElasticSampler of 4 sources, batches of {CHUNK:,}": (
        "runner",
        lambda module, n: elastic(n, 4).iter_batches(CHUNK, True),
        CHUNK,
    ),
    "torch's DistributedSampler": ("torch", lambda module, n: iter(torch_sampler(n)), 1),
    "torchdata's StatefulDistributedSampler": (
        "torchdata.stateful_dataloader.sampler",
        lambda module, n: iter(module.StatefulDistributedSampler(Sized(n), RANKS, RANK)),
        1,
    ),
    "mosaicml-streaming's py1e": ("streaming.base.shuffle.py1e", _shuffled, 1),
    "grain's MapDataset.shuffle": ("grain", _grain, 1),
}

PARTS: dict[str, Callable[[], None]] = {
    "mixture": mixture_starts,
    "micro-batches": micro_batches,
    "elastic": elastic_starts,
    "index": index_costs,
    "peers": peers,
    "changes": changes,
    "ledger": ledgers,
}


def main() -> None:
    """Measure all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", action="store_true", help="10^8 samples too, where a permutation has to be drawn")
    parser.add_argument("--only", nargs="+", choices=["start", *PARTS], default=["start", *PARTS])
    options = parser.parse_args()
    if "PEERS" in os.environ:
        sys.path.append(os.environ["PEERS"])
    if "start" in options.only:
        starts(options.large)
    for name, part in PARTS.items():
        if name in options.only:
            part()


if __name__ == "__main__":
    main()

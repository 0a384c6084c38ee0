"""Loader: microseconds a batch against torch's, torchdata's and a bare gather's; what a resume costs.

python -m benchmarks.loader
PEERS=/path/to/site-packages python -m benchmarks.loader    # with torchdata
python -m benchmarks.loader --rounds 40                     # longer, for a busy machine
python -m benchmarks.loader --only elastic resume

All sides of a comparison run in turns, a few batches each, so that a busy machine slows all alike. The figure of each
is the median over the rounds, a ratio the median of the ratios of the rounds.

- overhead: samples fetched one by one, the same dataset and arguments for all loaders. With `state_dict()` at each
  step, against torch's loader, which has none, and torchdata's with it.
- whole: what a run uses, batches gathered at once, against torch's and torchdata's loaders of the same data one by one.
- elastic: batches drawn by ElasticSampler, against the seeded sampler of the same kind; both without or both with
  `state_dict()` at each step.
- resume: load a state of the start and of 99 % of the samples, until the first batch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.results import Table, table
from benchmarks.sampler import ratio
from benchmarks.timing import seconds
from exactdata import DistributedSampler, ElasticSampler, MixtureSampler, StatefulDataLoader
from exactdata.datasets import TokenDataset
from exactdata.order.state_checks import sealed

LENGTH = 2048  # tokens a sample
TOKENS = 16 << 20
SHARDS = 8

Make = Callable[[], Any]


class Small(Dataset[Any]):
    """Small tensors, fetched one by one."""

    def __init__(self, size: int = 1 << 20) -> None:
        self.x = torch.randn(size, 16)
        self.y = torch.arange(size)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]


class SmallGathered(Small):
    """The same tensors, fetched as a whole batch."""

    collated = True
    prefetch = "thread"

    def __getitems__(self, indices: Any) -> Any:
        found = torch.as_tensor(indices)
        return self.x[found], self.y[found]


class Tokens(Dataset[Any]):
    """Samples of a memory map, fetched one by one, as most write it."""

    def __init__(self, tokens: npt.NDArray[np.uint16]) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // LENGTH

    def __getitem__(self, index: int) -> Any:
        window = torch.from_numpy(self.tokens[index * LENGTH : index * LENGTH + LENGTH + 1].astype(np.int64))
        return {"input_ids": window[:-1], "labels": window[1:]}


class Numbers(Dataset[int]):
    """A dataset with a length and nothing else."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class Runner:
    """Iterate over one loader endlessly, a few batches at a time."""

    def __init__(self, make: Callable[[], Any], with_state: bool) -> None:
        self.loader = make()
        self.with_state = with_state
        self.iterator: Iterator[Any] = iter(self.loader)

    def spell(self, batches: int) -> float:
        """Return the seconds a batch."""
        took = 0.0
        left = batches
        while left:
            started = time.perf_counter()
            for _ in self.iterator:
                if self.with_state:
                    self.loader.state_dict()
                left -= 1
                if not left:
                    break
            took += time.perf_counter() - started
            if left:
                self.iterator = iter(self.loader)
        return took / batches


def compare(makes: dict[str, Make], batches: int, rounds: int) -> dict[str, list[float]]:
    """Return the microseconds a batch of each loader, in each round, with its state if its name ends in `+ state`."""
    runners = {name: Runner(make, name.endswith("+ state")) for name, make in makes.items()}
    for runner in runners.values():
        runner.spell(batches)
    taken: dict[str, list[float]] = {name: [] for name in runners}
    for number in range(rounds):
        order = list(runners) if number % 2 else list(runners)[::-1]
        for name in order:
            taken[name].append(1e6 * runners[name].spell(batches))
    return taken


def torchdata_loader() -> Any | None:
    """Return torchdata's loader, if it is installed."""
    try:
        return import_module("torchdata.stateful_dataloader").StatefulDataLoader
    except ImportError as error:
        print(f"  ({error}: set PEERS to a directory that has torchdata to compare with it)")
        return None


def with_workers(row: str, workers: int) -> str:
    return f"{row}, {workers} worker{'s' * (workers != 1)}"


def per_sample(tokens: npt.NDArray[np.uint16], small: Small, rounds: int) -> None:
    """Measure the overhead against torch and torchdata."""
    found, peer = table("loader", "a batch, fetched one by one"), torchdata_loader()
    datasets: dict[str, tuple[Any, int, int]] = {
        "small tensors": (small, 32, 200),
        f"{LENGTH:,} tokens": (Tokens(tokens), 16, 60),
    }
    for name, (data, batch_size, batches) in datasets.items():
        for workers in (0, 1, 2):
            kwargs: Any = {"batch_size": batch_size, "shuffle": True, "num_workers": workers}
            ours = partial(StatefulDataLoader, data, **kwargs)
            makes: dict[str, Make] = {"torch": partial(DataLoader, data, **kwargs), "ours": ours, "ours + state": ours}
            if peer is not None:
                makes |= dict.fromkeys(("torchdata", "torchdata + state"), partial(peer, data, **kwargs))
            taken = compare(makes, batches, rounds)
            add_overhead(found, with_workers(f"{name}, batch of {batch_size}", workers), taken)


def add_overhead(found: Table, row: str, taken: dict[str, list[float]]) -> None:
    """Add a loader's time without the dataset against other loaders', for which the same dataset is as slow."""
    found.add(row, "torch", statistics.median(taken["torch"]), "µs")
    found.add(row, "ours", statistics.median(taken["ours"]), "µs")
    found.add(row, "ours / torch", ratio(taken["ours"], taken["torch"]), at_most=1.02)
    with_state = taken["ours + state"]
    found.add(row, "ours with state_dict() / torch", ratio(with_state, taken["torch"]), at_most=1.05)
    if "torchdata" in taken:
        found.add(row, "ours / torchdata", ratio(taken["ours"], taken["torchdata"]), at_most=1)
        both = ratio(with_state, taken["torchdata + state"])
        found.add(row, "ours / torchdata, both with state_dict()", both, at_most=1)


def gather(tokens: npt.NDArray[np.uint16], batch_size: int) -> Make:
    """Return a bare numpy gather into the two int64 arrays of a batch, as a loader."""
    count = (len(tokens) - 1) // LENGTH
    windows = np.lib.stride_tricks.sliding_window_view(tokens, LENGTH + 1)[::LENGTH][:count]

    class Bare:
        def __iter__(self) -> Iterator[Any]:
            order = np.random.default_rng(0).permutation(count)
            for at in range(0, count - batch_size + 1, batch_size):
                batch = windows[order[at : at + batch_size]]
                yield {"input_ids": batch[:, :-1].astype(np.int64), "labels": batch[:, 1:].astype(np.int64)}

    return Bare


def gathered_from(small: Small) -> SmallGathered:
    gathered = SmallGathered(1)
    gathered.x, gathered.y = small.x, small.y
    return gathered


def whole_batches(tokens: npt.NDArray[np.uint16], small: Small, rounds: int) -> None:
    """Compare the loader of a run with other loaders of the same data, one sample at a time."""
    found, peer = table("loader-whole-batches", "a whole batch"), torchdata_loader()
    data, plain = TokenDataset(tokens, LENGTH), Tokens(tokens)
    for workers, goal in ((0, 3.0), (2, 1.5)):
        config = SimpleNamespace(num_workers=workers, pin_memory=False, prefetch_factor=None)
        kwargs: Any = {"batch_size": 16, "shuffle": True, "drop_last": True, "num_workers": workers}

        def ours(config: Any = config) -> Any:
            sampler = DistributedSampler(data, num_replicas=1, rank=0)
            return StatefulDataLoader(data, batch_size=16, sampler=sampler, config=config)

        makes: dict[str, Make] = {"torch": partial(DataLoader, plain, **kwargs), "ours": ours, "ours + state": ours}
        if peer is not None:
            makes["torchdata"] = partial(peer, plain, **kwargs)
        taken = compare(makes, 60, rounds)
        row = with_workers(f"{LENGTH:,} tokens, batch of 16", workers)
        add_speeds(found, row, taken, goal)
        if not workers:
            taken = compare({"ours": ours, "gather": gather(tokens, 16)}, 60, rounds)
            found.add(row, "of a bare gather's speed", ratio(taken["gather"], taken["ours"]), at_least=0.8)
    kwargs = {"batch_size": 32, "shuffle": True}
    mine = partial(StatefulDataLoader, gathered_from(small), **kwargs)
    makes = {"torch": partial(DataLoader, small, **kwargs), "ours": mine, "ours + state": mine}
    if peer is not None:
        makes["torchdata"] = partial(peer, small, **kwargs)
    add_speeds(found, with_workers("small tensors, batch of 32", 0), compare(makes, 200, rounds), 3)


def add_speeds(found: Table, row: str, taken: dict[str, list[float]], goal: float) -> None:
    """Add how many times as fast as the others the loader is."""
    for name in ("torch", "ours"):
        found.add(row, name, statistics.median(taken[name]), "µs")
    found.add(row, "of torch's speed", ratio(taken["torch"], taken["ours"]), at_least=goal)
    found.add(
        row, "of torch's speed, with state_dict()", ratio(taken["torch"], taken["ours + state"]), more_is_better=True
    )
    if "torchdata" in taken:
        found.add(row, "of torchdata's speed", ratio(taken["torchdata"], taken["ours"]), at_least=goal)


def elastic(tokens: npt.NDArray[np.uint16], small: Small, rounds: int) -> None:
    """Compare the elastic sampler with the seeded one of the same kind, with the same datasets."""
    found = table("loader-elastic", "a batch drawn by ElasticSampler")
    shards = TokenDataset(np.array_split(tokens, SHARDS), LENGTH)
    datasets: dict[str, tuple[Any, int]] = {
        "small tensors, batch of 32": (small, 32),
        f"whole batches of {LENGTH:,} tokens from {SHARDS} shards, batch of 16": (shards, 16),
        "whole batches of small tensors, batch of 32": (gathered_from(small), 32),
    }
    for name, (data, batch_size) in datasets.items():
        for sources in (1, 4):
            row = f"{name}, {sources} source{'s' * (sources > 1)}"
            seeded, ours = (partial(make, data, batch_size, sources) for make in (seeded_loader, elastic_loader))
            taken = compare({"seeded": seeded, "elastic": ours}, 512, rounds)
            found.add(row, "seeded", statistics.median(taken["seeded"]), "µs")
            found.add(row, "elastic / seeded", ratio(taken["elastic"], taken["seeded"]), at_most=1.1)
            taken = compare({"seeded + state": seeded, "elastic + state": ours}, 512, rounds)
            with_state = ratio(taken["elastic + state"], taken["seeded + state"])
            found.add(row, "elastic / seeded, both with state_dict()", with_state, at_most=1.1)


def seeded_loader(data: Any, batch_size: int, sources: int) -> Any:
    size = len(data) // sources
    bounds, weights = [at * size for at in range(sources + 1)], [at + 1.0 for at in range(sources)]
    sampler = DistributedSampler(data, 1, 0) if sources == 1 else MixtureSampler(bounds, weights, 1, 0)
    return StatefulDataLoader(data, batch_size, sampler=sampler)


def elastic_loader(data: Any, batch_size: int, sources: int) -> Any:
    sizes = {f"source{at}": len(data) // sources for at in range(sources)}
    weights = [at + 1.0 for at in range(sources)]
    sampler = ElasticSampler(sizes, weights, num_replicas=1, rank=0, global_batch_size=batch_size)
    return StatefulDataLoader(data, batch_size, sampler=sampler)


def resumes(size: int) -> None:
    """Measure load and first batch, at the start and at 99 % of the samples, and the size of the state."""
    found = table("loader-resume", f"a resume among 10^{len(str(size)) - 1} samples")
    data = Numbers(size)

    def distributed() -> Any:
        return DistributedSampler(data, num_replicas=1, rank=0)

    def by_position() -> Any:
        return ElasticSampler({"a": size}, {"a": 1.0}, num_replicas=1, rank=0, seed=0, global_batch_size=32)

    samplers: dict[str, tuple[Make | None, int]] = {
        "DistributedSampler": (distributed, 7),
        "ElasticSampler": (by_position, 101),
        "shuffle=True": (None, 7),
    }
    for row, (sampler, turns) in samplers.items():

        def make(sampler: Make | None = sampler) -> Any:
            more = {"shuffle": True} if sampler is None else {"sampler": sampler()}
            return StatefulDataLoader(data, batch_size=32, **more)

        loader = make()
        next(iter(loader))
        state = loader.state_dict()
        states = {part: moved(state, batches, sampler) for part, batches in (("0 %", 1), ("99 %", size * 99 // 3200))}
        taken: dict[str, list[float]] = {part: [] for part in states}
        for _ in range(turns):
            for part, at in states.items():
                taken[part].append(resume(make(), at))
        for part, times in taken.items():
            found.add(row, f"at {part}", 1e3 * statistics.median(times), "ms")
        found.add(row, "ratio", ratio(taken["99 %"], taken["0 %"]), at_most=1.1)
        for part, at in states.items():
            found.add(row, f"state at {part}", len(json.dumps(at)), "B")


def moved(state: dict[str, Any], batches: int, sampler: Make | None) -> dict[str, Any]:
    """Return the state after `batches` batches, without iterating over them."""
    made = None if sampler is None else sampler()
    at = {**state, "batches_yielded": batches, "samples_yielded": batches * 32}
    if made is not None and hasattr(made, "state_dict_at"):
        at["sampler"] = made.state_dict_at(batches * 32)
    return sealed(at) if "digest" in at else at


def resume(loader: Any, state: dict[str, Any]) -> float:
    """Return the seconds until the first batch after the state."""

    def load() -> None:
        loader.load_state_dict(state)
        next(iter(loader))

    return seconds(load)


PARTS: dict[str, Callable[[npt.NDArray[np.uint16], Small, int], None]] = {
    "overhead": per_sample,
    "whole": whole_batches,
    "elastic": elastic,
    "resume": lambda tokens, small, rounds: resumes(10**7),
}


def main() -> None:
    """Measure all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    if "PEERS" in os.environ:
        sys.path.append(os.environ["PEERS"])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "tokens.npy"
        np.save(path, np.random.default_rng(0).integers(0, 50_000, TOKENS, dtype=np.uint16))
        tokens = np.load(path, mmap_mode="r")
        small = Small()
        for name, part in PARTS.items():
            if name in options.only:
                part(tokens, small, options.rounds)


if __name__ == "__main__":
    main()

"""Loader: microseconds a batch, as ratios from one run; and what a resume costs.

python -m benchmarks.loader
PEERS=/path/to/site-packages python -m benchmarks.loader    # with torchdata
python -m benchmarks.loader --rounds 40                     # longer, for a busy machine

All loaders of a table run in turns, a few batches each, so that a busy machine slows all of them alike; the
figure of each is the median over the rounds, a ratio the median of the ratios of the rounds.
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
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from benchmarks.timing import seconds
from runner.data import DistributedSampler, ElasticSampler, MixtureSampler, StatefulDataLoader
from runner.data.datasets import TokenDataset
from runner.data.loading.default_collation import collate_samples
from runner.data.order.state_checks import sealed

LENGTH = 2048  # tokens a sample
TOKENS = 16 << 20


class Small(Dataset[Any]):
    """Small tensors, fetched one by one."""

    def __init__(self, size: int = 1 << 20) -> None:
        self.x = torch.randn(size, 16)
        self.y = torch.arange(size)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]


class SmallListed(Small):
    """The same, fetched as a list for a batch."""

    def __getitems__(self, indices: list[int]) -> Any:
        return [(self.x[index], self.y[index]) for index in indices]


class NumpyListed(Small):
    """The same as a list of dicts of an array and a number."""

    def __init__(self, size: int = 1 << 20) -> None:
        super().__init__(size)
        self.rows, self.labels = self.x.numpy(), self.y.numpy()

    def __getitems__(self, indices: list[int]) -> Any:
        return [{"x": self.rows[index], "y": self.labels[index]} for index in indices]


class SmallGathered(Small):
    """The same, fetched as a whole batch."""

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


class TokensListed(Tokens):
    """The same as a list of dicts of arrays."""

    def __getitems__(self, indices: list[int]) -> Any:
        windows = [self.tokens[at * LENGTH : at * LENGTH + LENGTH + 1].astype(np.int64) for at in indices]
        return [{"input_ids": window[:-1], "labels": window[1:]} for window in windows]


class Numbers(Dataset[int]):
    """Nothing but a length."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class Runner:
    """One loader, iterated for ever in short spells."""

    def __init__(self, make: Callable[[], Any], with_state: bool) -> None:
        self.loader = make()
        self.with_state = with_state
        self.iterator: Iterator[Any] = iter(self.loader)

    def spell(self, batches: int) -> float:
        """Seconds a batch."""
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


def table(title: str, makes: dict[str, Callable[[], Any]], batches: int, rounds: int, against: str) -> None:
    """Print each loader's time and its ratio to that of the loader `against` in the same rounds."""
    print(f"\n{title}")
    runners = {}
    for name, make in makes.items():
        runners[name] = Runner(make, name.endswith("+ state"))
        runners[name].spell(batches)
    taken: dict[str, list[float]] = {name: [] for name in runners}
    for number in range(rounds):
        order = list(runners) if number % 2 else list(runners)[::-1]
        for name in order:
            taken[name].append(runners[name].spell(batches))
    for name, times in taken.items():
        ratios = [one / other for one, other in zip(times, taken[against], strict=True)]
        print(f"  {name:<38}{statistics.median(times) * 1e6:9.1f} µs {statistics.median(ratios):8.3f} x {against}")


def torchdata_loader() -> Any | None:
    try:
        return import_module("torchdata.stateful_dataloader").StatefulDataLoader
    except ImportError as error:
        print(f"({error}: set PEERS to a directory that has torchdata to compare with it)")
        return None


def per_sample(datasets: dict[str, tuple[Any, int, int]], rounds: int) -> None:
    """The same dataset and arguments for all loaders: overhead against torch, and torchdata."""
    peer = torchdata_loader()
    for name, (data, batch_size, batches) in datasets.items():
        for workers in (0, 1, 2):
            kwargs: Any = {"batch_size": batch_size, "shuffle": True, "num_workers": workers}
            makes: dict[str, Callable[[], Any]] = {
                "torch": partial(DataLoader, data, **kwargs),
                "ours": partial(StatefulDataLoader, data, **kwargs),
                "ours + state": partial(StatefulDataLoader, data, **kwargs),
            }
            if peer is not None:
                makes["torchdata"] = partial(peer, data, **kwargs)
                makes["torchdata + state"] = partial(peer, data, **kwargs)
            table(f"{name}, batch {batch_size}, {workers} workers", makes, batches, rounds, "torch")


def gather(tokens: npt.NDArray[np.uint16], batch_size: int) -> Callable[[], Any]:
    """A bare gather of numpy into the two int64 arrays of a batch, as a loader."""
    count = (len(tokens) - 1) // LENGTH
    windows = np.lib.stride_tricks.sliding_window_view(tokens, LENGTH + 1)[::LENGTH][:count]

    class Bare:
        def __iter__(self) -> Iterator[Any]:
            order = np.random.default_rng(0).permutation(count)
            for at in range(0, count - batch_size + 1, batch_size):
                batch = windows[order[at : at + batch_size]]
                yield {"input_ids": batch[:, :-1].astype(np.int64), "labels": batch[:, 1:].astype(np.int64)}

    return Bare


def whole_batches(tokens: npt.NDArray[np.uint16], small: Small, rounds: int) -> None:
    """What a run uses: whole batches, against torch with the same data one by one."""
    ours, plain = TokenDataset(tokens, LENGTH), Tokens(tokens)
    peer = torchdata_loader()
    for workers in (0, 2):
        config = SimpleNamespace(num_workers=workers, pin_memory=False, prefetch_factor=None)
        kwargs: Any = {"batch_size": 16, "shuffle": True, "drop_last": True, "num_workers": workers}

        def make(config: Any = config) -> Any:
            sampler = DistributedSampler(ours, num_replicas=1, rank=0)
            return StatefulDataLoader(ours, batch_size=16, sampler=sampler, config=config)

        makes: dict[str, Callable[[], Any]] = {
            "torch": partial(DataLoader, plain, **kwargs),
            "ours": make,
            "ours + state": make,
            "bare gather": gather(tokens, 16),
        }
        if peer is not None:
            makes["torchdata"] = partial(peer, plain, **kwargs)
        table(f"whole batches of {LENGTH} tokens, batch 16, {workers} workers", makes, 60, rounds, "torch")
        table(f"  the same against a bare gather, {workers} workers", {k: makes[k] for k in ("ours", "bare gather")},
              60, rounds, "bare gather")  # fmt: skip
    gathered = SmallGathered(1)
    gathered.x, gathered.y = small.x, small.y
    kwargs = {"batch_size": 32, "shuffle": True}
    makes = {"torch": partial(DataLoader, small, **kwargs), "ours": partial(StatefulDataLoader, gathered, **kwargs)}
    table("whole batches of small tensors, batch 32, 0 workers", makes, 200, rounds, "torch")


def lists(tokens: npt.NDArray[np.uint16], small: Small, rounds: int) -> None:
    """Where `__getitems__` returns a list: the same dataset for all loaders, and what of a batch is the dataset's."""
    peer = torchdata_loader() or DataLoader
    against = "torch" if peer is DataLoader else "torchdata"
    tensors, arrays = SmallListed(1), NumpyListed(1)
    tensors.x, tensors.y = small.x, small.y
    arrays.rows, arrays.labels = small.x.numpy(), small.y.numpy()
    arrays.x, arrays.y = small.x, small.y
    datasets: dict[str, tuple[Any, int]] = {
        "pairs of small tensors": (tensors, 32),
        "dicts of a small array and a number": (arrays, 32),
        f"dicts of two arrays of {LENGTH} tokens": (TokensListed(tokens), 16),
    }
    for name, (data, batch_size) in datasets.items():
        kwargs: Any = {"batch_size": batch_size, "shuffle": True}
        makes: dict[str, Callable[[], Any]] = {
            against: partial(peer, data, **kwargs),
            "ours": partial(StatefulDataLoader, data, **kwargs),
        }
        table(f"a list of {name}, batch {batch_size}, 0 workers", makes, 200, rounds, against)
        order = torch.randperm(len(data))[: 200 * batch_size].reshape(-1, batch_size).tolist()
        draws = cycle(order)
        samples = data.__getitems__(order[0])
        parts: dict[str, Callable[[], Any]] = {
            "making the list": partial(listed, data, draws),
            "torch's default_collate": partial(default_collate, samples),
            "ours": partial(collate_samples, samples),
        }
        took = {part: statistics.median(seconds(action) for _ in range(500)) * 1e6 for part, action in parts.items()}
        print("    alone: " + ", ".join(f"{part} {micro:.1f} µs" for part, micro in took.items()))


def listed(data: Any, draws: Iterator[list[int]]) -> Any:
    """The samples of the next batch."""
    return data.__getitems__(next(draws))


def elastic(tokens: npt.NDArray[np.uint16], small: Small, rounds: int) -> None:
    """The elastic sampler against the seeded one of the same kind, with the same datasets."""
    gathered = SmallGathered(1)
    gathered.x, gathered.y = small.x, small.y
    datasets: dict[str, tuple[Any, int]] = {
        "small tensors": (small, 32),
        f"whole batches of {LENGTH} tokens": (TokenDataset(tokens, LENGTH), 16),
        "whole batches of small tensors": (gathered, 32),
    }
    for name, (data, batch_size) in datasets.items():
        for sources in (1, 4):
            size = len(data) // sources
            bounds, weights = [at * size for at in range(sources + 1)], [float(at + 1) for at in range(sources)]

            def seeded(data: Any = data, batch: int = batch_size, bounds: Any = bounds, weights: Any = weights) -> Any:
                single = len(weights) == 1
                sampler = DistributedSampler(data, 1, 0) if single else MixtureSampler(bounds, weights, 1, 0)
                return StatefulDataLoader(data, batch, sampler=sampler)

            def ours(data: Any = data, batch: int = batch_size, size: int = size, weights: Any = weights) -> Any:
                sizes = {f"source{at}": size for at in range(len(weights))}
                sampler = ElasticSampler(sizes, weights, num_replicas=1, rank=0, global_batch_size=batch)
                return StatefulDataLoader(data, batch, sampler=sampler)

            title = f"{name}, batch {batch_size}, {sources} source{'s' * (sources > 1)}"
            makes: dict[str, Callable[[], Any]] = {"seeded": seeded, "elastic": ours}
            table(title, makes, 512, rounds, "seeded")
            with_state = {f"{kind} + state": make for kind, make in makes.items()}
            table(f"{title}, with state_dict()", with_state, 512, rounds, "seeded + state")


def resume(size: int) -> None:
    """Load and first batch, at the start and at 99 % of the samples; the size of the state."""
    print(f"\nresume among {size:,} samples (load, first batch, state)")
    data = Numbers(size)

    def distributed() -> Any:
        return DistributedSampler(data, num_replicas=1, rank=0)

    def elastic() -> Any:
        return ElasticSampler({"a": size}, {"a": 1.0}, num_replicas=1, rank=0, seed=0, global_batch_size=32)

    for name, sampler in (("DistributedSampler", distributed), ("ElasticSampler", elastic), ("shuffle=True", None)):

        def make(sampler: Any = sampler) -> Any:
            more = {"shuffle": True} if sampler is None else {"sampler": sampler()}
            return StatefulDataLoader(data, batch_size=32, **more)

        loader = make()
        next(iter(loader))
        state = loader.state_dict()
        states = {part: moved(state, batches, sampler) for part, batches in (("0 %", 1), ("99 %", size * 99 // 3200))}
        row = f"  {name:<24}"
        for part, at in states.items():
            row += f"{part:>6} {statistics.median(timed(make, at) for _ in range(3)) * 1e3:9.1f} ms"
        print(row + "   state " + " / ".join(f"{len(json.dumps(at)):,}" for at in states.values()) + " bytes")


def moved(state: dict[str, Any], batches: int, sampler: Callable[[], Any] | None) -> dict[str, Any]:
    """The state after so many batches, without iterating them."""
    made = None if sampler is None else sampler()
    at = {**state, "batches_yielded": batches, "samples_yielded": batches * 32}
    if made is not None and hasattr(made, "state_dict_at"):
        at["sampler"] = made.state_dict_at(batches * 32)
    return sealed(at) if "digest" in at else at


def timed(make: Callable[[], Any], state: dict[str, Any]) -> float:
    loader = make()
    started = time.perf_counter()
    loader.load_state_dict(state)
    next(iter(loader))
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=["overhead", "whole", "lists", "elastic", "resume"])
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
        if options.only in (None, "overhead"):
            data = {"small tensors": (small, 32, 200), f"{LENGTH} tokens": (Tokens(tokens), 16, 60)}
            per_sample(data, options.rounds)
        if options.only in (None, "whole"):
            whole_batches(tokens, small, options.rounds)
        if options.only in (None, "lists"):
            lists(tokens, small, options.rounds)
        if options.only in (None, "elastic"):
            elastic(tokens, small, options.rounds)
        if options.only in (None, "resume"):
            resume(10**7)


if __name__ == "__main__":
    main()

"""Time TrainerLoader and the loaders of trainers to the first batch, and from a mid-epoch state to the next batch.

PEERS=/path/to/site-packages python -m benchmarks.trainers    # with torchdata and accelerate

- start: construct the loader, until its first batch.
- resume: load a state of the middle of the epoch into a new loader, until the next batch. torch's loader has no state:
  accelerate's `skip_first_batches` skips half of the batches, as accelerate and transformers.Trainer do.

The samples are numbers, so that nothing is read. All loaders run in turns, five times; a figure is the median.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks.loader import Numbers, torchdata_loader, with_workers
from benchmarks.results import table
from benchmarks.sampler import ratio
from benchmarks.timing import seconds
from exactdata import TrainerLoader

BATCH = 32
ROUNDS = 5
OURS = "TrainerLoader, one source"

Make = Callable[[int], Any]
"""Constructs a loader with the given number of workers."""
Resume = Callable[[Any], Any]
"""Moves a new loader to the middle of the epoch; returns an iterable over the rest."""


def ours(data: Any, batches: int) -> tuple[Make, Resume]:
    make = partial(TrainerLoader, data, global_batch_size=BATCH)
    saved = make().elastic_sampler.state_dict_at(batches * BATCH)
    state = {"place": json.dumps({"version": 1, "batches": batches, "sampler": saved})}
    return lambda workers: make(num_workers=workers), lambda loader: loaded(loader, state)


def loaded(loader: Any, state: Any) -> Any:
    loader.load_state_dict(state)
    return loader


def torchs(make: Any, data: Any, workers: int) -> Any:
    return make(data, batch_size=BATCH, shuffle=True, num_workers=workers)


def state_of_torchdata(loader: Any, batches: int) -> Any:
    """Return the state after `batches` batches, without iterating over them."""
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    if "_snapshot" in state:
        state["_snapshot"]["_snapshot_step"] = batches
    else:
        state["_num_yielded"] = batches
    drawn = state["_snapshot"]["_main_snapshot"] if "_snapshot" in state else state
    drawn["_sampler_iter_yielded"] = batches
    drawn["_sampler_iter_state"]["samples_yielded"] = batches * BATCH
    drawn["_sampler_iter_state"]["sampler_iter_state"]["yielded"] = batches * BATCH
    return state


def loaders(size: int, batches: int) -> dict[str, tuple[Make, Resume]]:
    """Return the loaders by name, with the peers that are installed."""
    data, sources = Numbers(size), {"a": Numbers(size // 4 * 3), "b": Numbers(size // 4)}
    found = {OURS: ours(data, batches), "TrainerLoader, a mixture of two": ours(sources, batches)}
    try:
        skip = import_module("accelerate").skip_first_batches
        make = partial(torchs, DataLoader, data)
        found["torch's DataLoader, skip_first_batches"] = make, lambda loader: skip(loader, batches)
    except ImportError as error:
        print(f"  ({error}: set PEERS to a directory that has accelerate to compare with it)")
    if (peer := torchdata_loader()) is not None:
        theirs = partial(torchs, peer, data)
        states = {workers: state_of_torchdata(theirs(workers), batches) for workers in (0, 2)}
        found["torchdata's StatefulDataLoader"] = theirs, lambda loader: loaded(loader, states[loader.num_workers])
    return found


def measure(size: int) -> None:
    """Measure one size."""
    found = table("trainers", f"10^{len(str(size)) - 1} samples, shuffled, batch of {BATCH}")
    compared = loaders(size, size // BATCH // 2)
    for workers in (0, 2):
        taken: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in compared}
        for _ in range(ROUNDS):
            for name, (make, resume) in compared.items():
                taken[name][0].append(seconds(partial(first_batch, make, workers)))
                taken[name][1].append(seconds(partial(first_batch, resume, make(workers))))
        for name, columns in taken.items():
            for column, times, own in zip(("start", "resume"), columns, taken[OURS], strict=True):
                row = with_workers(name, workers)
                found.add(row, column, 1e3 * statistics.median(times), "ms")
                if name != OURS:
                    found.add(row, f"{column} / that of the first row", ratio(times, own), more_is_better=True)


def first_batch(make: Callable[[Any], Any], argument: Any) -> None:
    next(iter(make(argument)))


def main() -> None:
    """Measure all figures."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if "PEERS" in os.environ:
        sys.path.append(os.environ["PEERS"])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    measure(10**7)


if __name__ == "__main__":
    main()

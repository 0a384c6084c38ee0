"""Run other projects' tests for stateful loaders with our loader in place of the tested one.

    python tests/trainers/their_suites.py torchdata CHECKOUT        # a clone of github.com/pytorch/data
    python tests/trainers/their_suites.py accelerate CHECKOUT       # of github.com/huggingface/accelerate
    python tests/trainers/their_suites.py lightning CHECKOUT        # of github.com/Lightning-AI/pytorch-lightning
    python tests/trainers/their_suites.py lightning-length CHECKOUT -x
    python tests/trainers/their_suites.py torchtitan CHECKOUT       # of github.com/pytorch/torchtitan; it needs grain

Further arguments are pytest's. The other project, torchdata and `parameterized` must be installed. `lightning` takes a
TrainerLoader without a length and `lightning-length` one with it, `lightning-plain` a StatefulDataLoader.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch

from exactdata import StatefulDataLoader, TrainerLoader

SUITES = {
    "torchdata": ["test/stateful_dataloader"],
    "accelerate": ["tests/test_data_loader.py", "-k", "StatefulDataLoaderTester"],
    "torchtitan": ["tests/unit_tests/test_dataset_checkpointing.py"],
    "lightning": ["tests/tests_pytorch/loops/test_loops.py", "-k", "save_and_restore_dataloaders"],
}
FOR_LIGHTNING: dict[str, Callable[..., Any]] = {
    "": partial(TrainerLoader, global_batch_size=1, shuffle=False, fetched_ahead=1, collate_fn=lambda batch: batch[0]),
    "length": partial(TrainerLoader, global_batch_size=1, shuffle=False, collate_fn=lambda batch: batch[0]),
    "plain": partial(StatefulDataLoader, batch_size=None),
}


class Exchange:
    """A pytest plugin that puts our loader in place of the stateful iterable of Lightning's tests."""

    def __init__(self, make: Callable[..., Any], has_length: bool) -> None:
        self.make, self.has_length = make, has_length

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Replace the iterable in the module of every test."""
        for item in items:
            item.module.StatefulIterable = self.of_numbers

    def of_numbers(self, start: int = 0) -> Any:
        """Return a loader of the numbers from `start` to 9, like Lightning's."""
        return self.make(range(start, 10), **({"epoch_samples": 10 - start} if self.has_length else {}))


class Rows:
    """A pytest plugin that puts our loader of 60 packed rows in place of the loader in torchtitan's tests."""

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Replace the loader in the class of every test."""
        for item in items:
            item.cls._build_dataloader = lambda test, source, rank: self.build("Streaming" in source.__name__, rank)

    def build(self, in_workers: bool, rank: int) -> TrainerLoader:
        """Return the loader of one of two ranks, with or without workers."""
        rows = [{"input": torch.arange(at, at + 128), "positions": torch.arange(128)} for at in range(60)]
        arguments: dict[str, Any] = {"num_replicas": 2, "rank": rank, "seed": 42, "num_workers": 2 * in_workers}
        return TrainerLoader(rows, global_batch_size=2, collate_fn=self.collate, **arguments)

    @staticmethod
    def collate(samples: list[Any]) -> Any:
        """Return inputs by name, and labels."""
        batch = torch.utils.data.default_collate(samples)
        return batch, batch["input"] + 1


def main(suite: str, checkout: str, *more: str) -> int:
    """Run one suite and return the exit status of pytest."""
    name, _, way = suite.partition("-")
    theirs = import_module("torchdata.stateful_dataloader")
    theirs.StatefulDataLoader = theirs.stateful_dataloader.StatefulDataLoader = StatefulDataLoader  # type: ignore[attr-defined]
    plugins: list[Any] = [Rows()] if name == "torchtitan" else []
    if name == "lightning":
        plugins = [Exchange(FOR_LIGHTNING[way], way == "length")]
        imports = import_module("lightning.pytorch.utilities.imports")
        imports.__dict__.setdefault("_TORCH_GREATER_EQUAL_2_11", True)  # tests newer than the release ask for it
    os.chdir(checkout)
    sys.path.insert(0, "tests")
    options = ["-c", os.devnull, "--rootdir=.", "--noconftest", "-p", "no:cacheprovider", "-W", "ignore", "-q"]
    return int(pytest.main([*options, *SUITES[name], *more], plugins=plugins))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Datasets and samplers of every kind that the loader must resume."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

from exactdata import sample_rng, shard


def identity(batch: Any) -> Any:
    """Return the batch unchanged."""
    return batch


class Squares(Dataset[Any]):
    """A map-style dataset without `__getitems__`. A sample has tensors, numbers and text."""

    def __init__(self, size: int = 23) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return {"x": torch.full((3,), float(index)), "y": (index * index, f"sample {index}"), "z": np.ones(2) * index}


class Listed(Squares):
    """A map-style dataset with `__getitems__`."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        assert type(indices) is list
        return [self[index] for index in indices]


class Gathered(Dataset[Any]):
    """A map-style dataset whose `__getitems__` returns a finished batch."""

    collated = True
    prefetch = "thread"

    def __init__(self, size: int = 23) -> None:
        self.data = np.arange(size * 4, dtype=np.int64).reshape(size, 4)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return {"x": self.data[index]}

    def __getitems__(self, indices: Any) -> Any:
        return {"x": self.data[np.asarray(indices)]}


class Augmented(Dataset[Any]):
    """A map-style dataset with randomness in every sample."""

    def __init__(self, size: int = 23) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return index, float(sample_rng().random())


class Noisy(Dataset[Any]):
    """A map-style dataset that draws from torch's global generator, which is its state."""

    def __init__(self, size: int = 23) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return index, int(torch.randint(1000, (1,)))

    def state_dict(self) -> dict[str, Any]:
        return {"rng": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["rng"])


def worker_part(sizes: Sequence[int]) -> tuple[int, int]:
    """Return (start, size) of this worker's part. The main process reads everything."""
    info = get_worker_info()
    if info is None:
        return 0, sum(sizes)
    return sum(sizes[: info.id]), sizes[info.id]


class Cursor:
    """An iterator with a state, which includes torch's generator if it is random."""

    def __init__(self, start: int, size: int, random: bool = False) -> None:
        self.start, self.size, self.random, self.at = start, size, random, 0

    def __iter__(self) -> Cursor:
        return self

    def __next__(self) -> int:
        if self.at >= self.size:
            raise StopIteration
        self.at += 1
        return self.start + (int(torch.randint(self.size, (1,))) if self.random else self.at - 1)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, **({"rng": torch.get_rng_state()} if self.random else {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        if self.random:
            torch.set_rng_state(state["rng"])


class WithCursor(IterableDataset[int]):
    """An iterable-style dataset whose iterator has the state."""

    def __init__(self, sizes: Sequence[int], random: bool = False) -> None:
        self.sizes, self.random = sizes, random

    def __iter__(self) -> Iterator[int]:
        return Cursor(*worker_part(self.sizes), random=self.random)


class OwnIterator(Cursor, IterableDataset[int]):
    """An iterable-style dataset that is its iterator, for one epoch only."""

    def __init__(self, size: int, random: bool = False) -> None:
        super().__init__(0, size, random)


class Restarting(Cursor, IterableDataset[int]):
    """An iterable-style dataset that is its iterator. `__iter__` goes back to the start."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        super().__init__(0, 0)

    def __iter__(self) -> Restarting:
        super().__init__(*worker_part(self.sizes))
        return self


class Generated(IterableDataset[Any]):
    """An iterable-style dataset with a generator function. The dataset has the state and counts its epochs.

    At the end of an epoch it goes back to the start, or, with `stays`, keeps the end as its position.
    """

    def __init__(self, sizes: Sequence[int], stays: bool = False) -> None:
        self.sizes, self.stays = sizes, stays
        self.at = self.epoch = 0
        self.resume: int | None = None

    def __iter__(self) -> Iterator[Any]:
        start, size = worker_part(self.sizes)
        self.at, self.resume = self.resume or 0, None
        for item in range(start + self.at, start + size):
            self.at += 1
            yield item, self.epoch
        if not self.stays:
            self.at = 0
            self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.resume, self.epoch = state["at"], state["epoch"]


class Stateless(IterableDataset[int]):
    """An iterable-style dataset without a state."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[int]:
        start, size = worker_part(self.sizes)
        yield from range(start, start + size)


class Blocks(IterableDataset[int]):
    """An iterable-style dataset for any number of shards, among which it can redistribute its states.

    Shard `s` of `n` reads every n-th item that remains. A state lists what remained when it was last distributed,
    and this shard's index in its part.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.left: list[int] | None = None
        self.at = 0

    def part(self, number: int, shards: int) -> list[int]:
        everything = list(range(self.size)) if self.left is None else self.left
        return everything[number::shards]

    def __iter__(self) -> Iterator[int]:
        for item in self.part(*shard())[self.at :]:
            self.at += 1
            yield item
        self.at, self.left = 0, None

    def state_dict(self) -> dict[str, Any]:
        return {"left": self.left, "at": self.at, "rest": self.part(*shard())[self.at :]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left, self.at = state["left"], state["at"]

    def aggregate_state_dict(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {"left": sorted(item for state in states for item in state["rest"])}

    def deaggregate_state_dict(self, aggregated: dict[str, Any], number: int, shards: int) -> dict[str, Any]:
        return {"left": aggregated["left"], "at": 0}


class CursorSampler(Sampler[int]):
    """A sampler whose iterator has the state."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return Cursor(0, self.size)

    def __len__(self) -> int:
        return self.size


class EpochSampler(Sampler[int]):
    """A sampler with a generator function. The sampler has the state, and a different order in each epoch."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.at = self.epoch_number = 0

    def __iter__(self) -> Iterator[int]:
        for place in range(self.at, self.size):
            self.at += 1
            yield (place * 5 + self.epoch_number) % self.size
        self.at = 0
        self.epoch_number += 1

    def __len__(self) -> int:
        return self.size

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self.epoch_number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.epoch_number = state["at"], state["epoch"]


class GlobalSampler(Sampler[int]):
    """A stateless sampler that draws its order from torch's global generator."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.size).tolist()

    def __len__(self) -> int:
        return self.size


def has_ended(loader: Any) -> bool:
    """Return whether the sampler of an iterated loader has nothing left, in this epoch or another."""
    if loader.epoch == 0 or loader.batches_yielded or not hasattr(loader.sampler, "samples_left_after"):
        return False
    with suppress(TypeError):  # an endless sampler has no length
        return bool(loader.sampler.samples_left_after(0) == 0)
    return False


def take_batches(loader: Any, count: int) -> list[Any]:
    """Return the next `count` batches, over as many epochs as needed.

    The result is shorter if an epoch is empty or the sampler has ended.
    """
    found: list[Any] = []
    while len(found) < count and not has_ended(loader):
        before = len(found)
        pending = loader.batches_yielded
        for batch in loader:
            found.append(batch)
            if len(found) == count:
                return found
        if len(found) == before and not pending:
            break
    return found

"""Samplers of a user who knows torch's contract and nothing of the runner."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import Sampler


class Shuffled:
    """A sampler without ranks and sources that draws from a generator seeded with the epoch."""

    def __init__(self, data: Any, salt: int = 0) -> None:
        self.data, self.salt, self.epoch = data, salt, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng([self.salt, self.epoch]).permutation(len(self.data)))


class Drawing(Shuffled):
    """A sampler that draws from Python's and numpy's global generators while iterating."""

    def __iter__(self) -> Iterator[int]:
        order = np.random.permutation(len(self.data)).tolist()
        while order:
            yield order.pop(random.randrange(len(order)))


class Blocks(Sampler[int]):
    """A sampler that knows ranks and alternates between the sources."""

    def __init__(self, data: Any, num_replicas: int, rank: int, sources: dict[str, int], seed: int) -> None:
        sizes = list(sources.values())
        starts = np.cumsum([0, *sizes[:-1]])
        self.rank, self.replicas, self.seed, self.epoch = rank, num_replicas, seed, 0
        self.order = (starts[None] + np.arange(min(sizes))[:, None]).ravel()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.order) // self.replicas

    def __iter__(self) -> Iterator[int]:
        mine = np.roll(self.order, self.seed + 2 * self.epoch)[self.rank :: self.replicas][: len(self)]
        return iter(mine.tolist())


class Curriculum(Shuffled):
    """A stateful sampler that draws easy samples first."""

    def __init__(self, data: Any, salt: int = 0) -> None:
        super().__init__(data, salt)
        self.generator, self.drawn = random.Random(salt), 0

    def __iter__(self) -> Iterator[int]:
        while self.drawn < len(self.data):
            self.drawn += 1
            yield self.generator.randrange(1 + self.drawn)
        self.drawn = 0

    def __len__(self) -> int:
        return len(self.data)

    def state_dict(self) -> dict[str, Any]:
        version, words, rest = self.generator.getstate()
        return {"drawn": self.drawn, "generator": [version, list(words), rest]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        version, words, rest = state["generator"]
        self.drawn = state["drawn"]
        self.generator.setstate((version, tuple(words), rest))


class Beyond(Shuffled):
    def __iter__(self) -> Iterator[int]:
        return iter([0, len(self.data)])


class Floats(Shuffled):
    def __iter__(self) -> Iterator[Any]:
        return iter([0.5])


class Batches(Shuffled):
    def __iter__(self) -> Iterator[Any]:
        return iter([[0, 1]])


class Endless:
    def __init__(self, data: Any) -> None: ...

    def __iter__(self) -> Iterator[int]:
        return iter([0])


class Forgetful(Shuffled):
    """A sampler with the same order in every epoch."""

    set_epoch = None  # type: ignore[assignment]


class Short(Shuffled):
    """A sampler whose length is not that of an epoch."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.data) - 1))


class Tiny(Shuffled):
    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

"""Save, restore and seed this process's global random generators in Python, numpy and torch."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

_numpy: Any = np.random  # numpy's type hints lack two functions


class States(NamedTuple):
    """States of the global generators, and the bit generator object used by numpy's global functions."""

    python: Any
    numpy: tuple[Any, Any]
    torch: Any
    gpus: list[Any]


def seed_of(*parts: object) -> int:
    """Return a 63-bit seed that depends on all of `parts`."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


def states(gpus: bool = False) -> States:
    """Return the states of all three generators; with `gpus`, also of CUDA's generators if CUDA is initialized."""
    import torch

    on_gpus = torch.cuda.default_generators if gpus and _in_use(torch.cuda) else ()
    return States(
        random.getstate(),
        (_numpy.get_bit_generator(), np.random.get_state(legacy=False)),
        torch.get_rng_state(),
        [generator.get_state() for generator in on_gpus],
    )


def put_back(before: States) -> None:
    """Restore the generators to the states in `before`."""
    import torch

    random.setstate(before.python)
    bits, state = before.numpy
    _numpy.set_bit_generator(bits)
    np.random.set_state(state)
    torch.set_rng_state(before.torch)
    for generator, state in zip(torch.cuda.default_generators if before.gpus else (), before.gpus, strict=True):
        generator.set_state(state)


def seed(key: int, gpus: bool = False) -> None:
    """Seed all three generators from 64 bits; with `gpus`, also the current GPU's generator if CUDA is initialized.

    numpy and torch use the same algorithm, seeded from 32 bits. Each gets a different half of `key`.
    """
    import torch

    random.seed(key)
    np.random.seed(key >> 32)
    torch.default_generator.manual_seed(key & 0xFFFFFFFF)
    if gpus and _in_use(torch.cuda):
        torch.cuda.manual_seed(key)


@contextmanager
def lent() -> Iterator[None]:
    """Restore all generators, including CUDA's, when the block ends."""
    before = states(gpus=True)
    try:
        yield
    finally:
        put_back(before)


class Generators:
    """A separate set of random generators that can replace this process's global generators for a block of code."""

    def __init__(self, key: int) -> None:
        self._key = key
        self._state: States | None = None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Use these generators until the block ends. The next such block continues their random sequences."""
        outside = states()
        if self._state is None:
            seed(self._key)
        else:
            put_back(self._state)
        try:
            yield
        finally:
            self._state = states()
            put_back(outside)


def drawn_from(before: States) -> str:
    """Return the names of the generators that have advanced since `before`, or an empty string if none has."""
    import torch

    after = states()
    moved = {
        "random": before.python != after.python,
        "numpy.random": not _equal(before.numpy[1], after.numpy[1]),
        "torch": not torch.equal(before.torch, after.torch),
    }
    return ", ".join(name for name, has_moved in moved.items() if has_moved)


def _in_use(cuda: Any) -> bool:
    return bool(cuda.is_initialized())


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[name], other[name]) for name in one)
    return bool(np.array_equal(one, other))

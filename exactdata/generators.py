"""The global random generators of Python, numpy and torch in this process: saved, put back, seeded and lent.

Importing this module imports no torch.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

_numpy: Any = np.random  # its type hints lack two functions


class States(NamedTuple):
    """The states of the global generators, and which generator numpy's functions draw from."""

    python: Any
    numpy: tuple[Any, Any]
    torch: Any
    gpus: list[Any]


def seed_of(*parts: object) -> int:
    """A 63-bit seed that depends on all of `parts`."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


def states(gpus: bool = False) -> States:
    """Save the states of all three; with `gpus` those of CUDA, too, once it is in use."""
    import torch

    on_gpus = torch.cuda.default_generators if gpus and _in_use(torch.cuda) else ()
    return States(
        random.getstate(),
        (_numpy.get_bit_generator(), np.random.get_state(legacy=False)),
        torch.get_rng_state(),
        [generator.get_state() for generator in on_gpus],
    )


def put_back(before: States) -> None:
    """Undo every draw and every seed since `before` was taken."""
    import torch

    random.setstate(before.python)
    bits, state = before.numpy
    _numpy.set_bit_generator(bits)
    np.random.set_state(state)
    torch.set_rng_state(before.torch)
    for generator, state in zip(torch.cuda.default_generators if before.gpus else (), before.gpus, strict=True):
        generator.set_state(state)


def seed(key: int, gpus: bool = False) -> None:
    """Seed all three from 64 bits; with `gpus` that of the current GPU, too, once CUDA is in use.

    numpy's and torch's are the same generator, which begins with 32 bits: each has other ones.
    """
    import torch

    random.seed(key)
    np.random.seed(key >> 32)
    torch.default_generator.manual_seed(key & 0xFFFFFFFF)
    if gpus and _in_use(torch.cuda):
        torch.cuda.manual_seed(key)


@contextmanager
def lent() -> Iterator[None]:
    """Whatever the block draws, and however it seeds them: afterwards all are as before, those of CUDA too."""
    before = states(gpus=True)
    try:
        yield
    finally:
        put_back(before)


class Generators:
    """Global generators of a thing's own: those of this process are exchanged for them while it draws."""

    def __init__(self, key: int) -> None:
        self._key = key
        self._state: States | None = None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Until the block ends; the next block continues where it did."""
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
    """The names of the generators that have moved since `before`; empty if none has."""
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

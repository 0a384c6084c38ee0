"""Randomness that belongs to a sample: the same for any number of workers, ranks and resumes.

Nothing here imports torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from runner.errors import UserError

Keys = npt.NDArray[np.uint64]


class NoSampleError(UserError, RuntimeError):
    """`sample_rng` was called while no sample was being fetched."""


class _Current(threading.local):
    """What this thread is fetching: the keys of the batch (or how to get them) and the place in it.

    Whoever fetches sets both before a batch and `keys` back to None after it.
    """

    keys: Keys | Callable[[], Keys] | None = None
    at: int = 0


current = _Current()


def sample_rng(at: int | None = None) -> np.random.Generator:
    """The random generator of the sample that is being fetched.

    It is a counter-based generator (Philox) keyed by the seed, the source and how many samples the
    source has given, so that augmentation, cropping and dropping are the same for any number of
    workers and ranks and after any resume. Each call starts the same stream again: take one per sample.

    Args:
        at: place of the sample within the batch, for a dataset's `__getitems__`. Inside `__getitem__`
            it is known.

    Raises:
        NoSampleError: called outside a `StatefulDataLoader`'s fetching.
    """
    keys = current.keys
    if keys is None:
        raise NoSampleError(
            "sample_rng() was called while no sample is being fetched; call it inside the __getitem__ or "
            "__getitems__ of a map-style dataset that a StatefulDataLoader reads"
        )
    if callable(keys):
        keys = current.keys = keys()
    return np.random.Generator(np.random.Philox(key=int(keys[current.at if at is None else at])))


def keys_from_indices(seed: int, indices: Sequence[Any]) -> Keys:
    """Keys for a sampler that gives none: a hash of (seed of the epoch, dataset index).

    Indices that are no integers (the keys of a mapping, say) are hashed by their text.
    """
    import hashlib

    numbers = [
        index
        if isinstance(index, int)
        else int.from_bytes(hashlib.blake2b(repr(index).encode(), digest_size=8).digest(), "little")
        for index in (int(i) if isinstance(i, np.integer) else i for i in indices)
    ]
    mask = (1 << 64) - 1
    mixed = np.array([number & mask for number in numbers], dtype=np.uint64)
    return _mix(mixed ^ _mix(np.array([seed & mask], dtype=np.uint64)))


def _mix(x: Keys) -> Keys:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): every bit depends on every bit."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))

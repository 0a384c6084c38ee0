"""Draw random numbers that depend only on the sample, not on the number of workers or ranks, or on resumes.

Importing this module does not import torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from exactdata.errors import UserError
from exactdata.order.arrays import U64
from exactdata.order.hashing import GOLDEN, mix64

Keys = U64


class NoSampleError(UserError, RuntimeError):
    """`sample_rng` was called while no sample was being fetched."""


class _Current(threading.local):
    """The batch that this thread is fetching: its keys (or a function that returns them), and the current index in it.

    The fetcher sets both before fetching a batch, and resets `keys` to None afterwards.
    """

    keys: Keys | Callable[[], Keys] | None = None
    at: int = 0


current = _Current()


def sample_rng(at: int | None = None) -> np.random.Generator:
    """Return the random generator of the sample that is being fetched.

    It is a counter-based generator (Philox), keyed by the seed, the source and the number of earlier samples of that
    source. Augmentation, cropping and dropping therefore do not depend on workers, ranks or resumes. If the sampler has
    no `sample_keys`, the key is a hash of the epoch's seed and the dataset index. Call this once per sample, because
    every call for the same sample restarts the same random stream.

    Example:
        ```python
        from exactdata import StatefulDataLoader, sample_rng

        class Noisy:
            def __len__(self):
                return 8

            def __getitem__(self, index):
                return index + sample_rng().normal(0, 0.1)  # the same on any number of workers

        print([batch.tolist() for batch in StatefulDataLoader(Noisy(), batch_size=4)])
        ```

    Args:
        at: index of the sample within the batch. Required in a dataset's `__getitems__`, but not in `__getitem__`.

    Raises:
        NoSampleError: called while no `StatefulDataLoader` is fetching a sample.
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
    """Compute keys by hashing the epoch's seed and the dataset indices, for a sampler without keys.

    For indices that are not integers (e.g. the keys of a mapping), the `repr` is hashed.
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
    step = np.uint64(GOLDEN)
    return mix64((mixed ^ mix64(np.array([seed & mask], dtype=np.uint64) + step)) + step)

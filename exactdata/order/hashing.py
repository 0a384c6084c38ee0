"""Hash arrays to 64 bits reproducibly, and derive keys for independent random streams."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from exactdata.order.arrays import U64

GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, the increment of SplitMix64
_MASK = (1 << 64) - 1
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def mix64(values: U64) -> U64:
    """Apply the SplitMix64 finalizer (Steele, Lea and Flood, 2014), a bijection on the 64-bit integers.

    Args:
        values: uint64 array of any shape, not modified.

    Returns:
        A new array of the same shape.
    """
    mixed = values ^ (values >> _S30)
    mixed *= _M1
    mixed ^= mixed >> _S27
    mixed *= _M2
    mixed ^= mixed >> _S31
    return mixed


def stream_key(*parts: int | str) -> int:
    """Return a 64-bit key for the random stream that `parts` name, e.g. (seed, "source", "code").

    Different tuples give independent streams, even similar tuples such as (42, 1) and (43, 0).
    """
    return int.from_bytes(_digest("\x1f".join(f"{type(part).__name__}:{part}" for part in parts)), "little")


def keys_of(texts: Iterable[str]) -> U64:
    """Return the `stream_key` of each string. The parts must already be joined the way `stream_key` joins them."""
    return np.frombuffer(b"".join(map(_digest, texts)), "<u8").astype(np.uint64)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def derive(keys: U64 | int, counters: NDArray[np.integer]) -> U64:
    """Derive a key from each pair of a stream key and a counter.

    Args:
        keys: one stream key, or a uint64 array of them.
        counters: non-negative integers such as epochs, broadcast against `keys`.

    Returns:
        uint64 array of the broadcast shape, with at least one dimension.
    """
    base = np.atleast_1d(np.asarray(keys, np.uint64))
    steps = (np.atleast_1d(counters).astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)
    return mix64(base + steps)

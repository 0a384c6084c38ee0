"""Permute [0, n) pseudo-randomly under a key, with random access and without storing the permutation.

The integers below n are written as pairs (left, right) on an a x b grid with n cells or slightly more. Each round adds
a hash of one coordinate to the other coordinate. This is a Feistel network with modular addition (Black and Rogaway,
"Ciphers with arbitrary finite domains", 2002). A result in a surplus cell is permuted again until it is below n ("cycle
walking"), so that the function remains a bijection. It is designed for statistical quality, not for secrecy.

All functions are vectorized over indices, and optionally over sizes and keys, so that one call can permute a batch from
many sources. This module does not import torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from exactdata.order.arrays import U64
from exactdata.order.hashing import stream_key

MAX_SIZE = 1 << 62
_CHUNK = 8192  # indices processed at a time, so that the working arrays stay in cache
_CANDIDATES = 64  # number of grids to try in search of few surplus cells
_S32 = np.uint64(32)
_INNER = np.uint64(0xD6E8FEB86659FD93)
# Entries are (minimum columns b, pairs of rounds). After r pairs of rounds, the difference of two inputs survives with
# probability b^-r, which must be small compared with 1/n. Narrow grids therefore need more rounds.
_PAIRS_BY_WIDTH = ((256, 3), (16, 4), (8, 5), (4, 7), (3, 9), (1, 12))
_ROUND_CONSTANTS = tuple(np.uint64(stream_key("permutation", i) | 1) for i in range(24))


def grid(n: int) -> tuple[int, int]:
    """Choose rows and columns (a, b) of a nearly square grid with few surplus cells for [0, n), 1 <= n <= 2^62.

    A grid with two odd sides allows only even permutations, so grids with an even side are preferred.
    """
    if n < 3:
        return n, 1
    widest = max(2, math.isqrt(n))
    narrowest = max(2, widest - _CANDIDATES + 1, (widest + 1) // 2)
    b = np.arange(widest, narrowest - 1, -1, dtype=np.int64)
    a = -(-np.int64(n) // b)
    cost = 2 * (a * b - n) + (a & b & 1)
    best = int(np.argmin(cost))
    return int(a[best]), int(b[best])


def round_pairs(b: int) -> int:
    """Return the number of pairs of rounds for a grid with `b` columns."""
    return next(pairs for width, pairs in _PAIRS_BY_WIDTH if b >= width)


@dataclass(frozen=True)
class Domain:
    """The range [0, n) and its a x b grid. Each field is a scalar, or an array with one entry per index."""

    n: np.uint64 | U64
    a: np.uint64 | U64
    b: np.uint64 | U64

    def select(self, chosen: NDArray[np.intp] | slice) -> Domain:
        """Return the domain of the chosen indices."""
        parts = (field[chosen] if isinstance(field, np.ndarray) else field for field in (self.n, self.a, self.b))
        return Domain(*parts)


def _hash(values: U64, key: np.uint64 | U64, constant: np.uint64) -> U64:
    """Compute 32-bit hashes of a coordinate and the key."""
    mixed = values ^ key
    mixed *= constant
    mixed ^= mixed >> _S32
    mixed *= _INNER
    mixed >>= _S32
    return mixed


def _add(values: U64, hashed: U64, modulus: np.uint64 | U64) -> None:
    """Add in place: values = (values + hashed scaled to [0, modulus)) mod modulus."""
    hashed *= modulus
    hashed >>= _S32
    values += hashed
    np.subtract(values, modulus, out=hashed)  # wraps to a huge number if values < modulus
    np.minimum(values, hashed, out=values)


def _subtract(values: U64, hashed: U64, modulus: np.uint64 | U64) -> None:
    """Undo `_add`."""
    hashed *= modulus
    hashed >>= _S32
    values -= hashed  # wraps to a huge number if values < hashed
    np.add(values, modulus, out=hashed)
    np.minimum(values, hashed, out=values)


def _one_pass(indices: U64, domain: Domain, key: np.uint64 | U64, pairs: int, inverse: bool) -> U64:
    """Apply all rounds once. The result may be in a surplus cell."""
    left = indices // domain.b
    right = indices - left * domain.b
    if inverse:
        for i in reversed(range(pairs)):
            _subtract(right, _hash(left, key, _ROUND_CONSTANTS[2 * i + 1]), domain.b)
            _subtract(left, _hash(right, key, _ROUND_CONSTANTS[2 * i]), domain.a)
    else:
        for i in range(pairs):
            _add(left, _hash(right, key, _ROUND_CONSTANTS[2 * i]), domain.a)
            _add(right, _hash(left, key, _ROUND_CONSTANTS[2 * i + 1]), domain.b)
    left *= domain.b
    left += right
    return left


def _cycle_walk(indices: U64, domain: Domain, key: np.uint64 | U64, pairs: int, inverse: bool) -> U64:
    result = _one_pass(indices, domain, key, pairs, inverse)
    outside = np.flatnonzero(result >= domain.n)
    if outside.size:
        keys = key[outside] if isinstance(key, np.ndarray) else key
        result[outside] = _cycle_walk(result[outside], domain.select(outside), keys, pairs, inverse)
    return result


def permute(indices: U64, domain: Domain, key: np.uint64 | U64, pairs: int, *, inverse: bool = False) -> U64:
    """Permute each index within its domain, under its key.

    Args:
        indices: uint64 of shape (count,), each below n of its domain.
        domain: one domain for all indices (scalar fields), or one per index (fields of shape (count,)).
        key: 64-bit key, a scalar or of shape (count,).
        pairs: `round_pairs` of the domain. It must be the same for all indices in a call.
        inverse: whether to apply the inverse permutation.

    Returns:
        uint64 of shape (count,).
    """
    if indices.size <= _CHUNK:
        return _cycle_walk(indices, domain, key, pairs, inverse)
    result = np.empty_like(indices)
    for first in range(0, indices.size, _CHUNK):
        part = slice(first, first + _CHUNK)
        keys = key[part] if isinstance(key, np.ndarray) else key
        result[part] = _cycle_walk(indices[part], domain.select(part), keys, pairs, inverse)
    return result

"""A keyed pseudo-random permutation of [0, n) with random access: nothing is ever stored.

The integers below n are laid out as the pairs (left, right) of a grid a x b that holds n cells or a
few more. A round adds to one coordinate a hash of the other (a Feistel network with modular addition,
as in Black and Rogaway, "Ciphers with arbitrary finite domains", 2002); a result in one of the
surplus cells is sent through again until it falls below n ("cycle walking"), which keeps it a
bijection. It is made for statistical quality, not for secrecy.

Everything is vectorised over indices, and optionally over sizes and keys too: one call permutes
a batch whose samples come from many sources. No torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runner.data.hashing import U64, stream_key
from runner.errors import UserError

MAX_SIZE = 1 << 62
_CHUNK = 8192  # indices at a time: the working arrays stay in the processor's cache
_CANDIDATES = 64  # grids looked at to find one with few surplus cells
_S32 = np.uint64(32)
_INNER = np.uint64(0xD6E8FEB86659FD93)
# Every coordinate must be hit often enough that no difference of two inputs survives measurably:
# after r pairs of rounds a difference is kept with probability b^-r, to be compared with 1/n.
_PAIRS_BY_WIDTH = ((256, 3), (16, 4), (8, 5), (4, 7), (3, 9), (1, 12))
_ROUND_CONSTANTS = tuple(np.uint64(stream_key("permutation", i) | 1) for i in range(24))


class PermutationSizeError(UserError, ValueError):
    """A size outside 1 .. 2^62."""


def grid(n: int) -> tuple[int, int]:
    """Rows and columns (a, b) of the grid for [0, n): near square, fewest surplus cells.

    A grid of two odd sides admits even permutations only, so an even side is preferred.
    """
    if not 1 <= n <= MAX_SIZE:
        raise PermutationSizeError(f"a permutation of {n} items: the size must be between 1 and 2^62")
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
    """Pairs of rounds for a grid of `b` columns."""
    return next(pairs for width, pairs in _PAIRS_BY_WIDTH if b >= width)


@dataclass(frozen=True)
class Domain:
    """[0, n) and its grid. Each field is one number, or an array with one entry per index."""

    n: np.uint64 | U64
    a: np.uint64 | U64
    b: np.uint64 | U64

    def select(self, chosen: NDArray[np.intp] | slice) -> Domain:
        """The domain of the chosen indices."""
        parts = (field[chosen] if isinstance(field, np.ndarray) else field for field in (self.n, self.a, self.b))
        return Domain(*parts)


def _hash(values: U64, key: np.uint64 | U64, constant: np.uint64) -> U64:
    """32 bits in each entry, from a coordinate and the key."""
    mixed = values ^ key
    mixed *= constant
    mixed ^= mixed >> _S32
    mixed *= _INNER
    mixed >>= _S32
    return mixed


def _add(values: U64, hashed: U64, modulus: np.uint64 | U64) -> None:
    """values += hashed scaled to [0, modulus), modulo modulus, in place."""
    hashed *= modulus
    hashed >>= _S32
    values += hashed
    np.subtract(values, modulus, out=hashed)  # wraps to a huge number where values < modulus
    np.minimum(values, hashed, out=values)


def _subtract(values: U64, hashed: U64, modulus: np.uint64 | U64) -> None:
    """The inverse of `_add`."""
    hashed *= modulus
    hashed >>= _S32
    values -= hashed  # wraps to a huge number where values < hashed
    np.add(values, modulus, out=hashed)
    np.minimum(values, hashed, out=values)


def _once(indices: U64, domain: Domain, key: np.uint64 | U64, pairs: int, inverse: bool) -> U64:
    """One pass over the grid; the result may lie in a surplus cell."""
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


def _walk(indices: U64, domain: Domain, key: np.uint64 | U64, pairs: int, inverse: bool) -> U64:
    result = _once(indices, domain, key, pairs, inverse)
    outside = np.flatnonzero(result >= domain.n)
    if outside.size:
        keys = key[outside] if isinstance(key, np.ndarray) else key
        result[outside] = _walk(result[outside], domain.select(outside), keys, pairs, inverse)
    return result


def permute(indices: U64, domain: Domain, key: np.uint64 | U64, pairs: int, *, inverse: bool = False) -> U64:
    """Permute each index within its domain, under its key.

    Args:
        indices: uint64 (count,), each below its domain's n.
        domain: one for all (scalars), or one per index (arrays of shape (count,)).
        key: 64-bit key: a scalar or (count,).
        pairs: `round_pairs` of the domain; the same for all indices of a call.
        inverse: undo instead.
    """
    if indices.size <= _CHUNK:
        return _walk(indices, domain, key, pairs, inverse)
    result = np.empty_like(indices)
    for first in range(0, indices.size, _CHUNK):
        part = slice(first, first + _CHUNK)
        keys = key[part] if isinstance(key, np.ndarray) else key
        result[part] = _walk(indices[part], domain.select(part), keys, pairs, inverse)
    return result


class Permutation:
    """One permutation of [0, n), 1 <= n <= 2^62, chosen by a 64-bit key.

    `permutation(i)` and `permutation.inverse(j)` take an integer or an array of integers and return
    the like (arrays are int64). An index outside [0, n) is an IndexError.
    """

    def __init__(self, n: int, key: int) -> None:
        a, b = grid(n)
        self.n = n
        self.key = np.uint64(key % (1 << 64))
        self._domain = Domain(np.uint64(n), np.uint64(a), np.uint64(b))
        self._pairs = round_pairs(b)

    def __call__(self, indices: int | NDArray[np.integer]) -> int | NDArray[np.int64]:
        return self._apply(indices, inverse=False)

    def inverse(self, indices: int | NDArray[np.integer]) -> int | NDArray[np.int64]:
        """Where each value stands: `inverse(permutation(i)) == i`."""
        return self._apply(indices, inverse=True)

    def _apply(self, indices: int | NDArray[np.integer], inverse: bool) -> int | NDArray[np.int64]:
        array = np.atleast_1d(np.asarray(indices))
        if array.size and (int(array.min()) < 0 or int(array.max()) >= self.n):
            raise IndexError(f"an index outside [0, {self.n}) was given to a permutation of {self.n} items")
        flat = array.reshape(-1).astype(np.uint64)
        result = permute(flat, self._domain, self.key, self._pairs, inverse=inverse).astype(np.int64)
        return int(result[0]) if np.ndim(indices) == 0 else result.reshape(array.shape)

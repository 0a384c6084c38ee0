"""Mix several sources into one sequence, using a pure function slot -> (source, number within the source).

The sources are the leaves of a balanced binary tree. Each inner node sends every sample that reaches it to its lighter
or its heavier child. Let f <= 1/2 be the fraction of the lighter child, and let stratum j be the interval [j / f, (j +
1) / f) of slots. Each stratum has one point, placed uniformly using a hash of (node, j). The lighter child gets as many
of the slots 2b and 2b + 1 as there are points in this pair. If there is one point, a separate bit of the hash chooses
the slot. Therefore:

- Every slot goes to the lighter child with probability exactly f, so the expected shares are the same in every rank,
  batch and step.
- Two slots are independent unless they share a pair or a stratum, so the sequence is not periodic.
- The lighter child has f x of the first x slots, to within 1 if x is even and to within 1 + f if x is odd. This count
  can be computed without looking at any other slot.

These errors add up along the path to a leaf, each scaled by the fractions below it, and `share_bound` returns the sum.
Fractions are 62-bit fixed-point numbers, and all arithmetic is exact.

The samples of each source are numbered consecutively. Its share can therefore change at any slot, even to zero and
back, and the source continues with its next number.

This module does not import torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from exactdata.order.arrays import I64, U64, Flags
from exactdata.order.hashing import derive

BITS = 62
_CHUNK = 2048  # slots processed at a time, so that the working arrays stay in cache
_HALF = np.uint64(31)
_LOW = np.uint64((1 << 31) - 1)
_FRACTION = np.uint64((1 << BITS) - 1)
_SHIFT = np.uint64(BITS)
_S32 = np.uint64(32)
_ONE, _LAST = np.uint64(1), np.uint64(63)
_C1, _C2 = np.uint64(0x9FB21C651E98DF25), np.uint64(0xD6E8FEB86659FD93)


@dataclass(frozen=True)
class _Nodes:
    """Parameters of the splits at inner nodes. Fields are scalars for one node, or arrays over nodes or samples."""

    step: np.uint64 | U64  # points per pair of slots (2 f <= 1), times 2^62
    key: np.uint64 | U64

    def take(self, nodes: int | I64) -> _Nodes:
        return _Nodes(self.step[nodes], self.key[nodes])  # type: ignore[index]


def _strata(pair: U64, node: _Nodes) -> tuple[U64, U64]:
    """Compute floor(2 f pair) and the 62-bit fractional part of 2 f pair, exactly, for pair < 2^62."""
    f_high, f_low = node.step >> _HALF, node.step & _LOW
    x_low = pair & _LOW
    middle = x_low * f_low
    fraction = middle & _LOW
    middle >>= _HALF
    middle += x_low * f_high
    x_high = pair >> _HALF
    if x_high.any():
        middle += x_high * f_low
        stratum = middle >> _HALF
        stratum += x_high * f_high
    else:
        stratum = middle >> _HALF
    middle &= _LOW
    middle <<= _HALF
    fraction |= middle
    return stratum, fraction


def _split(x: U64, node: _Nodes) -> tuple[U64, Flags]:
    """Count the slots before x that go to the lighter child, and decide whether x does."""
    stratum, fraction = _strata(x >> _ONE, node)
    drawn = np.empty((2, *stratum.shape), np.uint64)  # hashes of the strata in which the pair begins and ends
    drawn[0] = stratum
    end = fraction + node.step
    carry = end >> _SHIFT
    end &= _FRACTION
    np.add(stratum, carry, out=drawn[1])
    drawn ^= node.key
    drawn *= _C1
    drawn ^= drawn >> _S32
    drawn *= _C2
    points = drawn & _FRACTION
    drawn >>= _LAST
    passed = points[0] < fraction
    count = carry.view(np.int64)  # number of points in the pair: 0, 1 or 2
    count += points[1] < end
    count -= passed
    odd = x & _ONE
    bit = np.where(passed, drawn[1], drawn[0])  # of a single point; chooses the slot
    lighter = count > (bit ^ odd).view(np.int64)
    count -= lighter
    count *= odd.view(np.int64)
    stratum += count.view(np.uint64)
    stratum += passed
    return stratum, lighter


class Interleave:
    """Mixtures of equally many sources with constant shares. Looking up several mixtures costs as much as one.

    A `mixture` argument is the number of one mixture, or an array with a number for each slot or sample.

    Args:
        quanta: share of each source in each mixture, int64 of shape (mixtures, sources). Shares are positive integers,
            relative to their sum in the mixture, which is below 2^62.
        keys: keys of the random streams that choose the slots of each mixture, uint64 of shape (mixtures,).
    """

    def __init__(self, quanta: I64, keys: U64) -> None:
        self.keys, (count, self.size) = keys, quanta.shape
        self.depth = (self.size - 1).bit_length()
        self._width = width = 1 << self.depth
        # Heap order, with root 1 and children 2k (lighter) and 2k + 1 (heavier). All leaves are at level `depth`. A
        # leaf one level higher in the balanced tree is extended by a node of step 0, which passes everything to its
        # heavier child.
        first, middle, last, leaves = _halves(self.size)
        sums = np.zeros((count, self.size + 1), np.uint64)
        np.cumsum(quanta, axis=1, out=sums[:, 1:].view(np.int64))
        between = sums[:, middle]
        one, two = between - sums[:, first], sums[:, last] - between
        swapped = one > two
        node = np.ones((count, 2 * width), np.int64)  # heap index of each node, with sources in their listed order
        for level in range(self.depth):
            parent, child = (node[:, 1 << at : 2 << at] for at in (level, level + 1))
            child[:, ::2] = 2 * parent + swapped[:, (1 << level) - 1 : (2 << level) - 1]
            child[:, 1::2] = 4 * parent + 1 - child[:, ::2]
        mixtures = np.arange(count)[:, None]
        self._steps = np.zeros((count, 2 * width), np.uint64)
        step = np.maximum(_fraction(np.minimum(one, two), one + two), _ONE)
        self._steps[mixtures, node[:, 1:width]] = np.where(two, step, np.uint64(0))
        self._leaf = node[:, width + leaves]  # heap index of each source's leaf
        self._source = np.zeros((count, 2 * width), np.int64)
        self._source[mixtures, self._leaf] = np.arange(self.size)
        self._node_keys = derive(keys[:, None], np.arange(2 * width))
        self._nodes = _Nodes(self._steps.reshape(-1), self._node_keys.reshape(-1))

    def share_bound(self, source: int, mixture: int = 0) -> float:
        """Return an upper bound on |count - share * slots| of this source after any number of slots."""
        leaf, bound = int(self._leaf[mixture, source]), 0.0
        for below in reversed(range(self.depth)):
            child = leaf >> below
            step = int(self._steps[mixture, child // 2])
            if step:
                fraction = step / (2 << BITS)
                # Before an even slot, the count is exact except for the fractional part of a multiple of 2 f, which is
                # rounded.
                error = 1 - math.gcd(step, 1 << BITS) / (1 << BITS) + fraction
                bound = error + (1 - fraction if child % 2 else fraction) * bound
        return bound

    def locate(self, x: U64, mixture: int | I64 = 0) -> tuple[I64, U64]:
        """Return the source of each slot, and the number of its sample within that source.

        Args:
            x: slots, uint64 of shape (count,), below 2^62.
            mixture: mixture of all slots, or of each slot.

        Returns:
            Sources (int64) and numbers (uint64), both of shape (count,).
        """
        if self.depth == 0:
            return np.zeros(len(x), np.int64), x
        if len(x) > _CHUNK:
            chunks = [slice(first, first + _CHUNK) for first in range(0, len(x), _CHUNK)]
            parts = [self.locate(x[one], mixture if isinstance(mixture, int) else mixture[one]) for one in chunks]
            return np.concatenate([ids for ids, _ in parts]), np.concatenate([numbers for _, numbers in parts])
        root = 2 * self._width * mixture
        node: int | I64 = 1
        for _ in range(self.depth):
            before, lighter = _split(x, self._nodes.take(root + node))
            x = np.where(lighter, before, x - before)
            node = 2 * node + ~lighter
        return self._source.reshape(-1)[root + node], x

    def counts(self, x: I64, mixture: int | I64 = 0) -> I64:
        """Count how many of the first x slots belong to each source.

        Args:
            x: how many slots to count, int64 of shape (count,).
            mixture: mixture for all x, or for each x.

        Returns:
            int64 of shape (count, sources).
        """
        counts = np.empty((len(x), self.size), np.int64)
        rows = max(1, 4 * _CHUNK // self._width)
        for first in range(0, len(x), rows):
            part = slice(first, first + rows)
            of = mixture if isinstance(mixture, int) else mixture[part]
            totals = x[part, None].astype(np.uint64)
            for level in range(self.depth):
                nodes = slice(1 << level, 2 << level)
                before, _ = _split(totals, _Nodes(self._steps[of, nodes], self._node_keys[of, nodes]))
                totals = np.stack([before, totals - before], axis=2).reshape(len(totals), -1)
            leaf = self._leaf[of] - self._width
            counts[part] = totals[:, leaf] if isinstance(of, int) else np.take_along_axis(totals, leaf, axis=1)
        return counts

    def find(self, source: I64, number: U64, mixture: int | I64 = 0) -> U64:
        """Find the slot of sample `number` of each source, or 2^62 if no lower slot has it. The inverse of `locate`."""
        node, root = self._leaf[mixture, source], 2 * self._width * mixture
        x = number.copy()
        for _ in range(self.depth):
            lighter = node % 2 == 0
            node = node // 2
            parent = self._nodes.take(root + node)
            active = np.flatnonzero(parent.step)
            if active.size:
                x[active] = _slot_in_parent(x[active], parent.take(active), lighter[active])
        return x


@lru_cache(maxsize=64)
def _halves(size: int) -> tuple[I64, I64, I64, I64]:
    """Construct the balanced tree over `size` sources.

    Returns:
        Three arrays over the inner nodes, level by level: the first source below the node, the first source below its
        second child, and one past the last source below it. Then the leaf of each source.
    """
    bounds, levels = np.array([0, size]), [np.zeros((3, 0), np.int64)]
    for _ in range((size - 1).bit_length()):
        middle = (bounds[:-1] + bounds[1:] + 1) // 2
        levels.append(np.stack([bounds[:-1], middle, bounds[1:]]))
        bounds = np.append(np.stack([bounds[:-1], middle], axis=1), size)
    return *np.concatenate(levels, axis=1), np.flatnonzero(bounds[:-1] < bounds[1:])


def _fraction(part: U64, whole: U64) -> U64:
    """Compute floor(part / whole 2^63), exactly, for part < whole < 2^62."""
    result, rest = np.zeros_like(part), part
    spare = np.uint64(max(1, 63 - int(whole.max(initial=1)).bit_length()))  # bits computed per step
    left = np.uint64(BITS + 1)
    while left:
        bits = min(spare, left)
        quotient, rest = np.divmod(rest << bits, whole)
        result = (result << bits) | quotient
        left -= bits
    return result


def _slot_in_parent(number: U64, node: _Nodes, lighter: Flags) -> U64:
    """Find the smallest x for which more than `number` of the node's first x + 1 samples go to the child, or 2^62.

    Searches by bisection around number / fraction.
    """
    light = np.asarray(node.step).astype(np.float64) / 2.0 ** (BITS + 1)
    fraction = np.where(lighter, light, 1 - light)
    estimate = number.astype(np.float64) / fraction
    slack = 4 + 3 / fraction + estimate * 2.0**-48
    low = np.clip(estimate - slack, 0, 2.0**BITS).astype(np.uint64)
    high = np.clip(estimate + slack, 0, 2.0**BITS).astype(np.uint64)
    while (low < high).any():
        middle = (low + high) >> _ONE
        before, _ = _split(middle + _ONE, node)
        count = np.where(lighter, before, middle + _ONE - before)
        enough = (count > number) | (low == high)
        high = np.where(enough, middle, high)
        low = np.where(enough, low, middle + _ONE)
    return low

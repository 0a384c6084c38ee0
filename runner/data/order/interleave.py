"""How several sources share one sequence: a pure function slot -> (source, number within the source).

The sources are the leaves of a balanced binary tree. Each inner node sends every sample that reaches it to its lighter
or its heavier child. Let f <= 1/2 be the fraction of the lighter child, and let stratum j be the interval [j / f,
(j + 1) / f) of slots. Each stratum has one point, placed uniformly by a hash of (node, j). The lighter child gets as
many slots of the pair (2b, 2b + 1) as points lie in it: none, both, or one of the two, chosen by another bit of the
hash. Therefore

- every slot goes to the lighter child with probability exactly f: no rank, batch or step sees other shares;
- two slots are independent unless they share a pair or a stratum: there is no period;
- of the first x slots the lighter child has f x, to within one if x is even, and to within 1 + f if it is odd. The
  count is computable without looking at any other slot.

These errors add up along the path to a leaf, each scaled by the fractions below it; `share_bound` returns the sum.
Fractions are 62-bit fixed-point numbers and all arithmetic is exact.

Each source is numbered consecutively, so its share can change at any slot, drop to zero and return: the source
continues at its next number.

Does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runner.data.order.hashing import U64, derive

IDS = NDArray[np.int64]

BITS = 62
_CHUNK = 2048  # slots at a time, so that the working arrays stay in cache
_HALF = np.uint64(31)
_LOW = np.uint64((1 << 31) - 1)
_FRACTION = np.uint64((1 << BITS) - 1)
_SHIFT = np.uint64(BITS)
_S32 = np.uint64(32)
_ONE, _LAST = np.uint64(1), np.uint64(63)
_C1, _C2 = np.uint64(0x9FB21C651E98DF25), np.uint64(0xD6E8FEB86659FD93)


@dataclass(frozen=True)
class _Nodes:
    """How inner nodes split their samples. Fields are scalars for one node, or arrays over nodes or samples."""

    step: np.uint64 | U64  # points per pair of slots, 2 f <= 1, times 2^62
    key: np.uint64 | U64

    def take(self, nodes: IDS) -> _Nodes:
        return _Nodes(self.step[nodes], self.key[nodes])  # type: ignore[index]


def _strata(pair: U64, node: _Nodes) -> tuple[U64, U64]:
    """floor(2 f pair) and the 62-bit fractional part of 2 f pair, exact for pair < 2^62."""
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


def _split(x: U64, node: _Nodes) -> tuple[U64, NDArray[np.bool_]]:
    """How many of the slots before x the lighter child has, and whether it has x."""
    stratum, fraction = _strata(x >> _ONE, node)
    drawn = np.empty((2, *stratum.shape), np.uint64)  # for the strata in which the pair begins and ends
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
    count = carry.view(np.int64)  # of points in the pair: 0, 1 or 2
    count += points[1] < end
    count -= passed
    odd = x & _ONE
    bit = np.where(passed, drawn[1], drawn[0])  # of a single point: the slot that it takes
    lighter = count > (bit ^ odd).view(np.int64)
    count -= lighter
    count *= odd.view(np.int64)
    stratum += count.view(np.uint64)
    stratum += passed
    return stratum, lighter


class Interleave:
    """A mixture of sources at constant shares.

    Args:
        quanta: share of each source, as positive integers relative to their sum.
        key: key of the random stream that chooses the slots.
    """

    def __init__(self, quanta: Sequence[int], key: int) -> None:
        self.size, self.key = len(quanta), key
        self.depth = (self.size - 1).bit_length()
        width = 1 << self.depth
        # Heap order: root 1, children 2k (lighter) and 2k + 1 (heavier). All leaves are at `depth`: a leaf that the
        # balanced tree has one level higher is extended by a node that passes everything to its heavier child.
        self._leaf_source = np.zeros(width, np.int64)
        self._source_leaf = np.zeros(self.size, np.int64)
        self._bounds = [0.0] * self.size
        steps = np.ones(2 * width, np.uint64)
        self._inner = np.zeros(2 * width, bool)
        self._build(1, list(range(self.size)), list(quanta), steps, 0.0)
        self._nodes = _Nodes(steps, derive(key, np.arange(2 * width)))
        self._levels = [
            (self._nodes.take(np.arange(1 << level, 2 << level)), self._inner[1 << level : 2 << level])
            for level in range(self.depth)
        ]
        root = self._nodes
        self._root = _Nodes(root.step[1], root.key[1])  # type: ignore[index]

    def _build(self, node: int, ids: list[int], quanta: list[int], steps: U64, bound: float) -> None:
        if len(ids) == 1:
            while node < len(self._leaf_source):
                node = 2 * node + 1
            leaf = node - len(self._leaf_source)
            self._leaf_source[leaf] = ids[0]
            self._source_leaf[ids[0]] = leaf
            self._bounds[ids[0]] = bound
            return
        half = (len(ids) + 1) // 2
        first, second = ids[:half], ids[half:]
        sums = sum(quanta[i] for i in first), sum(quanta[i] for i in second)
        if sums[0] > sums[1]:
            first, second = second, first
        step = max(1, (min(sums) << BITS + 1) // (sums[0] + sums[1]))
        steps[node] = step
        self._inner[node] = True
        fraction = step / (2 << BITS)
        # Before an even slot the count is exact but for the fractional part of a multiple of 2 f, which is rounded.
        error = 1 - math.gcd(step, 1 << BITS) / (1 << BITS) + fraction
        self._build(2 * node, first, quanta, steps, error + fraction * bound)
        self._build(2 * node + 1, second, quanta, steps, error + (1 - fraction) * bound)

    def share_bound(self, source: int) -> float:
        """Upper bound on |count - share * slots| of this source after any number of slots."""
        return self._bounds[source]

    def locate(self, x: U64) -> tuple[IDS, U64]:
        """Source of each slot, and the number of the sample within that source.

        Args:
            x: slots, uint64 of shape (count,), below 2^62.

        Returns:
            Sources (int64) and numbers (uint64), both of shape (count,).
        """
        if self.depth == 0:
            return np.zeros(len(x), np.int64), x
        if len(x) > _CHUNK:
            parts = [self.locate(x[first : first + _CHUNK]) for first in range(0, len(x), _CHUNK)]
            return np.concatenate([ids for ids, _ in parts]), np.concatenate([numbers for _, numbers in parts])
        node = None
        for nodes, inner in self._levels:
            current = self._root if node is None else nodes.take(node)
            before, lighter = _split(x, current)
            rest = x - before
            if not inner.all():
                passes = ~inner if node is None else ~inner[node]
                lighter &= ~passes
                rest = np.where(passes, x, rest)
            x = np.where(lighter, before, rest)
            heavier = (~lighter).view(np.int8)
            node = heavier.astype(np.int64) if node is None else 2 * node + heavier
        return self._leaf_source[node], x

    def counts(self, x: int) -> NDArray[np.int64]:
        """How many of the first x slots belong to each source, int64 of shape (sources,)."""
        totals = np.array([x], np.uint64)
        for nodes, inner in self._levels:
            before, _ = _split(totals, nodes)
            lighter = np.where(inner, before, np.uint64(0))
            totals = np.stack([lighter, totals - lighter], axis=1).reshape(-1)
        return totals.astype(np.int64)[self._source_leaf]

    def many_counts(self, x: NDArray[np.int64]) -> NDArray[np.int64]:
        """The same for each x, int64 of shape (count, sources)."""
        counts = np.empty((len(x), self.size), np.int64)
        for first in range(0, len(x), _CHUNK):
            totals = x[first : first + _CHUNK, None].astype(np.uint64)
            for nodes, inner in self._levels:
                before, _ = _split(totals, nodes)
                lighter = np.where(inner, before, np.uint64(0))
                totals = np.stack([lighter, totals - lighter], axis=2).reshape(len(totals), -1)
            counts[first : first + _CHUNK] = totals.astype(np.int64)[:, self._source_leaf]
        return counts

    def find(self, source: IDS, number: U64) -> U64:
        """The slot of sample `number` of each source, the inverse of `locate`; 2^62 if all lower slots come before."""
        node = self._source_leaf[source]
        x = number.copy()
        for nodes, inner in reversed(self._levels):
            lighter = node % 2 == 0
            node = node // 2
            active = np.flatnonzero(inner[node])
            if active.size:
                x[active] = _slot_in_parent(x[active], nodes.take(node[active]), lighter[active])
        return x


def counts_of_many(quanta: NDArray[np.int64], keys: U64, x: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many of the first slots of each of many mixtures belong to each source: `Interleave.counts`, all at once.

    Args:
        quanta: shares in each mixture, positive, below 2^62 in all, of shape (mixtures, sources).
        keys: of the mixtures.
        x: of each mixture, how many slots.

    Returns:
        int64 of shape (mixtures, sources).
    """
    counts = np.empty(quanta.shape, np.int64)
    sums = np.concatenate([np.zeros((len(quanta), 1), np.int64), np.cumsum(quanta, axis=1)], axis=1).view(np.uint64)

    def divide(first: int, last: int, node: IDS, slots: U64) -> None:
        """Of the sources `first` to `last` - 1, below these nodes; `slots` reach them."""
        if last - first == 1:
            counts[:, first] = slots
            return
        middle = first + (last - first + 1) // 2
        one, two = sums[:, middle] - sums[:, first], sums[:, last] - sums[:, middle]
        step = np.maximum(_fraction(np.minimum(one, two), one + two), _ONE)
        before, _ = _split(slots, _Nodes(step, derive(keys, node)))
        swapped = one > two
        of_first = np.where(swapped, slots - before, before)
        divide(first, middle, 2 * node + swapped, of_first)
        divide(middle, last, 2 * node + ~swapped, slots - of_first)

    divide(0, quanta.shape[1], np.ones(len(quanta), np.int64), x.astype(np.uint64))
    return counts


def _fraction(part: U64, whole: U64) -> U64:
    """floor(part / whole 2^63), exact for part < whole < 2^62."""
    result, rest = np.zeros_like(part), part
    spare = np.uint64(max(1, 63 - int(whole.max(initial=1)).bit_length()))  # bits that a step can add
    left = np.uint64(BITS + 1)
    while left:
        bits = min(spare, left)
        quotient, rest = np.divmod(rest << bits, whole)
        result = (result << bits) | quotient
        left -= bits
    return result


def _slot_in_parent(number: U64, node: _Nodes, lighter: NDArray[np.bool_]) -> U64:
    """The smallest x such that more than `number` of the first x + 1 samples of the node went to the child; or 2^62.

    A bisection around number / fraction.
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

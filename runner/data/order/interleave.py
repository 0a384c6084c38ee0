"""How several sources share one sequence: a pure function slot -> (source, number within the source).

The sources are the leaves of a balanced binary tree. Each inner node sends every sample that reaches it to its lighter
or its heavier child. Let f <= 1/2 be the fraction of the lighter child. Stratum j is the range of slots x with
floor(f x) = j; the lighter child gets exactly one slot of each stratum, chosen by a hash. Among the first x samples of
a node the lighter child therefore has floor(f x) or floor(f x) + 1: less than one away from f x at every x, computable
without looking at any other slot. The heavier child gets the rest.

These errors add up along the path to a leaf, each scaled by the fractions below it; `share_bound` returns the sum. It
is below 1 for two sources, below 1.5 for four equal ones, and below ceil(log2(sources)) in general. Fractions are
62-bit fixed-point numbers and all arithmetic is exact.

Each source is numbered consecutively, so its share can change at any slot, drop to zero and return: the source
continues at its next number.

Does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runner.data.order.hashing import U64, derive

IDS = NDArray[np.int64]

BITS = 62
_HALF = np.uint64(31)
_LOW = np.uint64((1 << 31) - 1)
_S32 = np.uint64(32)
_ONE = np.uint64(1)
_C1, _C2 = np.uint64(0x9FB21C651E98DF25), np.uint64(0xD6E8FEB86659FD93)


@dataclass(frozen=True)
class _Nodes:
    """How inner nodes split their samples. Fields are scalars for one node, or arrays over nodes or samples."""

    step: np.uint64 | U64  # fraction f of the lighter child, times 2^62
    slots: np.uint64 | U64  # eligible slots of a stratum: floor(1 / f), shifted right ...
    shift: np.uint64 | U64  # ... by this many bits to fit in 32
    key: np.uint64 | U64

    def take(self, nodes: IDS) -> _Nodes:
        return _Nodes(self.step[nodes], self.slots[nodes], self.shift[nodes], self.key[nodes])  # type: ignore[index]


def _strata(x: U64, node: _Nodes) -> tuple[U64, U64]:
    """floor(f x) and the 62-bit fractional part of f x, exact for x < 2^62."""
    f_high, f_low = node.step >> _HALF, node.step & _LOW
    x_low = x & _LOW
    middle = x_low * f_low
    fraction = middle & _LOW
    middle >>= _HALF
    middle += x_low * f_high
    x_high = x >> _HALF
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


def _split(x: U64, node: _Nodes, wide: bool) -> tuple[U64, NDArray[np.bool_], NDArray[np.bool_]]:
    """Stratum of slot x, whether x is the lighter child's slot of that stratum, and whether x comes after it."""
    stratum, fraction = _strata(x, node)
    drawn = stratum ^ node.key
    drawn *= _C1
    drawn ^= drawn >> _S32
    drawn *= _C2
    drawn >>= _S32
    drawn *= node.slots
    drawn >>= _S32
    if wide:
        drawn <<= node.shift
    drawn *= node.step
    fraction -= drawn  # in [0, f) on the drawn slot; wraps to above 2^63 before it
    lighter = fraction < node.step
    after = fraction.view(np.int64) >= np.asarray(node.step).view(np.int64)
    return stratum, lighter, after


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
        slots = np.uint64(1 << BITS) // steps
        shift = np.zeros(2 * width, np.uint64)
        while (excess := (slots >> shift) >> _S32).any():
            shift += (excess > 0).astype(np.uint64)
        self._wide = bool(shift.any())
        self._nodes = _Nodes(steps, slots >> shift, shift, derive(key, np.arange(2 * width)))
        self._levels = [
            (self._nodes.take(np.arange(1 << level, 2 << level)), self._inner[1 << level : 2 << level])
            for level in range(self.depth)
        ]
        root = self._nodes
        self._root = _Nodes(root.step[1], root.slots[1], root.shift[1], root.key[1])  # type: ignore[index]

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
        step = max(1, (min(sums) << BITS) // (sums[0] + sums[1]))
        steps[node] = step
        self._inner[node] = True
        fraction = step / (1 << BITS)
        self._build(2 * node, first, quanta, steps, 1 + fraction * bound)
        self._build(2 * node + 1, second, quanta, steps, 1 + (1 - fraction) * bound)

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
        node = None
        for nodes, inner in self._levels:
            current = self._root if node is None else nodes.take(node)
            stratum, lighter, after = _split(x, current, self._wide)
            rest = x - stratum
            rest -= after
            if not inner.all():
                passes = ~inner if node is None else ~inner[node]
                lighter &= ~passes
                rest = np.where(passes, x, rest)
            x = np.where(lighter, stratum, rest)
            heavier = (~lighter).view(np.int8)
            node = heavier.astype(np.int64) if node is None else 2 * node + heavier
        return self._leaf_source[node], x

    def counts(self, x: int) -> NDArray[np.int64]:
        """How many of the first x slots belong to each source, int64 of shape (sources,)."""
        totals = np.array([x], np.uint64)
        for nodes, inner in self._levels:
            stratum, _, after = _split(totals, nodes, self._wide)
            lighter = np.where(inner, stratum + after, np.uint64(0))
            totals = np.stack([lighter, totals - lighter], axis=1).reshape(-1)
        return totals.astype(np.int64)[self._source_leaf]

    def find(self, source: IDS, number: U64) -> U64:
        """The slot of sample `number` of each source: the inverse of `locate`."""
        node = self._source_leaf[source]
        x = number.copy()
        for nodes, inner in reversed(self._levels):
            lighter = node % 2 == 0
            node = node // 2
            active = np.flatnonzero(inner[node])
            if active.size:
                x[active] = self._slot_in_parent(x[active], nodes.take(node[active]), lighter[active])
        return x

    def _slot_in_parent(self, number: U64, node: _Nodes, lighter: NDArray[np.bool_]) -> U64:
        """The smallest x such that more than `number` of the first x + 1 samples of the node went to the child.

        A bisection around number / fraction.
        """
        light = np.asarray(node.step).astype(np.float64) / 2.0**BITS
        fraction = np.where(lighter, light, 1 - light)
        estimate = number.astype(np.float64) / fraction
        slack = 4 + 2 / fraction + estimate * 2.0**-48
        top = float(1 << BITS) - 4096
        low = np.clip(estimate - slack, 0, top).astype(np.uint64)
        high = np.clip(estimate + slack, 0, top).astype(np.uint64)
        while (low < high).any():
            middle = (low + high) >> _ONE
            stratum, _, after = _split(middle + _ONE, node, self._wide)
            stratum += after
            count = np.where(lighter, stratum, middle + _ONE - stratum)
            enough = count > number
            high = np.where(enough, middle, high)
            low = np.where(enough, low, middle + _ONE)
        return low

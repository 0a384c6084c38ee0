"""torch.randperm on the CPU, looked up without torch: a few places of a permutation, not the whole of it.

torch's generator is an MT19937, as numpy's is, seeded with the low 32 bits. Its permutation of n is Fisher and Yates':
for i = 0, 1, ..., n - 2 the items at i and at i + draw % (n - i) are exchanged. Where an item ends, or which one ends
at a place, follows from the draws alone. Training uses torch itself; a test holds both equal. Does not import torch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]

BELOW = (2**32 - 1) // 20  # from this size on torch draws 64 bits at a time, in another order
_CHUNK = 1 << 16  # draws at a time, so that the working arrays stay in cache


class TorchGenerator:
    """torch.Generator().manual_seed(seed), for permutations."""

    def __init__(self, seed: int) -> None:
        word = seed & 0xFFFFFFFF
        key = np.empty(624, np.uint32)
        for i in range(len(key)):
            key[i] = word
            word = (1812433253 * (word ^ (word >> 30)) + i + 1) & 0xFFFFFFFF
        bits = np.random.MT19937()
        bits.state = {"bit_generator": "MT19937", "state": {"key": key, "pos": len(key)}}
        self._numbers = np.random.Generator(bits)
        self._latest: TorchPermutation | None = None

    def randperm(self, n: int) -> TorchPermutation:
        """The permutation that torch.randperm(n) gives with this generator, n below `BELOW`."""
        assert n < BELOW, f"torch draws a permutation of {n} in another way"
        if self._latest is not None:
            self._latest.draw_until(self._latest.size)
        self._latest = TorchPermutation(n, self._numbers)
        return self._latest


class TorchPermutation:
    """A permutation of [0, n), drawn as far as it is looked at.

    Args:
        n: how many there are.
        numbers: what it is drawn from. Nobody else draws from it before all of this is drawn.
    """

    def __init__(self, n: int, numbers: np.random.Generator) -> None:
        self.size, self._numbers = n, numbers
        self._partners = np.empty(n, np.int32)  # with which place each place is exchanged in its turn
        self._drawn = 0

    def draw_until(self, stop: int) -> None:
        """Draw the exchanges of the places before this one, at least."""
        while self._drawn < min(stop, self.size):
            first = self._drawn
            self._drawn = min(first + _CHUNK, self.size)
            part = self._partners[first : self._drawn]
            part[:] = np.arange(first, self._drawn, dtype=np.int32)
            turns = len(part) - (self._drawn == self.size)  # torch draws nothing for the last place
            drawn = self._numbers.integers(0, 1 << 32, turns, dtype=np.uint32)
            drawn %= np.arange(self.size - first, self.size - first - turns, -1, dtype=np.uint32)
            part[:turns] += drawn.view(np.int32)

    def at(self, places: I64) -> I64:
        """The items at these places, int64 of shape (count,)."""
        self.draw_until(int(places.max(initial=-1)) + 1)
        items = self._partners[places].astype(np.int64)  # where the item was before the turn of its place
        turns = places.astype(np.int64)
        wanted = np.zeros(1 << 16, bool)  # by the low bits of places
        for first in reversed(range(0, int(turns.max(initial=0)), _CHUNK)):
            part = self._partners[first : min(first + _CHUNK, int(turns.max()))]
            low = part.astype(np.uint16)
            active = np.flatnonzero(turns > first)
            while active.size:  # each is where the last move before its turn has brought it: where was it before?
                here = items[active]
                wanted[here & 0xFFFF] = True
                moves = np.flatnonzero(wanted.take(low))
                wanted[here & 0xFFFF] = False
                brought = np.sort((part[moves].astype(np.int64) << 16) + moves)
                last = np.searchsorted(brought, (here << 16) + np.minimum(turns[active] - first, _CHUNK)) - 1
                moved = last >= 0
                moved[moved] = brought[last[moved]] >> 16 == here[moved]
                active = active[moved]
                items[active] = turns[active] = (brought[last[moved]] & 0xFFFF) + first
        return items

    def place_of(self, item: int) -> int:
        """Where this item is."""
        place, turn = item, 0
        while True:
            self.draw_until(place + 1)
            exchanged = np.flatnonzero(self._partners[turn : place + 1] == place)
            if exchanged.size:
                return turn + int(exchanged[0])
            place, turn = int(self._partners[place]), place + 1

"""Looking up many samples at once for those who ask for a few at a time.

A lookup is some hundred numpy calls, which cost as much for 16 samples as for 500. Samples are asked for one after
another, so a block of them is looked up, and given out in parts. A block begins small and grows, so that neither the
first sample of a run nor one after a change of the order waits for many others.

Does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

FIRST = 256  # samples in the first block
MOST = 8192  # samples in a block; in a larger one a sample costs no less


class LookAhead:
    """Values of consecutive samples, such as their keys. What it returns must not be written to."""

    def __init__(self) -> None:
        self._block: tuple[Any, int, NDArray[Any]] = None, 0, np.zeros(0)

    def take(
        self,
        of: tuple[Any, ...],
        first: int,
        count: int,
        look_up: Callable[[int, int], NDArray[Any]],
        left: Callable[[], int],
    ) -> NDArray[Any]:
        """The values of the samples [first, first + count).

        Args:
            of: what the values depend on besides the number of the sample, compared by identity or equality.
            first: number of the first sample.
            count: number of samples.
            look_up: returns the values of `count` samples from `first` on, given these two.
            left: returns how many samples there are from `first` on.

        Returns:
            The values, of shape (count,); a part of a larger array.
        """
        block_of, start, values = self._block  # at once: a thread may be here, too
        offset = first - start
        if of != block_of or not 0 <= offset <= len(values):
            ahead = FIRST
        elif offset + count <= len(values):
            return values[offset : offset + count]
        else:
            ahead = min(2 * len(values), MOST)
        values = look_up(first, max(count, min(ahead, left())))
        self._block = of, first, values
        return values[:count]

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]

"""Split the elastic order into micro-batches that do not depend on the number of ranks.

The global batch of a step is a range of positions, and micro-batch j is a fixed part of that range. Each rank takes
consecutive micro-batches. Some ranks may have one micro-batch more than other ranks, or none.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from exactdata.elastic import ElasticSampler, Iteration, drawn_in_blocks
from exactdata.order.arrays import I64, U64
from exactdata.order.batch_shape import BatchShape, share_of
from exactdata.order.spans import END


class MicroBatchSampler:
    """Yield the micro-batches of one rank, step after step. The state does not depend on the number of ranks.

    Between two steps, the state is the same on every rank that has micro-batches. Save the state of rank 0, which
    always has micro-batches. An incomplete last step is dropped.

    Args:
        sampler: an ElasticSampler created with one replica, so that it yields all positions.
        shape: the batch shape, with `micro_batches` set.
        rank: this rank.
    """

    def __init__(self, sampler: ElasticSampler, shape: BatchShape, rank: int) -> None:
        self.sampler = sampler
        self._step = shape.global_batch_size
        self._size = shape.batch_size
        self._share = share_of(shape.micro_batches, shape.world_size, rank)
        self._of_step = len(self._share) * self._size  # samples that this rank has in a step
        first = self._share.start * self._size
        self._offsets = np.arange(first, first + self._of_step, dtype=np.int64)

    def locate(self, position: int | I64) -> tuple[Any, Any, Any]:
        """Look up samples like `ElasticSampler.locate`. Positions do not depend on the number of ranks."""
        return self.sampler.locate(position)

    def set_epoch(self, epoch: int) -> None:
        """Do nothing, because epochs do not affect the order."""

    def __iter__(self) -> Iterator[int]:
        for indices in self.iter_batches(self._size, drop_last=True):
            yield from indices.tolist()

    def iter_batches(self, batch_size: int, drop_last: bool) -> Iterator[I64]:
        """Yield the indices of this rank's micro-batches, int64 of shape (batch_size,).

        Args:
            batch_size: samples per micro-batch, or a divisor of it.
            drop_last: has no effect, because steps are always complete.
        """
        iter(self.sampler)  # starts an iteration at the position in the state
        return drawn_in_blocks(self.sampler, Iteration(), batch_size, True, self._left_after, self.positions)

    def _left_after(self, samples: int) -> int:
        """Return `samples_left_after`, or the largest integer that can be counted if the order is endless."""
        try:
            return self.samples_left_after(samples)
        except TypeError:
            return END // self._step * self._of_step - samples

    def __len__(self) -> int:
        """Return the number of samples of this rank in a complete iteration.

        Raises:
            TypeError: the order is endless.
        """
        return len(self.sampler) // self._step * self._of_step

    def samples_left_after(self, samples: int) -> int:
        """Return how many samples are left for this rank after the first `samples` samples of the current iteration.

        Raises:
            TypeError: the order is endless.
        """
        left = self.sampler.samples_left_after(self._reached(samples))
        return left // self._step * self._of_step - samples % max(self._of_step, 1)

    def positions(self, first: int, count: int) -> I64:
        """Return the positions of this rank's samples [first, first + count) in the iteration, shape (count,)."""
        start = int(self.sampler.positions(0, 1)[0])
        step, within = divmod(first, max(self._of_step, 1))
        if within + count <= self._of_step:
            return self._offsets[within : within + count] + (start + step * self._step)
        steps, rest = np.divmod(np.arange(first, first + count, dtype=np.int64), max(self._of_step, 1))
        return np.asarray(start + steps * self._step + self._offsets[rest], dtype=np.int64)

    def sample_keys(self, first: int, count: int) -> U64:
        """Return the keys of the samples at `positions(first, count)`; see `ElasticSampler.sample_keys`."""
        return self.sampler.order.sample_keys(self.positions(first, count))

    def _reached(self, samples: int) -> int:
        """Return how many samples all ranks consume in the steps that this rank completes with `samples` samples."""
        return samples // max(self._of_step, 1) * self._step

    def state_dict(self) -> dict[str, Any]:
        """Return the state at which the next iteration begins."""
        return self.sampler.state_dict()

    def state_dict_at(self, samples: int) -> dict[str, Any]:
        """Return the state after `samples` samples of this rank in the iteration, which must be complete steps."""
        return self.sampler.state_dict_at(self._reached(samples))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state saved with any number of ranks and any batch size; see `ElasticSampler`."""
        self.sampler.load_state_dict(state)

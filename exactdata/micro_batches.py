"""The elastic order in micro-batches that do not depend on the number of ranks.

A step is a range of positions, the global batch, and micro-batch j of it a fixed part of that range. Each rank takes a
range of the micro-batches, so that it has a whole number of them, perhaps one more than another rank, or none.

Does not import torch.
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
    """A rank's micro-batches of every step, of a sampler whose state does not depend on ranks.

    Between two steps the state is the same for every rank that has micro-batches at all; that of rank 0, which always
    has some, is the one to save. An incomplete last step is left out.

    Args:
        sampler: of all positions, as for one replica.
        shape: how a step is split; with `micro_batches`.
        rank: this rank.
    """

    def __init__(self, sampler: ElasticSampler, shape: BatchShape, rank: int) -> None:
        self.sampler = sampler
        self._step = shape.global_batch_size
        self._size = shape.batch_size
        self._share = share_of(shape.micro_batches, shape.world_size, rank)
        self._of_step = len(self._share) * self._size  # samples of this rank in a step
        first = self._share.start * self._size
        self._offsets = np.arange(first, first + self._of_step, dtype=np.int64)

    def locate(self, position: int | I64) -> tuple[Any, Any, Any]:
        """See `ElasticSampler.locate`; positions do not depend on ranks."""
        return self.sampler.locate(position)

    def set_epoch(self, epoch: int) -> None:
        """Does nothing, as with the sampler itself."""

    def __iter__(self) -> Iterator[int]:
        for indices in self.iter_batches(self._size, drop_last=True):
            yield from indices.tolist()

    def iter_batches(self, batch_size: int, drop_last: bool) -> Iterator[I64]:
        """The indices of this rank's micro-batches, int64 of shape (batch_size,).

        Args:
            batch_size: that of the micro-batches, or one that divides it.
            drop_last: has no effect: a step is always complete.
        """
        iter(self.sampler)  # an iteration begins where the state says
        return drawn_in_blocks(self.sampler, Iteration(), batch_size, True, self._left_after, self.positions)

    def _left_after(self, samples: int) -> int:
        """See `samples_left_after`; of an endless order, as many as can be counted."""
        try:
            return self.samples_left_after(samples)
        except TypeError:
            return END // self._step * self._of_step - samples

    def __len__(self) -> int:
        """Samples of this rank in the whole iteration.

        Raises:
            TypeError: the order is endless.
        """
        return len(self.sampler) // self._step * self._of_step

    def samples_left_after(self, samples: int) -> int:
        """Samples that this rank still gets after `samples` samples of the current iteration.

        Raises:
            TypeError: the order is endless.
        """
        left = self.sampler.samples_left_after(self._reached(samples))
        return left // self._step * self._of_step - samples % max(self._of_step, 1)

    def positions(self, first: int, count: int) -> I64:
        """Positions in the run of this rank's samples [first, first + count) of the current iteration, (count,)."""
        start = int(self.sampler.positions(0, 1)[0])
        step, within = divmod(first, max(self._of_step, 1))
        if within + count <= self._of_step:
            return self._offsets[within : within + count] + (start + step * self._step)
        steps, rest = np.divmod(np.arange(first, first + count, dtype=np.int64), max(self._of_step, 1))
        return np.asarray(start + steps * self._step + self._offsets[rest], dtype=np.int64)

    def sample_keys(self, first: int, count: int) -> U64:
        """See `ElasticSampler.sample_keys`; of the samples that `positions` describes."""
        return self.sampler.order.sample_keys(self.positions(first, count))

    def _reached(self, samples: int) -> int:
        """Samples of all ranks in the steps that this rank has completed after `samples` samples."""
        return samples // max(self._of_step, 1) * self._step

    def state_dict(self) -> dict[str, Any]:
        """The state at which the next iteration begins."""
        return self.sampler.state_dict()

    def state_dict_at(self, samples: int) -> dict[str, Any]:
        """The state after `samples` samples of this rank in the current iteration, between two steps."""
        return self.sampler.state_dict_at(self._reached(samples))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state saved with any number of ranks and any batch size; see `ElasticSampler`."""
        self.sampler.load_state_dict(state)

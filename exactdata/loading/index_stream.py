"""Iterate over the indices of an epoch in batches, from any position.

There are three kinds of sampler:

- *by position* (has `state_dict_at`): its state can be computed for any number of samples.
- *by skip* (has `set_skip`): its state is the epoch and the number of samples to skip.
- *plain*: any other iterable. If the sampler or its iterator has a `state_dict`, that state is saved after each batch
  is drawn. Otherwise a resume iterates the sampler from its start and drops the first indices, without loading data.

If a sampler's order may change in the middle of an iteration, the iterators from its `iter_batches` (or from `__iter__`
if the loader does not batch) have the methods of `ChangingIndices`. A change then takes effect at the next batch that
the loader yields, even if more batches were prefetched.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler
from torch.utils.data import DistributedSampler as TorchDistributedSampler

from exactdata.loading.fetch import Indices, is_stateful, items, load_end
from exactdata.loading.loader_state import size_of
from exactdata.loading.protocols import LoaderStateError

_NONE = object()


@runtime_checkable
class ChangingIndices(Protocol):
    """An iterator over indices, some of which may be replaced after they are drawn.

    Attributes:
        version: a number that grows with every change.
    """

    @property
    def version(self) -> int: ...

    def follow(self, yielded: Callable[[], int]) -> None:
        """Apply changes after the samples that the loader has yielded, not after those drawn. `yielded` counts them."""
        ...

    def seek(self, samples: int) -> None:
        """Continue after the first `samples` samples of the iteration."""
        ...


class IndexStream:
    """Batches of indices from one sampler, for any number of epochs.

    Args:
        sampler: yields indices, or batches of indices if `is_batch_sampler`.
        batch_size: indices per batch. If None, the sampler's items are passed on unchanged.
        drop_last: whether to drop an incomplete last batch.
        is_batch_sampler: whether the sampler yields batches of indices.
        sets_epoch: whether to call `set_epoch` on a plain sampler (see the module docstring). Otherwise the user calls
            it.
    """

    def __init__(
        self, sampler: Iterable[Any], batch_size: int | None, drop_last: bool, is_batch_sampler: bool, sets_epoch: bool
    ) -> None:
        self.sampler: Any = sampler
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.is_batch_sampler = is_batch_sampler
        self.by_position = hasattr(sampler, "state_dict_at") and not is_batch_sampler
        self.by_skip = hasattr(sampler, "set_skip") and not is_batch_sampler and not self.by_position
        self.seeds_itself = self.by_position or self.by_skip
        self.sets_epoch = sets_epoch
        self._inner: Any = None
        self._base: dict[str, Any] | None = None  # state to return until the first batch is drawn
        self._ended = False  # whether the epoch's last batch was drawn
        self._exhausted = False  # whether an epoch has ended at least once
        self._has_skipped = False

    @property
    def one_by_one(self) -> bool:
        """Return whether an item is a single index rather than a batch."""
        return self.batch_size is None and not self.is_batch_sampler

    @property
    def is_stateful(self) -> bool:
        """Return whether the sampler's state must be saved after each batch."""
        return not self.seeds_itself and (is_stateful(self.sampler) or is_stateful(self._inner))

    def epoch_size(self) -> int | None:
        """Return the samples (or batches, for a batch sampler) per epoch, or None if unknown or not constant."""
        sampler = self.sampler.sampler if type(self.sampler) is BatchSampler else self.sampler
        is_torchs = type(sampler) in (SequentialSampler, RandomSampler, TorchDistributedSampler)
        is_same = is_torchs or (hasattr(sampler, "set_skip") and not hasattr(sampler, "state_dict_at"))
        return size_of(self.sampler) if is_same else None

    @property
    def ends_for_good(self) -> bool:
        """Return whether no epoch can follow the end of the sampler, because its order includes all epochs."""
        return self.counts_what_is_left and not self.has_passes

    @property
    def counts_what_is_left(self) -> bool:
        """Return whether the sampler knows how many samples are left in its iteration."""
        return self.by_position and hasattr(self.sampler, "samples_left_after")

    @property
    def has_passes(self) -> bool:
        """Return whether each epoch is one pass, i.e. a part of an order that includes all epochs."""
        return self.by_position and getattr(self.sampler, "epoch_samples", None) is not None

    @property
    def awaits_epoch(self) -> bool:
        """Return whether the length may change when the user calls `set_epoch`."""
        return self.is_batch_sampler and hasattr(self.sampler, "set_epoch")

    def batches_left(self, batches: int, samples: int, base: int) -> int | None:
        """Return the number of batches left in an epoch after `batches` batches, or None if the sampler has no length.

        Args:
            batches: number of batches yielded.
            samples: number of samples yielded.
            base: how many of these samples precede this iteration. It is needed for `samples_left_after`, which is used
                if the sampler has it, because the length of a sampler by position may include earlier epochs.
        """
        size = size_of(self.sampler)
        if size is None or self.is_batch_sampler:
            return None if size is None else max(size - batches, 0)
        left = self.sampler.samples_left_after(samples - base) if self.counts_what_is_left else size - samples
        per_batch = self.batch_size or 1
        return max(left // per_batch if self.drop_last else -(-left // per_batch), 0)

    def open(self, epoch: int, skip: int, saved: dict[str, Any] | None) -> Iterator[Indices]:
        """Iterate over the batches of indices of `epoch`, after `skip` samples (batches, for a batch sampler).

        A sampler by position must already have loaded its state.

        Args:
            epoch: number of the epoch, from 0.
            skip: number of samples or batches to skip.
            saved: the sampler's own state, if it has one, used instead of `skip`.

        Raises:
            LoaderStateError: the sampler must be iterated to skip, and its epoch is shorter than `skip`.
        """
        is_set = self.seeds_itself or (self.sets_epoch and hasattr(self.sampler, "set_epoch"))
        if is_set and not self.has_passes:  # the position selects the pass
            self.sampler.set_epoch(epoch)
        if self.by_skip and (skip or self._has_skipped):
            self._has_skipped = True  # from now on the loader sets the skip, not the user
            self.sampler.set_skip(skip)
        if self.seeds_itself and self.batch_size is not None and hasattr(self.sampler, "iter_batches"):
            self._inner = None
            return iter(self.sampler.iter_batches(self.batch_size, self.drop_last))
        if self.seeds_itself:
            indices = iter(self.sampler)
            return indices if self.batch_size is None else self._batched(indices)
        return self._batched(self._open_plain(skip, saved))

    def _open_plain(self, skip: int, saved: dict[str, Any] | None) -> Iterator[Any]:
        self._base, self._ended = None, False
        if saved is not None:
            return self._resume_plain(saved)
        before = self._between_epochs() if is_stateful(self.sampler) else None
        self._inner = iter(self.sampler)
        if not is_stateful(self._inner):
            self._base = before
        indices = items(self._inner)
        if skip and next(islice(indices, skip - 1, None), _NONE) is _NONE:
            raise LoaderStateError(
                f"this state is {skip} items into an epoch of {type(self.sampler).__name__}, which has fewer: it was "
                "edited or belongs to another data order; use another checkpoint"
            )
        return indices

    def _resume_plain(self, saved: dict[str, Any]) -> Iterator[Any]:
        if saved["boundary"] or saved["ended"]:
            load_end(self.sampler, {"dataset": saved["sampler"], "ended": saved["ended"]})
            self._ended = not saved["boundary"]
            self._inner = iter(()) if self._ended else iter(self.sampler)
        else:
            if saved["sampler"] is not None:
                self.sampler.load_state_dict(saved["sampler"])
            self._inner = iter(self.sampler)
            if saved["iterator"] is not None:
                if not is_stateful(self._inner):
                    raise LoaderStateError(
                        f"this state has one of the sampler's iterator, which {type(self.sampler).__name__} cannot "
                        "load: pass the sampler that it was saved with"
                    )
                self._inner.load_state_dict(saved["iterator"])
        self._base = saved
        return items(self._inner)

    def _batched(self, indices: Iterator[Any]) -> Iterator[Indices]:
        size = self.batch_size
        if size is None:
            for index in indices:
                self._base = None
                yield index
        else:
            while batch := list(islice(indices, size)):
                self._ended = len(batch) < size
                if self._ended and self.drop_last:
                    break
                self._base = None
                yield batch
        self._ended = self._exhausted = True

    def state(self) -> dict[str, Any] | None:
        """Return the sampler's own state after the last batch drawn, or None if a sample count determines it."""
        if self._base is not None:
            return self._base
        if not self.is_stateful:
            return None
        return {
            "sampler": copy.deepcopy(self.sampler.state_dict()) if is_stateful(self.sampler) else None,
            "iterator": copy.deepcopy(self._inner.state_dict()) if is_stateful(self._inner) else None,
            "boundary": False,
            "ended": self._ended,
        }

    def boundary_state(self) -> dict[str, Any] | None:
        """Return the sampler's own state between two epochs."""
        return self._between_epochs() if not self.seeds_itself and is_stateful(self.sampler) else None

    def _between_epochs(self) -> dict[str, Any]:
        state = copy.deepcopy(self.sampler.state_dict())
        return {"sampler": state, "iterator": None, "boundary": True, "ended": self._exhausted}


def as_array(indices: Indices) -> np.ndarray | None:
    """Return the indices as an int64 array of shape (samples,), or None if they are not integers."""
    if type(indices) is np.ndarray and indices.dtype == np.int64 and indices.ndim == 1:
        return indices
    try:
        array = np.asarray(indices)
    except ValueError:
        return None
    return np.atleast_1d(array).astype(np.int64, copy=False) if array.dtype.kind in "iu" else None

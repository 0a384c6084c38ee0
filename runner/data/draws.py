"""Which indices come next, and how to come back to a place among them.

Three kinds of sampler:

- *by position* (`state_dict_at`): its state at any sample is a function of the number of samples.
- *by skip* (`set_skip`): the epoch and the number of samples to skip are all there is to know.
- *plain*: any other iterable. Where it or its iterator has a `state_dict`, that is saved after a batch was
  drawn; where it has none, it is iterated again and its first indices are dropped, without loading data.
  torch's SequentialSampler and RandomSampler go to a place at once: see `sequential` and `shuffled`.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice, repeat
from typing import Any

import numpy as np
import torch
from torch.utils.data import RandomSampler, SequentialSampler

from runner.data.fetch import Indices, is_stateful, items, restart
from runner.data.sampler import integers, permutation
from runner.data.seeds import draw_seed


class Draws:
    """Draws batches of indices from one sampler, epoch after epoch.

    Args:
        sampler: yields indices, or batches of them where `batch_size` is None and `batches` is true.
        batch_size: indices a batch; None: what the sampler yields is handed on as it is.
    """

    def __init__(self, sampler: Iterable[Any], batch_size: int | None, drop_last: bool, batches: bool) -> None:
        self.sampler: Any = sampler
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.batches = batches
        self.by_position = hasattr(sampler, "state_dict_at") and not batches
        self.by_skip = hasattr(sampler, "set_skip") and not batches and not self.by_position
        self.seeds_itself = self.by_position or self.by_skip
        self.by_epoch = False  # set where the loader, not its user, numbers the epochs of a plain sampler
        self._inner: Any = None
        self._base: dict[str, Any] | None = None  # the state until something is drawn
        self._exhausted = False
        self._skips = False

    @property
    def is_stateful(self) -> bool:
        """Whether a state of the sampler's own has to be saved after a draw."""
        return not self.seeds_itself and (is_stateful(self.sampler) or is_stateful(self._inner))

    def open(self, epoch: int, skip: int, saved: dict[str, Any] | None) -> Iterator[Indices]:
        """Batches of indices of `epoch`, from the `skip`-th sample (or batch, for a batch sampler) on.

        A sampler by position must have been given its state before; `saved` is a plain sampler's.
        """
        if self.seeds_itself or (self.by_epoch and hasattr(self.sampler, "set_epoch")):
            self.sampler.set_epoch(epoch)
        if self.by_skip and (skip or self._skips):
            self._skips = True  # from now on any skip that is still pending is ours to replace
            self.sampler.set_skip(skip)
        if self.seeds_itself and self.batch_size is not None and hasattr(self.sampler, "iter_batches"):
            self._inner = None
            return iter(self.sampler.iter_batches(self.batch_size, self.drop_last))
        if self.seeds_itself:
            return self._batched(iter(self.sampler))
        return self._batched(self._open_plain(skip, saved))

    def _open_plain(self, skip: int, saved: dict[str, Any] | None) -> Iterator[Any]:
        self._base = None
        if saved is not None:
            return self._resume_plain(saved)
        before = self._between_epochs() if is_stateful(self.sampler) else None
        if (at_once := _AT_ONCE.get(type(self.sampler))) is not None:
            self._inner = at_once(self.sampler, skip)
            return self._inner  # type: ignore[no-any-return]
        self._inner = iter(self.sampler)
        if not is_stateful(self._inner):
            self._base = before
        drop(items(self._inner), skip)
        return items(self._inner)

    def _resume_plain(self, saved: dict[str, Any]) -> Iterator[Any]:
        if saved["boundary"]:
            self._inner = restart(self.sampler, {"dataset": saved["sampler"], "ended": saved["ended"]})
        else:
            if saved["sampler"] is not None:
                self.sampler.load_state_dict(saved["sampler"])
            self._inner = iter(self.sampler)
            if saved["iterator"] is not None:
                self._inner.load_state_dict(saved["iterator"])
        drop(items(self._inner), saved["skip"])
        self._base = saved
        return items(self._inner)

    def _batched(self, indices: Iterator[Any]) -> Iterator[Indices]:
        size = self.batch_size
        if size is None:
            for index in indices:
                self._base = None
                yield index
        else:
            while chunk := list(islice(indices, size)):
                if len(chunk) < size and self.drop_last:
                    break
                self._base = None
                yield chunk
        self._exhausted = True

    def state(self) -> dict[str, Any] | None:
        """A plain sampler's state after the last draw; None if nothing can be saved but the count."""
        if self._base is not None:
            return self._base
        if not self.is_stateful:
            return None
        return {
            "sampler": copy.deepcopy(self.sampler.state_dict()) if is_stateful(self.sampler) else None,
            "iterator": copy.deepcopy(self._inner.state_dict()) if is_stateful(self._inner) else None,
            "skip": 0,
            "boundary": False,
            "ended": False,
        }

    def boundary_state(self) -> dict[str, Any] | None:
        """A plain sampler's state between two epochs."""
        return self._between_epochs() if not self.seeds_itself and is_stateful(self.sampler) else None

    def _between_epochs(self) -> dict[str, Any]:
        state = copy.deepcopy(self.sampler.state_dict())
        return {"sampler": state, "iterator": None, "skip": 0, "boundary": True, "ended": self._exhausted}

    def count(self, indices: Indices) -> int:
        """How far a draw moves `skip` on: in samples, or in batches of a batch sampler."""
        return 1 if self.batch_size is None else len(indices)


def sequential(sampler: SequentialSampler, skip: int) -> Iterator[int]:
    """`islice(sampler, skip, None)`."""
    return iter(range(len(sampler))[skip:])


def shuffled(sampler: RandomSampler, skip: int) -> Iterator[int]:
    """`islice(sampler, skip, None)`, with the same draws from the same generators.

    torch makes a list of the whole permutation, which has to be walked to come to a place; an array is cut.
    """
    if sampler.replacement:
        yield from islice(sampler, skip, None)
        return
    size, generator = len(sampler.data_source), sampler.generator
    if generator is None:
        generator = torch.Generator().manual_seed(draw_seed(torch.default_generator))
    for taken in chain(repeat(size, sampler.num_samples // size), [sampler.num_samples % size]):
        yield from integers(permutation(size, generator)[skip:taken])
        skip = max(skip - taken, 0)


# Of these types themselves: a subclass may have an order of its own.
_AT_ONCE: dict[type, Callable[[Any, int], Iterator[int]]] = {SequentialSampler: sequential, RandomSampler: shuffled}


def drop(iterator: Iterator[Any], count: int) -> None:
    """Move `iterator` on by `count` items, at the speed of C."""
    deque(islice(iterator, count), maxlen=0)


def as_array(indices: Indices) -> np.ndarray | None:
    """The indices as an array of int64, or None where they are no integers."""
    try:
        array = np.asarray(indices)
    except ValueError:
        return None
    return np.atleast_1d(array).astype(np.int64, copy=False) if array.dtype.kind in "iu" else None

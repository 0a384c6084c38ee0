"""Turning indices into a batch, and an iterator into batches, in any process or thread.

A map-style dataset may offer, from slowest to fastest: `__getitem__(index)`; `__getitems__(indices)`, which returns
a list of samples; and `__getitems__` with the attribute `collated = True`, which returns a finished batch of numpy
arrays or tensors, passed on without a copy.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from types import GeneratorType
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from runner.data.loading.randomness import Keys, current

Indices = Any  # a list of ints, an array of int64, or whatever a batch sampler yields


def items(iterator: Iterator[Any]) -> Iterator[Any]:
    """The remaining items, without calling `iterator.__iter__`, which restarts some iterators."""
    return iterator if isinstance(iterator, GeneratorType) else iter(partial(next, iterator, _END), _END)


_END = object()


def is_stateful(thing: object) -> bool:
    """Whether `thing` can save and restore its state; a dataset of datasets may deny it by `has_state = False`."""
    methods = getattr(thing, "state_dict", None), getattr(thing, "load_state_dict", None)
    return all(map(callable, methods)) and bool(getattr(thing, "has_state", True))


def is_iterator(thing: object) -> bool:
    """Whether `thing` is its own iterator."""
    return callable(getattr(thing, "__next__", None))


def is_collated(dataset: object) -> bool:
    """Whether the dataset's `__getitems__` returns a finished batch."""
    return bool(getattr(dataset, "collated", False)) and callable(getattr(dataset, "__getitems__", None))


def to_tensors(batch: Any) -> Any:
    """The batch with its numpy arrays replaced by tensors that share their memory."""
    if type(batch) is dict:
        for value in batch.values():
            if type(value) is not torch.Tensor:
                break
        else:
            return batch
    if isinstance(batch, np.ndarray):
        return torch.from_numpy(batch)
    if isinstance(batch, Mapping):
        return {key: to_tensors(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and not hasattr(batch, "_fields"):
        return tuple(to_tensors(value) for value in batch)
    return batch


class MapFetcher:
    """Batches of a map-style dataset: fetch, then collate.

    Args:
        collate_fn: as in torch's DataLoader.
        batched: the sampler's items are batches of indices (torch's automatic batching).
        own_collate: `collate_fn` is the user's; it is then also applied to the batches of a collated dataset.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[Any], Any], batched: bool, own_collate: bool) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn
        self.batched = batched
        self.collated = batched and is_collated(dataset)
        self._has_getitems = batched and callable(getattr(dataset, "__getitems__", None))
        self._direct = self.collated and not own_collate

    def fetch(self, indices: Indices, keys: Keys | Callable[[], Keys]) -> Any:
        """The batch of these indices.

        Args:
            keys: one key per sample for `sample_rng`, or a function that returns them.

        Raises:
            Exception: whatever the dataset raises; the sample, its source and the process are added to the message.
        """
        current.keys, current.at = keys, 0
        try:
            return self._getitems(indices) if self._direct else self._fetch_and_collate(indices)
        finally:
            current.keys = None

    def _fetch_and_collate(self, indices: Indices) -> Any:
        if isinstance(indices, np.ndarray) and not self.collated:
            indices = indices.tolist()
        if not self.batched:
            return self.collate_fn(self._getitem(indices))
        if self._has_getitems:
            return self.collate_fn(self._getitems(indices))
        samples: list[Any] = []
        keep, dataset = samples.append, self.dataset
        index: Any = None
        try:
            for index in indices:
                keep(dataset[index])
                current.at += 1
        except Exception as error:
            explain(error, dataset, [index], indices)
            raise
        return self.collate_fn(samples)

    def _getitem(self, index: Any) -> Any:
        try:
            return self.dataset[index]
        except Exception as error:
            explain(error, self.dataset, [index], index)
            raise

    def _getitems(self, indices: Indices) -> Any:
        try:
            if self.collated:
                wanted = indices if type(indices) is np.ndarray else np.asarray(indices)
                return to_tensors(self.dataset.__getitems__(wanted))
            return self.dataset.__getitems__(indices)
        except Exception as error:
            explain(error, self.dataset, indices, indices)
            raise


class StreamFetcher:
    """Batches of an iterable-style dataset, and the state after each of them.

    A state is a dict of `dataset` and `iterator` (the state of each, or None), `samples` (how many to skip after
    restoring them), `ended`, and `boundary` (it was taken between two epochs).
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[Any], Any], batch_size: int | None, drop_last: bool) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.iterator: Any = None
        self.samples = 0  # yielded in this epoch: the state, if the dataset has none of its own
        self.ended = False
        self.exhausted = False  # the dataset has ended at least once in this process
        self._base: dict[str, Any] | None = None  # the state until the first batch is fetched

    def start(self, saved: dict[str, Any] | None = None) -> None:
        """Begin an epoch, or resume from a saved state.

        Raises:
            ValueError: the dataset ends before the samples to skip do.
        """
        self._base, self.samples, self.ended = None, 0, False
        if saved is None:
            before = self.dataset.state_dict() if is_stateful(self.dataset) and not is_iterator(self.dataset) else None
            self.iterator = iter(self.dataset)
            if before is not None and not is_stateful(self.iterator):
                self._base = self._boundary(before, self.exhausted)
            return
        if saved["boundary"] or saved["ended"]:
            self.iterator = restart(self.dataset, saved)
            self.ended = saved["ended"] and not saved["boundary"]
        else:
            if saved["dataset"] is not None:
                self.dataset.load_state_dict(saved["dataset"])
            self.iterator = iter(self.dataset)
            if saved["iterator"] is not None:
                self.iterator.load_state_dict(saved["iterator"])
        self._skip(saved)

    def _skip(self, saved: dict[str, Any]) -> None:
        skip = 0 if self.ended else saved["samples"]
        skipped = sum(1 for _ in islice(items(self.iterator), skip))
        if skipped < skip:
            raise ValueError(
                f"the dataset {type(self.dataset).__name__} ended after {skipped} of the {skip} samples to skip: it is "
                "shorter than when the state was saved; use the same data, or start it from the beginning"
            )
        if not self.is_stateful:
            self.samples = saved["samples"]
        elif not skip:
            self._base = dict(saved)  # until a sample is taken, since a generator has not started to run yet

    @property
    def is_stateful(self) -> bool:
        return is_stateful(self.iterator) or is_stateful(self.dataset)

    @staticmethod
    def _boundary(dataset_state: Any, exhausted: bool) -> dict[str, Any]:
        return {"dataset": dataset_state, "iterator": None, "samples": 0, "ended": exhausted, "boundary": True}

    def fetch(self) -> tuple[Any, int]:
        """The next batch, and the number of samples in it.

        Raises:
            StopIteration: the dataset has ended.
            Exception: whatever the dataset raises; the index of the sample and the process are added to the message.
        """
        if self.ended:
            raise StopIteration
        try:
            samples: list[Any] = []
            if self.batch_size is None:
                samples.append(next(self.iterator))
            else:
                keep, take = samples.append, self.iterator.__next__
                for _ in range(self.batch_size):
                    keep(take())
        except StopIteration:
            self.ended = self.exhausted = True
            if not samples or self.drop_last:
                raise
        except Exception as error:
            annotate(error, f"sample {len(samples)} of the next batch of {type(self.dataset).__name__}")
            raise
        self._base = None
        self.samples += len(samples)
        return self.collate_fn(samples[0] if self.batch_size is None else samples), len(samples)

    def state(self) -> dict[str, Any]:
        """The state after the last batch that `fetch` returned."""
        if self._base is not None:
            return self._base
        same = self.iterator is self.dataset
        inner = self.iterator.state_dict() if is_stateful(self.iterator) else None
        outer = self.dataset.state_dict() if is_stateful(self.dataset) and not (same and inner is not None) else None
        known = inner is not None or outer is not None
        samples = 0 if known else self.samples
        return {"dataset": outer, "iterator": inner, "samples": samples, "ended": self.ended, "boundary": False}

    def boundary_state(self) -> dict[str, Any]:
        """The state between the epoch that has ended and the next one."""
        return self._boundary(self.dataset.state_dict() if is_stateful(self.dataset) else None, True)


def restart(thing: Any, saved: dict[str, Any]) -> Any:
    """An iterator over `thing` for a new epoch, from the state it had between two epochs.

    Some datasets keep the end of the epoch as their position, so that the next iteration is empty; others have
    already gone back to the start. Fetching one item tells them apart.
    """
    if saved["dataset"] is None:
        return iter(thing)
    thing.load_state_dict(saved["dataset"])
    iterator = iter(thing)
    if not saved["ended"] or iterator is thing:
        return iterator
    if next(iterator, _END) is not _END:
        thing.load_state_dict(saved["dataset"])
    return iter(thing)


def explain(error: Exception, dataset: Any, failed: Indices, indices: Indices) -> None:
    """Add to `error` which sample of which source failed, and in which process."""
    try:
        names = ", ".join(locate(dataset, index) for index in list(failed)[:8])
        rest = f" and {len(failed) - 8} more" if len(failed) > 8 else ""
        where = f"{'one of the samples' if len(failed) > 1 else 'sample'} {names}{rest}"
    except (TypeError, ValueError, IndexError, KeyError):  # an index of a type of the user's
        where = f"sample {indices!r} of {type(dataset).__name__}"
    annotate(error, where)


def locate(dataset: Any, index: Any) -> str:
    """The sample as text, for example `17 of source 'code' (index 1017)`."""
    sizes = getattr(dataset, "cumulative_sizes", None)
    if sizes is None or not isinstance(index, (int, np.integer)):
        return f"{index} of {type(dataset).__name__}"
    starts = list(sizes) if sizes[0] == 0 else [0, *sizes]
    source = bisect_right(starts, index) - 1
    names: Sequence[Any] = getattr(dataset, "names", range(len(starts)))
    return f"{index - starts[source]} of source {names[source]!r} (index {index})"


def annotate(error: Exception, where: str) -> None:
    """Add the sample and the process to `error`: to its message if that is plain text, otherwise as a note."""
    info = get_worker_info()
    process = "in the main process" if info is None else f"in worker {info.id} (pid {os.getpid()})"
    text = f"[while loading {where} {process}]"
    args = error.args
    if len(args) == 1 and isinstance(args[0], str) and type(error).__str__ is BaseException.__str__:
        error.args = (f"{args[0]} {text}",)
    else:
        error.add_note(text)

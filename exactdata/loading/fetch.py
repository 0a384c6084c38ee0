"""Fetch the batch for given indices, in any process or thread. For iterable datasets, see `stream_fetch`.

A map-style dataset can be read in three ways, from slowest to fastest. `__getitem__(index)` returns a sample.
`__getitems__(indices)` returns a list of samples. If the dataset has the attribute `collated = True`, `__getitems__`
returns a finished batch of numpy arrays or tensors, which is passed on without a copy.
"""

from __future__ import annotations

import copy
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import GeneratorType
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset, get_worker_info

from exactdata import generators
from exactdata.loading import global_draws
from exactdata.loading.collation import CollationError, disagreement
from exactdata.loading.randomness import Keys, current

Indices = Any  # a list of ints, an int64 array, or anything a batch sampler yields
_OF_COLLATE = 0x9E3779B97F4A7C15  # gives the collate function a different seed than the first sample of its batch


def items(iterator: Iterator[Any]) -> Iterator[Any]:
    """Iterate over the remaining items. Does not call `iterator.__iter__`, which restarts some iterators."""
    return iterator if isinstance(iterator, GeneratorType) else iter(partial(next, iterator, _END), _END)


_END = object()


def is_stateful(thing: object) -> bool:
    """Return whether `thing` has state methods. A wrapping dataset can set `has_state = False` if it has no state."""
    methods = getattr(thing, "state_dict", None), getattr(thing, "load_state_dict", None)
    return all(map(callable, methods)) and bool(getattr(thing, "has_state", True))


def is_iterator(thing: object) -> bool:
    """Return whether `thing` is its own iterator."""
    return callable(getattr(thing, "__next__", None))


def is_collated(dataset: object) -> bool:
    """Return whether the dataset's `__getitems__` returns a finished batch."""
    return bool(getattr(dataset, "collated", False)) and callable(getattr(dataset, "__getitems__", None))


def has_getitems(dataset: Any) -> bool:
    """Return whether the dataset, or the dataset inside a torch Subset, has `__getitems__`. Subset's may only loop."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


def to_tensors(batch: Any) -> Any:
    """Return the batch with numpy arrays replaced with tensors that share their memory."""
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
    """Fetch and collate batches of a map-style dataset.

    Args:
        dataset: the map-style dataset.
        collate_fn: as in torch's DataLoader.
        batched: whether the sampler yields batches of indices (torch's automatic batching).
        own_collate: whether the user passed `collate_fn`. It is then applied even to the batches of a collated dataset.
        seeded: whether to make draws from the global generators depend only on the sample, where possible; see
            `global_draws`.

    Attributes:
        watches: whether to check the next batch for draws that depend on more than its samples.
        draws: names of the generators used for such draws, once they are detected.
        consequence: description of the effect of such draws, for the user.
    """

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[Any], Any],
        batched: bool,
        own_collate: bool,
        seeded: bool = False,
    ) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn
        self.batched = batched
        self.collated = batched and is_collated(dataset)
        self._direct = self.collated and not own_collate
        self._own_collate = own_collate
        self._marks = batched and bool(getattr(dataset, "marks_batches", False))
        self._seeds_samples = seeded and not global_draws.draws_nothing(dataset)
        self._seeds_collate = seeded and own_collate and not global_draws.draws_nothing(collate_fn)
        self._samples: Callable[[Any], Any] = self._single
        if batched:
            self._samples = self._at_once if has_getitems(dataset) else self._one_by_one
        self.watches = seeded and (not self._seeds_samples or self._samples == self._at_once)
        # A list can be fetched again, sample by sample, if a draw is detected. A stateful dataset would have advanced.
        if self._samples == self._at_once and self._seeds_samples and not (self.collated or is_stateful(dataset)):
            self._samples, self.watches = self._as_list, False
        self.draws = ""
        self.consequence = global_draws.OF_A_BATCH if self._seeds_samples else global_draws.UNANNOUNCED

    def fetch(self, indices: Indices, keys: Keys | Callable[[], Keys]) -> Any:
        """Return the batch for the given indices.

        Args:
            indices: the indices of the batch.
            keys: one key per sample for `sample_rng`, or a function that returns them.

        Raises:
            Exception: any error from the dataset. The sample, its source and the process are added to the message.
            RuntimeError: the dataset raised StopIteration, which would look like the end of the epoch.
        """
        current.keys, current.at = keys, 0
        outside = generators.states() if self._seeds_samples or self._seeds_collate else None
        try:
            return self._fetch_and_collate(indices)
        finally:
            current.keys = None
            if outside is not None:
                generators.put_back(outside)

    def _fetch_and_collate(self, indices: Indices) -> Any:
        if isinstance(indices, np.ndarray) and not self.collated:
            indices = indices.tolist()
        if self.watches:
            self.watches = False
            samples, self.draws = global_draws.watched(partial(self._samples, indices))
        else:
            samples = self._samples(indices)
        if self._direct:
            return samples
        if self._seeds_collate:
            generators.seed(self._keys()[0] ^ _OF_COLLATE)
        return self._collate(samples, indices)

    def _collate(self, samples: Any, indices: Indices) -> Any:
        """Collate samples into a batch. For a mixture, add the source of each sample."""
        listed = indices if self.batched else [indices]
        try:
            batch = collate(self.collate_fn, samples)
        except Exception as error:
            if self.batched and not self._own_collate and isinstance(samples, (list, tuple)):
                names = [named_sample(self.dataset, index) for index in listed]
                if line := disagreement(samples, names):
                    raise CollationError(line) from error
            explain(error, self.dataset, listed, indices, "collating")
            raise
        return self.dataset.mark(batch, indices) if self._marks else batch

    def _keys(self) -> list[int]:
        """Return the keys of the batch's samples."""
        if callable(current.keys):
            current.keys = current.keys()
        return current.keys.tolist()  # type: ignore[union-attr, no-any-return]

    def _single(self, index: Any) -> Any:
        return self._each([index], index, self.dataset.__getitem__)[0]

    def _one_by_one(self, indices: Indices) -> list[Any]:
        return self._each(indices, indices, self.dataset.__getitem__)

    def _each(self, wanted: Iterable[Any], indices: Indices, get: Callable[[Any], Any]) -> list[Any]:
        """Call `get` for each item in `wanted`, seeded per sample. Errors describe the complete batch, `indices`."""
        keys = self._keys() if self._seeds_samples else None
        samples: list[Any] = []
        keep, index = samples.append, None
        try:
            for index in wanted:
                if keys is not None:
                    generators.seed(keys[current.at])
                keep(get(index))
                current.at += 1
        except Exception as error:
            explain(error, self.dataset, [index], indices)
            raise
        return samples

    def _at_once(self, indices: Indices) -> Any:
        """Call `__getitems__` once. Its random draws depend on the first sample and on the number of samples."""
        if self._seeds_samples and len(indices):
            generators.seed(self._keys()[0])
        return self._getitems(indices)

    def _as_list(self, indices: Indices) -> Any:
        """Call `__getitems__` for the complete batch. Once it has used a global generator, call it sample by sample."""
        outside = generators.states()
        samples = self._getitems(indices)
        draws = generators.drawn_from(outside)
        if not draws:
            return samples
        if isinstance(samples, (list, tuple)) and len(samples) == len(indices):
            self._samples = self._list_one_by_one
        else:  # returned a finished batch, although the dataset has no `collated` attribute
            self._samples, self.draws = self._at_once, draws
        return self._samples(indices)

    def _list_one_by_one(self, indices: Indices) -> list[Any]:
        return self._each(indices, indices, self._list_of_one)

    def _list_of_one(self, index: Any) -> Any:
        keys, at = current.keys, current.at
        current.keys, current.at = keys[at : at + 1], 0  # type: ignore[index]
        try:
            return self.dataset.__getitems__([index])[0]
        finally:
            current.keys, current.at = keys, at

    def _getitems(self, indices: Indices) -> Any:
        try:
            if self.collated:
                wanted = indices if type(indices) is np.ndarray else np.asarray(indices)
                return to_tensors(self.dataset.__getitems__(wanted))
            return self.dataset.__getitems__(indices)
        except Exception as error:
            explain(error, self.dataset, indices, indices)
            raise


def load_state(thing: Any, state: Any) -> None:
    """Load a copy of `state`, because `thing` may keep the object and modify it."""
    thing.load_state_dict(copy.deepcopy(state))


def load_end(thing: Any, saved: dict[str, Any], as_it_was: AbstractContextManager[Any] | None = None) -> None:
    """Load the state that `thing` had after an epoch, so that the next `iter()` begins a new epoch.

    After an epoch, some datasets stay at the end, so that the next iteration is empty, while others have already
    returned to the start. Fetching one item distinguishes the two. A dataset with `begins_anew = True` is known to
    return to the start. It is not tested, because its shard may have no items.

    Args:
        thing: the dataset or sampler.
        saved: a dict with the state as `dataset`, and whether the epoch had `ended`.
        as_it_was: context manager in which the one item is fetched.
    """
    if saved["dataset"] is None:
        return
    load_state(thing, saved["dataset"])
    if saved["ended"] and not getattr(thing, "begins_anew", False):
        with as_it_was or nullcontext():
            iterator = iter(thing)
            was_at_start = iterator is not thing and next(iterator, _END) is not _END
        if was_at_start:
            load_state(thing, saved["dataset"])


def collate(collate_fn: Callable[[Any], Any], samples: Any) -> Any:
    """Return `collate_fn(samples)`.

    Raises:
        RuntimeError: `collate_fn` raised StopIteration.
    """
    try:
        return collate_fn(samples)
    except StopIteration as error:
        raise stopped(f"the collate_fn {getattr(collate_fn, '__qualname__', collate_fn)!s}") from error


def stopped(who: str) -> RuntimeError:
    """Return the error that replaces a StopIteration (as in PEP 479), which would look like the end of the epoch."""
    return RuntimeError(f"{who} raised StopIteration, which only the end of an iterator may: raise another error")


def explain(error: Exception, dataset: Any, failed: Indices, indices: Indices, doing: str = "loading") -> None:
    """Add the failed sample, its source and the process to the message of `error`.

    Raises:
        RuntimeError: `error` is a StopIteration.
    """
    try:
        names = ", ".join(named_sample(dataset, index) for index in list(failed)[:8])
        several = "one of the samples" if doing == "loading" else "the samples"
        rest = f" and {len(failed) - 8} more" if len(failed) > 8 else ""
        where = f"{several if len(failed) > 1 else 'sample'} {names}{rest}"
    except (TypeError, ValueError, IndexError, KeyError):  # the index has a user-defined type
        where = f"sample {indices!r} of {type(dataset).__name__}"
    if isinstance(error, StopIteration):
        raised = stopped(type(dataset).__name__)
        annotate(raised, where, doing)
        raise raised from error
    annotate(error, where, doing)


def named_sample(dataset: Any, index: Any) -> str:
    """Return the name of a sample for messages, e.g. `17 of source 'code' (index 1017)`."""
    sizes = getattr(dataset, "cumulative_sizes", None)
    if sizes is None or not isinstance(index, (int, np.integer)):
        return f"{index} of {type(dataset).__name__}"
    starts = list(sizes) if sizes[0] == 0 else [0, *sizes]
    source = bisect_right(starts, index) - 1
    names: Sequence[Any] = getattr(dataset, "names", range(len(starts)))
    return f"{index - starts[source]} of source {names[source]!r} (index {index})"


def annotate(error: Exception, where: str, doing: str = "loading") -> None:
    """Add the sample and the process to `error`, in its message if that is a plain string, otherwise as a note."""
    info = get_worker_info()
    process = "in the main process" if info is None else f"in worker {info.id} (pid {os.getpid()})"
    text = f"[while {doing} {where} {process}]"
    args = error.args
    if len(args) == 1 and isinstance(args[0], str) and type(error).__str__ is BaseException.__str__:
        error.args = (f"{args[0]} {text}",)
    else:
        error.add_note(text)

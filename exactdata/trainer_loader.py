"""Provide TrainerLoader, an exact and elastic loader for a trainer that you already use.

It is not a torch DataLoader, so that trainers do not replace its sampler, shard it again or reject it. Its state
depends only on the position in the order. It is the same string on every rank, for any number of workers.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from exactdata.datasets import MixtureDataset
from exactdata.elastic import ElasticSampler
from exactdata.loading.fetch import MapFetcher
from exactdata.loading.foreign_states import is_torchdatas
from exactdata.loading.loader import StatefulDataLoader
from exactdata.loading.loader_state import size_of
from exactdata.loading.protocols import DataEndedError, LoaderError, LoaderStateError
from exactdata.order.arrays import I64
from exactdata.order.state_checks import Record, check, mapping, shown, whole
from exactdata.order.weights import Weights, integer

KEY = "place"
"""The only key of a state."""
VERSION = 1

_PLACE = Record({"version": whole(1), "batches": whole(), "sampler": mapping})
_OF_ORDER = ("temperature", "segments", "max_epochs", "exclude", "shuffle", "allow_data_change")
_OF_CONFIG = ("num_workers", "pin_memory", "prefetch_factor")
_INSTEAD = {
    "batch_size": "global_batch_size, the samples of a batch over all ranks",
    "sampler": "weights and the other arguments of ElasticSampler",
    "batch_sampler": "weights and the other arguments of ElasticSampler",
    "drop_last": "epoch_samples, a multiple of global_batch_size: what a pass leaves over comes first in the next one",
    "epochs": "samples, the number of samples after which the data end",
    "generator": "seed",
    "in_order": "nothing: batches that overtake others make no place to resume from",
    "persistent_workers": "nothing: workers persist",
}


class _Placed(ElasticSampler):
    """An ElasticSampler that ignores `set_epoch`, because some trainers call it on every sampler that they find."""

    def set_epoch(self, epoch: int) -> None:
        """Do nothing."""


class TrainerLoader:
    """Yield this rank's batches, pass after pass. The order is the same for any number of ranks, workers and batches.

    Every sample is yielded exactly once in each epoch of its source, even if the run resumes with a different number of
    ranks, global batch size or weights. Each pass of the trainer covers a range of the order. Pass e ends at position
    (e + 1) * epoch_samples, with a smaller last batch if necessary.

    Example:
        ```python
        import torch
        from torch.utils.data import TensorDataset

        from exactdata import TrainerLoader

        sources = {"code": TensorDataset(torch.arange(90)), "prose": TensorDataset(torch.arange(30))}
        options = {"weights": {"code": 2, "prose": 1}, "epoch_samples": 40, "seed": 1}
        loader = TrainerLoader(sources, global_batch_size=8, **options)
        for step, batch in enumerate(loader):  # one pass of 40 samples
            if step == 1:
                break
        state = loader.state_dict()  # save it on any rank

        resumed = TrainerLoader(sources, global_batch_size=4, **options)  # a different batch size
        resumed.load_state_dict(state)
        assert sum(len(source) for _, source in resumed) == 40 - 16  # the rest of the pass
        ```

    Args:
        dataset: a map-style dataset, a MixtureDataset, or a dict of named map-style datasets to mix.
        weights: weights by source name, or one per source. If None, in proportion to the sizes of the sources.
        global_batch_size: samples per batch over all ranks, a multiple of num_replicas.
        epoch_samples: samples per pass over all ranks. If None, a pass ends only when the data end.
        samples: length of the run in samples over all ranks. If None, it is not limited.
        has_length: if False, `len` raises a TypeError even if passes end. Use this for a trainer that reads the length
            only once, such as Lightning, if the global batch size changes.
        fetched_ahead: number of batches that the trainer has fetched, but not yet trained on, when it saves the state.
            1 in Lightning if the loader has no length, otherwise 0.
        seed: seed of the order and of the random generators of samples.
        num_replicas: number of ranks. If None, the world size of torch.distributed, or 1 without it.
        rank: this rank. If None, the rank in torch.distributed, or 0 without it.
        loader: num_workers, collate_fn, pin_memory, prefetch_factor and other arguments for StatefulDataLoader. Also
            temperature, segments, max_epochs, exclude, shuffle and allow_data_change for ElasticSampler.

    Attributes:
        dataset: the dataset, or the mixture of the datasets.
        batch_size: samples per batch on this rank.
        elastic_sampler: the ElasticSampler, with `locate`, `find`, `update_weights` and `exclude`.

    Raises:
        SamplerError: a source is unknown, a weight is invalid, or the ranks cannot share the global batch evenly.
        LoaderError: `loader` has an argument that TrainerLoader sets.
    """

    def __init__(
        self,
        dataset: Any,
        weights: Weights | None = None,
        *,
        global_batch_size: int,
        epoch_samples: int | None = None,
        samples: int | None = None,
        has_length: bool = True,
        fetched_ahead: int = 0,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
        **loader: Any,
    ) -> None:
        for name, value in loader.items():
            if name in _INSTEAD:
                raise LoaderError(f"{name}={value!r}: TrainerLoader takes {_INSTEAD[name]}")
        order = {name: loader.pop(name) for name in _OF_ORDER if name in loader}
        self.dataset = _joined(dataset)
        sizes = _sizes(self.dataset)
        self.elastic_sampler = _Placed(
            sizes,
            list(sizes.values()) if weights is None else weights,
            global_batch_size=global_batch_size,
            num_replicas=num_replicas,
            rank=rank,
            seed=seed,
            samples=samples,
            epoch_samples=epoch_samples,
            **order,
        )
        self.batch_size = self.elastic_sampler.global_batch_size // self.elastic_sampler.num_replicas
        self._has_length = bool(has_length)
        config = SimpleNamespace(
            **{"num_workers": 0, **{name: loader.pop(name) for name in _OF_CONFIG if name in loader}}
        )
        self._arguments: dict[str, Any] = {**loader, "config": config, "drop_last": False}
        self._batches = 0  # batches of the pass that precede the sampler's iteration
        self._yielded: deque[int] = deque([0], maxlen=integer("fetched_ahead", fetched_ahead, 0) + 1)
        """Samples of this rank in the iteration, before the batches fetched ahead and after each of these batches."""
        self._count = 0  # number of batches yielded in the iteration
        self._has_ended = False
        self._iterator: object = None  # the newest iterator
        self._loader = self._make()

    def _make(self) -> StatefulDataLoader[Any]:
        return StatefulDataLoader(self.dataset, self.batch_size, sampler=self.elastic_sampler, **self._arguments)

    def _begin(self, batches: int) -> None:
        """Start counting at the sampler's next iteration, which `batches` batches of its pass precede."""
        self._batches, self._count = batches, 0
        self._yielded.clear()
        self._yielded.append(0)

    def __iter__(self) -> Iterator[Any]:
        """Yield the rest of the current pass, or the next pass if the current one is complete.

        Raises:
            DataEndedError: all samples were yielded in an earlier pass.
        """
        if self._count:  # an iterator was abandoned, or never reached StopIteration
            is_over = self._left() == 0
            batches = 0 if is_over else self._in_pass()
            self._loader.end_epoch()
            self._begin(batches)
            self._has_ended |= is_over
            self._iterator = None
        if self._left() == 0 and self._has_ended:
            raise DataEndedError(
                f"all {self._position():,} samples were yielded, so that another pass would be empty: raise samples=, "
                "or train fewer epochs"
            )
        return self._iterate()

    def _iterate(self) -> Iterator[Any]:
        self._iterator = mine = object()
        for batch in self._loader:
            self._count += 1
            self._yielded.append(self._loader.samples_yielded)
            yield batch
            if self._iterator is not mine:  # a newer iterator exists, or a state was loaded
                return
        self._begin(0)
        self._has_ended = True

    def _in_pass(self) -> int:
        """Return the number of batches yielded in the pass."""
        return self._batches + self._count

    def _left(self) -> int | None:
        """Return the number of batches left in the pass, or None if the pass has no end."""
        try:
            return -(-self.elastic_sampler.samples_left_after(self._yielded[-1]) // self.batch_size)
        except TypeError:
            return None

    def _position(self) -> int:
        return int(self.elastic_sampler.state_dict_at(self._yielded[-1])["position"])

    def __len__(self) -> int:
        """Return the number of batches in this pass, including those already yielded.

        Raises:
            TypeError: no `epoch_samples`, `samples` or cap ends the pass, or `has_length` is False.
        """
        if not self._has_length:
            raise TypeError("this loader was created with has_length=False")
        left = self._left()
        if left is None:
            raise TypeError("this loader has no length: pass epoch_samples=, the samples of one pass over all ranks")
        return self._in_pass() + left

    def set_epoch(self, epoch: int) -> None:
        """Do nothing, because the position determines the next pass."""

    def state_dict(self) -> dict[str, str]:
        """Return the state after the last batch trained on, in a single string that is the same on every rank."""
        ahead = len(self._yielded) - 1
        saved = self.elastic_sampler.state_dict_at(self._yielded[0])
        batches = self._in_pass() - ahead
        if self._left() == 0 and not ahead:
            batches = 0  # the position is in the next pass
        return {KEY: json.dumps({"version": VERSION, "batches": batches, "sampler": saved}, sort_keys=True)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state saved with any number of ranks and workers and any batch size.

        Args:
            state: a result of `state_dict`. Keys that begin with an underscore are ignored.

        Raises:
            LoaderStateError: `state` is not a state of this loader, or was edited.
            SamplerStateError: `state` has a different seed, size, weights or sources; see
                `ElasticSampler.load_state_dict`.
        """
        place = _opened(state)
        self.elastic_sampler.load_state_dict(place["sampler"])
        self._loader.end_epoch()  # this advances the sampler, so its state is loaded again
        self.elastic_sampler.load_state_dict(place["sampler"])
        self._loader, self._iterator = self._make(), None
        self._begin(place["batches"])
        self._has_ended = place["sampler"]["position"] > 0


def _opened(state: Any) -> dict[str, Any]:
    """Parse the string in a state.

    Raises:
        LoaderStateError: `state` is not a state of this loader.
    """
    text = state.get(KEY) if isinstance(state, Mapping) else None
    if isinstance(state, Mapping) and ("batches_yielded" in state or is_torchdatas(state)):
        raise LoaderStateError(
            "this state is of a StatefulDataLoader, whose order TrainerLoader does not have: load it into "
            "StatefulDataLoader with the sampler that it was saved with, or start the data from the beginning"
        )
    if not isinstance(text, str):
        what = f"has the keys {sorted(map(str, state))}" if isinstance(state, Mapping) else f"is {shown(state)}"
        raise LoaderStateError(
            f"this state {what}; TrainerLoader loads what its state_dict() returned, a text under {KEY!r}: load it "
            "into the loader that saved it, or start the data from the beginning"
        )
    try:
        place = json.loads(text)
    except (ValueError, RecursionError):
        place = None
    message = "{key} in this state is {value}; it must be {allowed}: the state was edited; use another checkpoint"
    check({KEY: place}, Record({KEY: _PLACE}), message, LoaderStateError)
    if place["version"] > VERSION:
        raise LoaderStateError(
            f"this state has version {place['version']}, but this program reads versions up to {VERSION}: use the "
            "version that wrote it"
        )
    return dict(place)


def _joined(dataset: Any) -> Any:
    """Return the dataset, or a MixtureDataset if it is a mapping of datasets."""
    if isinstance(dataset, Mapping):
        return MixtureDataset(list(dataset.values()), list(dataset))
    if not isinstance(dataset, MixtureDataset) and size_of(dataset) is None:
        raise LoaderError(
            f"the dataset {type(dataset).__name__} has no length: TrainerLoader takes map-style datasets; for a stream "
            "use StatefulDataLoader"
        )
    return dataset


def _sizes(dataset: Any) -> dict[str, int]:
    """Return the number of samples by source name."""
    if isinstance(dataset, MixtureDataset):
        ends = dataset.cumulative_sizes
        return {name: ends[at + 1] - ends[at] for at, name in enumerate(dataset.names)}
    return {"data": len(dataset)}


def committed_batches(
    sampler: ElasticSampler,
    dataset: Any,
    batch_size: int,
    place: Callable[[], tuple[int, int | None]],
    *,
    collate_fn: Callable[[Any], Any] | None = None,
) -> Iterator[Any]:
    """Yield a batch per step, for trainers such as torchft in which steps may fail and the set of replicas may change.

    Batches are counted when they are committed. In a step with n replicas, replica i trains on batch `committed + i`. A
    step that is not committed is repeated with the same batches. Batches are not prefetched.

    Example:
        ```python
        from exactdata import ElasticSampler, committed_batches

        data = list(range(20))
        sampler = ElasticSampler({"data": 20}, [1], global_batch_size=4, samples=12)
        committed = 0
        for batch in committed_batches(sampler, data, 4, lambda: (committed, 0)):
            print(batch.tolist())
            committed += 1  # leave it unchanged to repeat the batch
        ```

    Args:
        sampler: the sampler that defines the order and, with its `samples`, the end. Its ranks and position have no
            effect.
        dataset: a map-style dataset, such as the MixtureDataset of the sampler's sources.
        batch_size: samples per batch.
        place: returns the number of batches committed so far, and the number of this replica in the step. The second
            number is None if the replica does not participate, so that its gradients are ignored. Called after the
            quorum of the step. In torchft, pass `lambda: (manager.batches_committed(), manager.participating_rank())`.
        collate_fn: as in torch's DataLoader.

    Yields:
        The collated batch.
    """
    from torch.utils.data import default_collate

    fetcher = MapFetcher(dataset, collate_fn or default_collate, True, collate_fn is not None, seeded=True)
    end = sampler.limit
    while True:
        committed, number = place()
        if end is not None and committed * batch_size >= end:
            return
        first = (committed + (number or 0)) * batch_size
        positions: I64 = np.arange(first, first + batch_size, dtype=np.int64)
        yield fetcher.fetch(sampler.indices_at(positions), sampler.order.sample_keys(positions))

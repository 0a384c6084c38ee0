"""Provide StatefulDataLoader, a torch DataLoader whose position can be saved after any batch and restored.

*Batches* and *samples* are counted from the start of the epoch, when they are yielded, not when they are prefetched. An
*epoch* is one pass over the sampler or the iterable dataset. An epoch ends with the StopIteration after its last batch.
If a state is saved after the last batch but before that StopIteration, the resumed epoch has no batches left. A state
saved after the StopIteration resumes at the next epoch.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

from torch.utils.data import DataLoader, Dataset, IterableDataset, IterDataPipe

from exactdata.loading import loader_state, protocols, redistribution
from exactdata.loading.epochs import Epoch, EpochPosition, IndexSource
from exactdata.loading.fetch import MapFetcher, is_collated, is_iterator, is_stateful, load_state
from exactdata.loading.foreign_states import from_torchdata, is_torchdatas
from exactdata.loading.in_process import MapEpoch, StreamEpoch
from exactdata.loading.index_stream import IndexStream
from exactdata.loading.loader_state import DatasetStates, copied, is_in_epoch, one_value, opened, sealed, size_of
from exactdata.loading.pinning import can_pin, pin
from exactdata.loading.prefetch import PrefetchedEpoch
from exactdata.loading.protocols import BatchRecord, DataEndedError, LoaderError, LoaderStateError, State
from exactdata.loading.seeds import SeedStream
from exactdata.loading.stream_fetch import StreamFetcher, between_epochs
from exactdata.loading.worker_epochs import WorkerMapEpoch, WorkerSetup, WorkerStreamEpoch
from exactdata.loading.workers import WorkerPool
from exactdata.ranks import current_ranks

logger = logging.getLogger(__name__)

T_co = TypeVar("T_co", covariant=True)


class StatefulDataLoader(DataLoader[T_co]):
    """torch's DataLoader with `state_dict` and `load_state_dict`.

    With torch's arguments, it is a drop-in replacement that yields the same batches in the same order. With `config`,
    it has the defaults of a training run. `sampler` defaults to `DistributedSampler(dataset)` (unshuffled with
    `shuffle=False`), an incomplete last batch is dropped, workers persist, and the loader sets the sampler's epoch.

    The loader never advances the global random generators; see `exactdata.loading.seeds`.

    Example:
        ```python
        import torch
        from torch.utils.data import TensorDataset

        from exactdata import StatefulDataLoader

        data = TensorDataset(torch.arange(10))
        loader = StatefulDataLoader(data, batch_size=4, shuffle=True)
        first = next(iter(loader))
        state = loader.state_dict()  # after the first batch

        resumed = StatefulDataLoader(data, batch_size=4, shuffle=True)
        resumed.load_state_dict(state)
        rest = list(resumed)  # the second and third batch
        assert sorted(torch.cat([batch[0] for batch in [first, *rest]]).tolist()) == list(range(10))
        ```

    Args:
        dataset: a map-style dataset, or an IterableDataset. `exactdata.loading.fetch` lists the methods that make it
            fast.
        batch_size: samples per batch. If None, samples are not batched. Arguments not listed here are the same as in
            torch.
        drop_last: whether to drop an incomplete last batch. If None, True with `config`, otherwise False.
        in_order: as in torch. If False, batches are yielded as soon as they are ready, and the loader has no state.
        snapshot_every_n_steps: number of batches after which each worker saves the state of an iterable dataset. After
            a resume, the batches since that state are fetched again and dropped. If 0, the state is saved only at the
            start of an epoch.
        config: an object with `num_workers`, and optionally `pin_memory` and `prefetch_factor`, which override the
            arguments of the same names. It may also have `worker_start`, which is called in each worker process when it
            starts.

    Raises:
        ValueError: arguments contradict each other, as in torch's DataLoader.
        LoaderError: the dataset is a data pipe and there are several workers.
    """

    def __init__(
        self,
        dataset: Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: Any = None,
        sampler: Any = None,
        batch_sampler: Iterable[Sequence[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool | None = None,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: Any = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        snapshot_every_n_steps: int | None = 1,
        config: Any = None,
    ) -> None:
        # The arguments for a training run may be positional: (dataset, batch_size, sampler, config).
        is_sampler = shuffle is not None and not isinstance(shuffle, bool | int)
        if is_sampler or (shuffle is None and hasattr(sampler, "num_workers")):
            shuffle, sampler, config = None, shuffle, sampler if config is None else config
        if config is not None:
            num_workers = config.num_workers
            pin_memory = bool(getattr(config, "pin_memory", False)) and can_pin()
            prefetch_factor = getattr(config, "prefetch_factor", None) if num_workers else None
            persistent_workers = num_workers > 0
            drop_last = True if drop_last is None else drop_last
            if sampler is None and not isinstance(dataset, IterableDataset):
                shuffle, sampler = None, _default_sampler(dataset, shuffle is None or bool(shuffle))
        num_workers = _python_integer(num_workers)
        _check_data_pipe(dataset, num_workers)
        super().__init__(
            dataset, batch_size, shuffle, sampler, batch_sampler, num_workers, collate_fn, pin_memory,  # type: ignore[arg-type]
            bool(drop_last), timeout, worker_init_fn, multiprocessing_context, generator,
            prefetch_factor=prefetch_factor, persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device, in_order=in_order,
        )  # fmt: skip
        self.snapshot_every_n_steps = snapshot_every_n_steps or 0
        self._batched = batch_size is not None or batch_sampler is not None
        self._own_collate = collate_fn is not None
        self._worker_start = getattr(config, "worker_start", None)
        self._set_up(batch_sampler, generator, sets_epoch=config is not None)

    def _set_up(self, batch_sampler: Any, generator: Any, sets_epoch: bool) -> None:
        self._transform = pin if self.pin_memory and can_pin() else None  # only if no worker pins memory
        if self.pin_memory and self._transform is None:
            logger.warning("pin_memory=True has no effect: there is no accelerator")
        self._iterable = isinstance(self.dataset, IterableDataset)
        custom = batch_sampler is not None
        sampler, size = (batch_sampler, None) if custom else (self.sampler, self.batch_size)
        self._stream = IndexStream(sampler, size, self.drop_last, custom, sets_epoch)
        self._seeds = SeedStream(generator, self._stream.seeds_itself, self._stream.sampler)
        self._epoch = 0
        self._batches_before = 0  # number of batches in earlier epochs
        self._current: Epoch | None = None
        self._pool: WorkerPool | None = None
        self._loaded: State | None = None  # kept until a batch is yielded after loading it
        self._pending = False  # whether a state was loaded but not yet iterated from
        self._reported_length: int | None = None

    def __len__(self) -> int:
        """Return the number of batches in the epoch, including those already yielded.

        For an iterable dataset, the length is an estimate, as in torch.
        """
        if self._iterable:
            self._reported_length = size_of(self.dataset)
            return super().__len__()
        position = self._place()
        left = self._stream.batches_left(position.batches, position.samples, position.base)
        return super().__len__() if left is None else position.batches + left

    def __iter__(self) -> Epoch:  # type: ignore[override]
        """Begin an epoch, or resume the epoch that `load_state_dict` restored.

        A second `iter()` in the middle of an epoch restarts that epoch, as in torch, and the state follows the newest
        iterator. The older iterator continues independently. With persistent workers, which serve only one iterator, it
        instead continues as the new iterator. After the last batch, `iter()` begins the next epoch, even if the older
        iterator has not yet raised StopIteration.

        Raises:
            LoaderStateError: the loaded state cannot be split over this number of workers.
            DataEndedError: the sampler has no samples left, and a pass has already ended.
        """
        is_over = self._has_yielded_all()
        if is_over and not self._pending:
            self.end_epoch()
        older = self._current
        if older is not None and self.persistent_workers:
            older.close()
        state = self._loaded if self._pending else None
        if state is None:
            self._loaded = None
            self._check_is_left()
        self._current = self._open(state)
        self._pending = False
        if is_over and state is not None:
            for _ in self._current:  # yields nothing, but advances the samplers as the uninterrupted epoch did
                pass
            self._current, self._loaded = self._open(None), state
        if older is not None and self.persistent_workers:
            older.successor = self._current
        return self._current

    def _open(self, state: State | None) -> Epoch:
        return self._open_iterable(state) if self._iterable else self._open_map(state)

    def _check_is_left(self) -> None:
        """Check that there are samples for another pass after the first.

        Raises:
            DataEndedError: the sampler has no samples left.
        """
        if self._epoch and self._stream.counts_what_is_left and self._stream.batches_left(0, 0, 0) == 0:
            raise DataEndedError(
                f"pass {self._epoch} of this loader would be empty, since {type(self._stream.sampler).__name__} has "
                "yielded all its samples: raise its epochs= or samples=, or iterate less often"
            )

    def iter_recorded(self) -> Iterator[tuple[T_co, BatchRecord]]:
        """Iterate like `iter()`, and yield each batch with the record of its samples.

        Raises:
            LoaderStateError: as for `iter()`.
        """
        return iter(self).recorded()

    def _has_yielded_all(self) -> bool:
        """Return whether the epoch's last batch was yielded, if that can be known before the StopIteration.

        If so, the epoch of a loaded state is over, unless no epoch can follow or its length is not yet known.
        """
        if self._iterable or (self._pending and (self._stream.ends_for_good or self._stream.awaits_epoch)):
            return False
        at = self._place()
        reached = at.batches > 0 if self._pending else at.has_yielded
        return reached and self._stream.batches_left(at.batches, at.samples, at.base) == 0

    def _place(self) -> EpochPosition:
        """Return the position in the current or loaded epoch, or else the position before a new epoch."""
        if self._pending:
            return self._position(self._loaded)
        current = self._current
        if current is None or (current.finished and not self._stream.ends_for_good):
            return EpochPosition(self._epoch)
        return current.position

    def _position(self, state: State | None) -> EpochPosition:
        position = EpochPosition(self._epoch)
        if state is not None and is_in_epoch(state):
            position.batches, position.samples = state["batches_yielded"], self._samples_of(state)
            position.reached = position.samples
        if self._stream.by_position:
            position.base = position.samples
        return position

    def _seed(self, state: State | None) -> Any:
        """Seed the epoch, and return the generator from which torch's loader draws the seed of the workers."""
        if state is not None and state.get("seeds") is not None:
            self._seeds.load(state["seeds"])
            if is_in_epoch(state):
                return self._seeds.begin_restored()
        # A training run has the same order for any number of workers, so this number must not affect the seeds.
        return self._seeds.begin(chain=self.persistent_workers or self._stream.sets_epoch)

    def _open_map(self, state: State | None) -> Epoch:
        position, generator = self._position(state), self._seed(state)
        assert self._seeds.base_seed is not None
        fetcher = MapFetcher(
            self.dataset, self.collate_fn, self._batched, self._own_collate, seeded=self._stream.sets_epoch
        )
        saved = None if state is None or fetcher.collated else opened(state.get("dataset"))
        skip = position.batches if self._stream.is_batch_sampler else position.samples
        with self._seeds.in_place_of_global():
            indices = self._stream.open(position.epoch, skip, None if state is None else opened(state.get("order")))
        if not self._seeds.seeds_itself:
            indices = _seeded(indices, self._seeds)
        source = IndexSource(self._stream, indices, self._seeds.base_seed, position)
        if self.num_workers == 0 or self._prefetches_in_thread(fetcher):
            if saved:
                load_state(self.dataset, saved[0]["dataset"])
            if self.num_workers == 0:
                return MapEpoch(source, fetcher, position, self._on_end, self._transform)
            fetcher.watches = False  # the training may draw random numbers at the same time
            depth = self.num_workers * (self.prefetch_factor or 2)
            return PrefetchedEpoch(source, fetcher, depth, position, self._on_end, self._transform)
        first = self._first_worker(state) if saved and len(saved) == self.num_workers else 0
        saved = saved and [saved[worker % len(saved)] for worker in range(self.num_workers)]
        setup = self._setup_workers(fetcher, generator, saved, first, position.epoch)
        return WorkerMapEpoch(source, fetcher, setup, position, self._on_end, None)

    def _prefetches_in_thread(self, fetcher: MapFetcher) -> bool:
        """Return whether a thread prefetches instead of worker processes.

        The dataset must allow it. If a dataset used the global generators in a thread, it would share them with the
        training at unpredictable times, and the run would not be reproducible.
        """
        asks_for_processes = self.worker_init_fn is not None or self.multiprocessing_context is not None or self.timeout
        if asks_for_processes or not fetcher.collated or self._own_collate:
            return False
        return getattr(self.dataset, "prefetch", None) == "thread"

    def _open_iterable(self, state: State | None) -> Epoch:
        position, generator = self._position(state), self._seed(state)
        watched = self._stream.sets_epoch
        fetcher = StreamFetcher(self.dataset, self.collate_fn, self.batch_size, self.drop_last, watched)
        workers = max(self.num_workers, 1)
        saved, changed = None, False
        if state is not None:
            saved, changed = redistribution.for_workers(state, self.dataset, current_ranks(), workers)
        if self.num_workers == 0:
            protocols.set_ranks(*current_ranks())
            if isinstance(self._current, StreamEpoch):
                fetcher.exhausted = self._current.exhausted
            fetcher.start(None if saved is None else redistribution.own(self.dataset, saved[0]), position.epoch)
            return StreamEpoch(fetcher, position, self._on_end, self._transform, self._check_length)
        first = 0 if changed else self._first_worker(state)
        setup = self._setup_workers(fetcher, generator, saved, first, position.epoch)
        return WorkerStreamEpoch(fetcher, setup, position, self._on_end, None, self._check_length)

    def _first_worker(self, state: State | None) -> int:
        """Return the number of the worker that fetches the first batch after loading `state`."""
        if state is None or not is_in_epoch(state):
            return 0
        return int(state.get("next_worker", 0))

    def _setup_workers(
        self, fetcher: MapFetcher | StreamFetcher, generator: Any, saved: DatasetStates | None, first: int, epoch: int
    ) -> WorkerSetup:
        if self._pool is None or self._pool.is_closed or not self.persistent_workers:
            options = {
                "num_workers": self.num_workers,
                "pin_memory": self._transform is not None,
                "timeout": self.timeout,
                "multiprocessing_context": self.multiprocessing_context,
                "generator": generator,
                "prefetch_factor": self.prefetch_factor,
                "persistent_workers": self.persistent_workers,
                "in_order": self.in_order,
            }
            self._pool = WorkerPool(
                fetcher, self.snapshot_every_n_steps, self.worker_init_fn, self._worker_start, options
            )
        return WorkerSetup(
            self._pool,
            self.num_workers,
            seed=self._seeds.worker_seed(current_ranks()[0]),
            saved=saved,
            epoch=epoch,
            first=first,
            in_order=self.in_order,
            persistent=self.persistent_workers,
            wait=self.in_order and self.worker_init_fn is not None,
        )

    def _on_end(self, epoch: Epoch) -> None:
        """Prepare the next epoch, after `epoch` was iterated to its end or `end_epoch` was called."""
        if epoch is not self._current:
            return
        self._epoch = epoch.position.epoch + 1
        self._batches_before += epoch.position.batches
        self._loaded = None
        if self._stream.by_position:  # the next iteration begins where this one ended
            self._stream.sampler.load_state_dict(self._state_by_position(epoch.position))
        if not self.persistent_workers:
            self._pool = None

    def _state_by_position(self, position: EpochPosition) -> Any:
        samples = position.samples - position.base
        if self._stream.has_passes and self.drop_last:  # an incomplete last batch is dropped with the pass
            left = self._stream.sampler.samples_left_after(samples)
            samples += left if left < (self.batch_size or 1) else 0
        return self._stream.sampler.state_dict_at(samples)

    def _check_length(self, samples: int) -> None:
        if self._reported_length is None or samples <= self._reported_length:
            return
        message = (
            f"Length of IterableDataset {self.dataset} was reported to be {self._reported_length} (when accessing "
            f"len(dataloader)), but {samples} samples have been fetched. "
        )
        if self.num_workers:
            message += (
                "For multiprocessing data-loading, this could be caused by not properly configuring the "
                "IterableDataset replica at each worker: each must yield only its own part of the data"
            )
        logger.warning(message)

    @property
    def epoch(self) -> int:
        """Return the number of the current epoch, or between epochs of the next one. The first epoch is 0."""
        return self._epoch + (self._pending and self._has_yielded_all())

    @property
    def batches_yielded(self) -> int:
        """Return the number of batches yielded in this epoch, including those before a resume."""
        if self._pending:
            assert self._loaded is not None
            return 0 if self._has_yielded_all() else int(self._loaded["batches_yielded"])
        return 0 if self._current is None or self._current.finished else self._current.position.batches

    @property
    def samples_yielded(self) -> int:
        """Return the number of samples yielded in this epoch, including those before a resume."""
        return 0 if self._pending and self._has_yielded_all() else self._place().samples

    def end_epoch(self) -> None:
        """End this epoch early, so that the next `iter()` begins the next epoch. Drops prefetched batches."""
        if self._pending:
            assert self._loaded is not None
            if not is_in_epoch(self._loaded) or self._has_yielded_all():
                return
            self._seed(self._loaded)
            if self._stream.by_skip:
                self._stream.sampler.set_skip(0)
            self._batches_before += self.batches_yielded
            self._pending, self._loaded = False, None
            self._epoch += 1
        elif self._current is not None and not self._current.finished:
            self._current.close()
            self._current.finished = True
            self._on_end(self._current)

    def state_dict(self) -> State:
        """Return the state after the last yielded batch.

        The state consists of numbers, strings, lists and dicts. It is JSON-serializable if the states of the dataset
        and the sampler are. `docs/loader.md` lists the keys.

        Raises:
            LoaderStateError: the loader has `in_order=False`.
        """
        self._check_has_states()
        current = self._current
        if self._loaded is not None and (self._pending or current is None or not current.position.has_yielded):
            return self._with_changes(self._loaded)
        running = None if current is None or current.finished else current
        position = EpochPosition(self._epoch) if running is None else running.position
        sampler = self._sampler_state(None if running is None else position)
        before = self._batches_before
        if running is not None and self._stream.has_passes and self._has_yielded_all():
            position, before, running = EpochPosition(self._epoch + 1), before + position.batches, None
        states = self._initial_dataset_states() if current is None else current.dataset_states()
        by_worker = self._iterable or states is not None  # otherwise any worker may fetch the next batch
        state: State = {
            "version": loader_state.VERSION,
            "loader": loader_state.NAME,
            "style": "iterable" if self._iterable else "map",
            "epoch": position.epoch,
            "in_epoch": running is not None,
            "batches_before": before,
            "batches_yielded": position.batches,
            "samples_yielded": position.samples,
            "batch_size": self.batch_size,
            "num_workers": self.num_workers if by_worker else 0,
            "next_worker": running.next_worker() if by_worker and running is not None else 0,
            "seeds": self._seeds.state(running is not None),
            "sampler": sampler,
            "order": None,
            "dataset": one_value(states),
            "_iterator_finished": running is None and position.epoch > 0,  # accelerate sets this key in loader states
        }
        if not self._iterable:
            state["dataset_size"] = size_of(self.dataset)
            order = self._stream.boundary_state() if running is None else running.sampler_state()
            state["order"] = one_value(order)
        return sealed(state)

    def _check_has_states(self) -> None:
        if not self.in_order:
            raise LoaderStateError(
                "in_order=False: batches that overtake others make no place to resume from; set in_order=True to save "
                "or load a state"
            )

    def _with_changes(self, loaded: State) -> State:
        """Return the loaded state, updated with changes of the order made since."""
        if not self._stream.by_position:
            return dict(loaded)
        current = self._current  # batches that were taken but not yielded do not count
        sampler = self._stream.sampler.state_dict() if current is None else self._state_by_position(current.position)
        if sampler == loaded.get("sampler"):
            return dict(loaded)
        changed = {**loaded, "sampler": sampler}
        return sealed(changed) if "digest" in loaded else changed

    def _sampler_state(self, position: EpochPosition | None) -> Any:
        if self._stream.by_position and position is not None:
            return copied(self._state_by_position(position))
        if self._stream.seeds_itself:
            return copied(self._stream.sampler.state_dict())
        epoch = getattr(self.sampler, "epoch", None)
        return {"epoch": epoch} if isinstance(epoch, int) and hasattr(self.sampler, "set_epoch") else None

    def _initial_dataset_states(self) -> DatasetStates | None:
        """Return the dataset's state before the first iteration, if the dataset is iterated in this process."""
        if self.num_workers or not is_stateful(self.dataset) or is_collated(self.dataset):
            return None
        own = self.dataset.state_dict()  # type: ignore[attr-defined]
        if not self._iterable:
            return [{"dataset": own, "boundary": False}]
        if is_iterator(self.dataset):
            return [between_epochs(current_ranks(), iterator=own)]
        return [between_epochs(current_ranks(), dataset=own)]

    def load_state_dict(self, state: State) -> None:
        """Resume from `state` at the next `iter()`.

        Args:
            state: the state of one rank, or a state aggregated from all ranks, from which this rank takes its part. A
                state of torchdata's StatefulDataLoader for a map-style dataset is also accepted.

        Raises:
            LoaderStateError: the state is from a different loader, lacks keys or does not match this loader, or the
                loader has `in_order=False`.
        """
        self._check_has_states()
        if isinstance(state, dict) and "ranks" in state:
            state = self.deaggregate_state_dict(state, *current_ranks())
        if is_torchdatas(state):
            state = from_torchdata(state, self._stream, self._iterable)
        self._check(state)
        if self._current is not None:
            self._current.close()
            self._current = None
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        if (
            not self._stream.seeds_itself
            and hasattr(self.sampler, "set_epoch")
            and "epoch" in (state.get("sampler") or ())
        ):
            self.sampler.set_epoch(state["sampler"]["epoch"])
        self._epoch, self._batches_before = state["epoch"], state.get("batches_before", 0)
        within = is_in_epoch(state)
        if self._stream.by_skip and (within or self._loaded is not None):  # an earlier loaded state may have set a skip
            self._stream.sampler.set_skip(self._samples_of(state) if within else 0)
        self._loaded, self._pending = state, True

    def _check(self, state: State) -> None:
        """Check the complete state. The sampler checks and loads its part last.

        Raises:
            LoaderStateError, SamplerStateError: the state does not match this loader. Nothing was loaded.
        """
        stream = self._stream
        size = None if self._iterable else size_of(self.dataset)
        loader_state.check_state(state, self._iterable, size, stream.seeds_itself, stream.is_batch_sampler)
        length = None if self._iterable else stream.epoch_size()
        loader_state.check_place(state, length, self.batch_size, stream.is_batch_sampler)
        if state.get("seeds") is not None:
            self._seeds.check(state["seeds"])
        if not stream.seeds_itself:
            if hasattr(self.sampler, "set_epoch"):
                loader_state.check_sampler_epoch(state)
            return
        if state.get("sampler") is not None:
            stream.sampler.load_state_dict(state["sampler"])
        elif stream.by_position and state["batches_yielded"]:
            raise LoaderStateError(
                f"sampler in this state is missing; it must be that of {type(stream.sampler).__name__}, whose position "
                "cannot be counted from batches: load the state with the sampler that it was saved with"
            )

    def _samples_of(self, state: State) -> int:
        """Return the number of samples yielded in the epoch. States of some other loaders count only batches."""
        if "samples_yielded" in state:
            return int(state["samples_yielded"])
        return int(state["batches_yielded"]) * int(state.get("batch_size") or self.batch_size or 1)

    def aggregate_state_dict(self, states: Sequence[State]) -> State:
        """Combine the states of all ranks, ordered by rank, into one.

        Raises:
            LoaderStateError: there are no states, one is not a loader's state, or their positions differ.
        """
        aggregated = loader_state.aggregate(states)
        if self._iterable:
            redistribution.check_alike(self.dataset, states)
        return aggregated

    def deaggregate_state_dict(self, aggregated: State, rank: int, world_size: int) -> State:
        """Extract the state that `rank` of `world_size` ranks resumes from.

        Args:
            aggregated: result of `aggregate_state_dict`, possibly from a different number of ranks.
            rank: the rank that resumes.
            world_size: the number of ranks that resume.

        Raises:
            LoaderStateError: the state cannot be split over this number of ranks.
        """
        ranks = loader_state.check_aggregated(aggregated, rank, world_size)
        if self._iterable:
            mine = redistribution.for_rank(aggregated, rank, world_size, max(self.num_workers, 1))
        elif len(ranks) == world_size:
            return dict(ranks[rank])
        else:
            mine = dict(ranks[rank % len(ranks)])
            refuses_itself = self._stream.by_skip and loader_state.counts_ranks(mine)
            if not self._stream.by_position and not refuses_itself:
                raise LoaderStateError(
                    f"this state was saved by {len(ranks)} ranks, now there are {world_size}, and the sampler cannot "
                    f"redistribute what is left: resume with {len(ranks)} ranks, or use ElasticSampler"
                )
        return sealed(mine) if "digest" in mine else mine


def _python_integer(number: Any) -> Any:
    """Convert a numpy or torch integer to an int that a state can store. torch's loader checks other values."""
    return operator.index(number) if hasattr(number, "__index__") else number


def _check_data_pipe(dataset: Any, num_workers: int) -> None:
    if isinstance(dataset, IterDataPipe) and num_workers > 1:
        raise LoaderError(
            f"num_workers={num_workers} for the data pipe {type(dataset).__name__}: every worker would yield all of "
            "it; set num_workers to 0 or 1, or make it an IterableDataset that reads only its shard()"
        )


def _seeded(indices: Iterator[Any], seeds: SeedStream) -> Iterator[Any]:
    """Yield `indices`. The sampler may draw from torch's global generator at its first index."""
    with seeds.in_place_of_global():
        first = list(islice(indices, 1))
    yield from first
    yield from indices


def _default_sampler(dataset: Any, shuffle: bool) -> Any:
    from exactdata.sampler import DistributedSampler

    rank, world_size = current_ranks()
    return DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=shuffle)

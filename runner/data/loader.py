"""StatefulDataLoader: torch's DataLoader, which can be saved at any batch and taken up again there.

Terms: a *batch* and a *sample* are counted from the start of the epoch and as yielded, never as fetched
ahead. An *epoch* is one pass of the sampler or the iterable dataset; it ends with the StopIteration after its
last batch. A state saved before that StopIteration resumes into the empty rest of the epoch, one saved after it
into the next epoch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

import numpy as np
from torch.utils.data import DataLoader, Dataset, IterableDataset, IterDataPipe

from runner.data import restartable
from runner.data.draws import Draws, as_array
from runner.data.epochs import (
    Epoch,
    InlineMap,
    InlineStream,
    Place,
    Source,
    States,
    Threaded,
    WorkerMap,
    Workers,
    WorkerStream,
)
from runner.data.fetch import MapFetcher, StreamFetcher, is_collated, is_iterator, is_stateful
from runner.data.pinning import can_pin, pin
from runner.data.restartable import LoaderError, State
from runner.data.seeds import SeedStream
from runner.data.states import (
    NAME,
    VERSION,
    aggregate,
    begun,
    check,
    check_samples,
    deaggregate,
    next_worker,
    shared_out,
    size_of,
)
from runner.data.workers import Engine, deal

T_co = TypeVar("T_co", covariant=True)


class StatefulDataLoader(DataLoader[T_co]):
    """torch's DataLoader with `state_dict` and `load_state_dict`.

    Two ways to make one. With torch's arguments it is a drop-in: the same batches in the same order. With
    `config` (an object that has num_workers and may have pin_memory and prefetch_factor) it is the one of a
    training run: `sampler` defaults to `DistributedSampler(dataset)`, the last incomplete batch is dropped,
    workers persist, and the loader tells the sampler the epoch.

    It never moves the global random generators: see `runner.data.seeds` for what it draws instead.

    Args:
        dataset: map-style, or an IterableDataset. See `runner.data.fetch` for what makes it fast.
        drop_last: None means False, or True where `config` is given.
        in_order: as torch's; the state is exact without it, too.
        snapshot_every_n_steps: batches of a worker between two states of an iterable dataset; after a
            resume the batches since are fetched again and dropped. 0: only at the start of an epoch.
        config: see above.
        The others are torch's.

    Raises:
        ValueError: what torch's DataLoader raises for arguments that do not go together.
        LoaderError: a data pipe with several workers.
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
        by_place = shuffle is not None and not isinstance(shuffle, bool | int)
        if by_place or (shuffle is None and hasattr(sampler, "num_workers")):  # (dataset, batch_size, sampler, config)
            shuffle, sampler, config = None, shuffle, sampler if config is None else config
        if config is not None:
            num_workers = config.num_workers
            pin_memory = bool(getattr(config, "pin_memory", False)) and can_pin()
            prefetch_factor = getattr(config, "prefetch_factor", None) if num_workers else None
            persistent_workers = num_workers > 0
            drop_last = True if drop_last is None else drop_last
            sampler = _default_sampler(dataset) if sampler is None else sampler
        if isinstance(dataset, IterDataPipe) and num_workers > 1:
            raise LoaderError(
                f"num_workers={num_workers} for the data pipe {type(dataset).__name__}: every worker would yield "
                "all of it; set num_workers to 0 or 1, or make it an IterableDataset that reads its shard() only"
            )
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,  # type: ignore[arg-type]
            num_workers,
            collate_fn,
            pin_memory,
            bool(drop_last),
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        self.snapshot_every_n_steps = snapshot_every_n_steps or 0
        self._iterable = isinstance(dataset, IterableDataset)
        self._own_collate = collate_fn is not None
        self._batched = batch_size is not None or batch_sampler is not None
        custom = batch_sampler is not None
        size = None if custom else batch_size
        self._draws = Draws(batch_sampler if batch_sampler is not None else self.sampler, size, self.drop_last, custom)
        self._draws.by_epoch = config is not None
        self._seeds = SeedStream(generator, self._draws.seeds_itself, self._draws.sampler)
        self._epoch = 0
        self._current: Epoch | None = None
        self._engine: Engine | None = None
        self._loaded: State | None = None  # until a batch is yielded after it
        self._pending = False  # a state was loaded and not yet iterated from
        self._reported: int | None = None

    def __len__(self) -> int:
        """Batches in an epoch; an estimate for an iterable dataset, as torch's."""
        if self._iterable:
            self._reported = size_of(self.dataset)
        return super().__len__()

    def __iter__(self) -> Epoch:  # type: ignore[override]
        """Begin an epoch, or go on in the one that `load_state_dict` restored.

        A second `iter()` in mid-epoch begins the epoch again from its first sample, as torch's does, and the state is
        that of the newest. The older iterator goes on by itself; with persistent workers, which serve one iterator
        at a time, it goes on as the new one.

        Raises:
            LoaderStateError: the loaded state cannot be shared out among this number of workers.
        """
        older = self._current
        if older is not None and self.persistent_workers:
            older.close()
        if self.pin_memory and not can_pin():
            warnings.warn("pin_memory=True has no effect: there is no accelerator", stacklevel=2)
        state = self._loaded if self._pending else None
        if state is None:
            self._loaded = None
        self._current = self._open_stream(state) if self._iterable else self._open_map(state)
        if older is not None and self.persistent_workers:
            older.successor = self._current
        self._pending = False
        return self._current

    def _place(self, state: State | None) -> Place:
        place = Place(self._epoch)
        if state is not None and begun(state):
            place.batches, place.samples = state["batches_yielded"], self._samples_of(state)
            place.done = list(state.get("out_of_order", ()))
        if self._draws.by_position:
            place.base = place.samples
        return place

    def _seed(self, state: State | None) -> Any:
        """Seed the epoch; the generator that torch's loader is to draw its workers' seed from."""
        if state is not None and state.get("seeds") is not None:
            self._seeds.load(state["seeds"])
            if begun(state):
                return self._seeds.again()
        return self._seeds.begin(chain=self.persistent_workers)

    def _open_map(self, state: State | None) -> Epoch:
        place, ahead = self._place(state), self._seed(state)
        assert self._seeds.base_seed is not None
        fetcher = MapFetcher(self.dataset, self.collate_fn, self._batched, self._own_collate)
        saved = None if state is None or fetcher.collated else state.get("dataset")
        skip = place.batches if self._draws.batches else place.samples
        with self._seeds.lent():
            drawn = self._draws.open(place.epoch, skip, None if state is None else state.get("order"))
        source = Source(self._draws, first_of(drawn, self._seeds), self._seeds.base_seed)
        if self.num_workers == 0 or self._by_thread(fetcher):
            if saved:
                self.dataset.load_state_dict(saved[0]["dataset"])  # type: ignore[attr-defined]
            transform = pin if self.pin_memory and can_pin() else None
            if self.num_workers == 0:
                return InlineMap(source, fetcher, place, self._ended, transform)
            depth = self.num_workers * (self.prefetch_factor or 2)
            return Threaded(source, fetcher, depth, place, self._ended, transform)
        workers = self._workers(fetcher, ahead, saved and [saved[i % len(saved)] for i in range(self.num_workers)])
        if saved and len(saved) == self.num_workers and begun(state) and self.in_order:
            workers.first = next_worker(state)
        return WorkerMap(source, fetcher, workers, place, self._ended, None)

    def _by_thread(self, fetcher: MapFetcher) -> bool:
        """Whether a thread fetches ahead instead of processes.

        Only where the dataset says so: one that draws from the global random generators would draw from those that
        the training uses, at any moment, and no run would be the same again.
        """
        asks_for_processes = self.worker_init_fn is not None or self.multiprocessing_context is not None or self.timeout
        if asks_for_processes or not fetcher.collated or self._own_collate:
            return False
        return getattr(self.dataset, "prefetch", None) == "thread"

    def _open_stream(self, state: State | None) -> Epoch:
        place, ahead = self._place(state), self._seed(state)
        fetcher = StreamFetcher(self.dataset, self.collate_fn, self.batch_size, self.drop_last)
        saved = None if state is None else shared_out(state, self.dataset, max(self.num_workers, 1))
        if self.num_workers == 0:
            restartable.set_ranks(*restartable.current_ranks())
            if isinstance(self._current, InlineStream):
                fetcher.exhausted = self._current.exhausted
            if saved is not None and "deal" in saved[0]:
                saved = [deal(self.dataset, saved[0]["deal"])]
            fetcher.start(None if saved is None else saved[0])
            transform = pin if self.pin_memory and can_pin() else None
            return InlineStream(fetcher, place, self._ended, transform, self._check_length)
        workers = self._workers(fetcher, ahead, saved)
        if saved and begun(state) and "deal" not in saved[0] and self.in_order:
            workers.first = next_worker(state)
        return WorkerStream(fetcher, workers, place, self._ended, None, self._check_length)

    def _workers(self, fetcher: MapFetcher | StreamFetcher, ahead: Any, saved: States | None) -> Workers:
        if self._engine is None or self._engine.is_closed or not self.persistent_workers:
            options = {
                "num_workers": self.num_workers,
                "pin_memory": self.pin_memory and can_pin(),
                "timeout": self.timeout,
                "multiprocessing_context": self.multiprocessing_context,
                "generator": ahead,
                "prefetch_factor": self.prefetch_factor,
                "persistent_workers": self.persistent_workers,
                "in_order": self.in_order,
            }
            self._engine = Engine(fetcher, self.snapshot_every_n_steps, self.worker_init_fn, options)
        return Workers(
            self._engine,
            self.num_workers,
            seed=self._seeds.base_seed if self._seeds.chained else None,
            saved=saved,
            first=0,
            in_order=self.in_order,
            persistent=self.persistent_workers,
            wait=self.in_order and self.worker_init_fn is not None,
        )

    def _ended(self, epoch: Epoch) -> None:
        """An epoch has come to its end by itself, or was ended."""
        if epoch is not self._current:
            return
        self._epoch = epoch.place.epoch + 1
        self._loaded = None
        self._fold(epoch.place)
        if not self.persistent_workers:
            self._engine = None

    def _fold(self, place: Place) -> None:
        """Let a sampler by position begin its next iteration where this one has ended."""
        if self._draws.by_position:
            sampler = self._draws.sampler
            sampler.load_state_dict(sampler.state_dict_at(place.samples - place.base))

    def _check_length(self, samples: int) -> None:
        if self._reported is None or samples <= self._reported:
            return
        message = (
            f"Length of IterableDataset {self.dataset} was reported to be {self._reported} (when accessing "
            f"len(dataloader)), but {samples} samples have been fetched. "
        )
        if self.num_workers:
            message += (
                "For multiprocessing data-loading, this could be caused by not properly configuring the "
                "IterableDataset replica at each worker: each must yield its own part of the data only"
            )
        warnings.warn(message, stacklevel=4)

    @property
    def epoch(self) -> int:
        """The epoch that is being iterated, or the next one; the first is 0."""
        return self._epoch

    @property
    def batches_yielded(self) -> int:
        """Batches yielded in this epoch, over all resumes."""
        if self._pending:
            assert self._loaded is not None
            return int(self._loaded["batches_yielded"])
        return 0 if self._current is None or self._current.finished else self._current.place.batches

    @property
    def last_indices(self) -> np.ndarray | None:
        """Dataset indices of the last batch that was yielded, as int64; None for an iterable dataset."""
        place = None if self._current is None else self._current.place
        return None if place is None or place.indices is None else as_array(place.indices)

    @property
    def last_positions(self) -> np.ndarray | None:
        """Global positions of the last batch's samples, where the sampler knows them."""
        indices = self.last_indices
        if indices is None or self._current is None or not hasattr(self._draws.sampler, "positions"):
            return None
        place = self._current.place
        return np.asarray(self._draws.sampler.positions(place.first - place.base, len(indices)))

    def end_epoch(self) -> None:
        """End this epoch here: the next `iter()` begins the next one, whatever was fetched ahead."""
        if self._pending:
            assert self._loaded is not None
            self._place(self._loaded)
            self._seed(self._loaded)
            if self._draws.by_skip:
                self._draws.sampler.set_skip(0)
            self._pending, self._loaded = False, None
            self._epoch += 1
        elif self._current is not None and not self._current.finished:
            self._current.close()
            self._current.finished = True
            self._ended(self._current)

    def state_dict(self) -> State:
        """The place after the last batch that was yielded.

        It is made of numbers, strings, lists and dicts, so that JSON can hold it, if the states of the dataset and
        the sampler are. Keys: `epoch`, `batches_yielded`, `sampler`, and others that `docs/loader.md` lists.
        """
        current = self._current
        if self._loaded is not None and (self._pending or current is None or not current.place.moved):
            return dict(self._loaded)
        in_epoch = current is not None and not current.finished
        place = current.place if in_epoch and current is not None else Place(self._epoch)
        state: State = {
            "version": VERSION,
            "loader": NAME,
            "style": "iterable" if self._iterable else "map",
            "epoch": place.epoch,
            "begun": in_epoch,
            "batches_yielded": place.batches,
            "samples_yielded": place.samples,
            "batch_size": self.batch_size,
            "num_workers": self.num_workers,
            "next_worker": current.next_worker() if in_epoch and current is not None else 0,
            "seeds": self._seeds.state(in_epoch),
            "sampler": self._sampler_state(place if in_epoch else None),
            "order": None,
            "dataset": self._untouched() if current is None else current.dataset_states(),
        }
        if place.done:
            state["out_of_order"] = list(place.done)
        if not self._iterable:
            state["dataset_size"] = size_of(self.dataset)
            in_order = current.order_state() if in_epoch and current is not None else self._draws.boundary_state()
            state["order"] = in_order
        return state

    def _sampler_state(self, place: Place | None) -> Any:
        draws = self._draws
        if draws.by_position:
            at = draws.sampler.state_dict_at
            return draws.sampler.state_dict() if place is None else at(place.samples - place.base)
        if draws.by_skip:
            return draws.sampler.state_dict()
        epoch = getattr(self.sampler, "epoch", None)
        return {"epoch": epoch} if isinstance(epoch, int) and hasattr(self.sampler, "set_epoch") else None

    def _untouched(self) -> States | None:
        """The state of the dataset before the first iteration, if it is iterated in this process."""
        if self.num_workers or not is_stateful(self.dataset) or is_collated(self.dataset):
            return None
        own = self.dataset.state_dict()  # type: ignore[attr-defined]
        if self._iterable and is_iterator(self.dataset):
            return [{"dataset": None, "iterator": own, "samples": 0, "ended": False, "boundary": False}]
        return [{"dataset": own, "iterator": None, "samples": 0, "ended": False, "boundary": self._iterable}]

    def load_state_dict(self, state: State) -> None:
        """Go on from `state` at the next `iter()`: one rank's, or one aggregated from all ranks.

        Raises:
            LoaderStateError: it was written by another loader, lacks something, or does not fit.
        """
        restartable.require(state, (), NAME)
        if "ranks" in state:
            state = self.deaggregate_state_dict(state, *restartable.current_ranks())
        check(state, self._iterable, None if self._iterable else size_of(self.dataset), self._draws.seeds_itself)
        if self._current is not None:
            self._current.close()
            self._current = None
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        if self._draws.seeds_itself and state.get("sampler") is not None:
            self._draws.sampler.load_state_dict(state["sampler"])
        elif hasattr(self.sampler, "set_epoch") and "epoch" in (state.get("sampler") or ()):
            self.sampler.set_epoch(state["sampler"]["epoch"])
        self._epoch = state["epoch"]
        if self._draws.by_skip and begun(state):
            # Only this count is exact: a reference's batches may be more than an epoch, as its last one is short.
            check_samples(state.get("samples_yielded", 0), size_of(self._draws.sampler))
            self._draws.sampler.set_skip(self._samples_of(state))
        self._loaded, self._pending = state, True

    def _samples_of(self, state: State) -> int:
        """Samples yielded in the epoch; the reference's states count batches only."""
        if "samples_yielded" in state:
            return int(state["samples_yielded"])
        return int(state["batches_yielded"]) * int(state.get("batch_size") or self.batch_size or 1)

    def aggregate_state_dict(self, states: Sequence[State]) -> State:
        """One state out of those of all ranks, in the order of their ranks."""
        return aggregate(states)

    def deaggregate_state_dict(self, aggregated: State, rank: int, world_size: int) -> State:
        """The state that `rank` of `world_size` loads, out of one that `aggregate_state_dict` made.

        Raises:
            LoaderStateError: it cannot be shared out among that many ranks and workers.
        """
        return deaggregate(aggregated, rank, world_size, max(self.num_workers, 1), self._draws.by_position)


def first_of(drawn: Iterator[Any], seeds: SeedStream) -> Iterator[Any]:
    """`drawn`, whose sampler may draw from torch's global generator with its first index."""
    if seeds.seeds_itself:
        return drawn
    return _first_of(drawn, seeds)


def _first_of(drawn: Iterator[Any], seeds: SeedStream) -> Iterator[Any]:
    with seeds.lent():
        first = list(islice(drawn, 1))
    yield from first
    yield from drawn


def _default_sampler(dataset: Any) -> Any:
    from runner.data.sampler import DistributedSampler

    rank, world_size = restartable.current_ranks()
    return DistributedSampler(dataset, num_replicas=world_size, rank=rank)

"""Fetch batches of an iterable dataset, with a state after each batch.

A *leg* is the part of one shard that a process reads in one epoch. Usually a process has one leg, from its own shard.
After a resume with a different number of shards it may have more, because old shards that were not begun are queued and
read one after the other, under their old shard numbers.
"""

from __future__ import annotations

import copy
from itertools import islice
from types import FunctionType
from typing import Any

from exactdata.loading import protocols
from exactdata.loading.fetch import annotate, collate, is_iterator, is_stateful, items, load_end, load_state, stopped
from exactdata.loading.protocols import LoaderStateError, State

_CALLABLE_ITERATOR = type(iter(int, 1))  # the function may raise StopIteration to end the iterator


class StreamFetcher:
    """Fetch batches of an iterable-style dataset, and keep the state after each batch.

    A state is a dict with these keys:

    - `dataset` and `iterator`: the state of each, or None.
    - `samples`: how many samples to skip after restoring these two states.
    - `begun`, `ended`: whether a sample of this leg was yielded in this epoch, and whether the leg has ended. With
      `boundary`, `ended` is whether the dataset has ended in an earlier epoch.
    - `boundary`: whether `dataset` and `iterator` were saved between two epochs.
    - `owner`, `shard`: (number, shards) of the process, and (number, shards) under which this leg is read.
    - `waiting`: the remaining legs of this epoch.

    The loader records all this, because the dataset's state may not contain it.
    """

    def __init__(
        self, dataset: Any, collate_fn: Any, batch_size: int | None, drop_last: bool, watched: bool = False
    ) -> None:
        self.dataset = dataset
        self.watched = watched  # as in `MapFetcher`
        self.collate_fn = collate_fn
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.iterator: Any = None
        self.samples = 0  # number of samples of this leg yielded: the state of a stateless dataset
        self.ended = False
        self.legs = 0  # number of legs opened in this process; `samples` in a state refers to one leg
        self.exhausted = False  # whether the dataset has ended at least once, here or before the loaded state
        self._base: State | None = None  # state to return until the first batch is fetched
        self._failed: State | None = None  # after an error, the state after the previous batch
        self._waiting: list[State] = []
        self._owner = self._shard = (0, 1)
        self._epoch = 0
        self._acting = protocols.Acting(self._owner, self._epoch)
        self._opened: State = {}  # state when this leg was opened, `_opened_at` samples after its start
        self._opened_at = 0
        self._was_begun = False

    def start(self, saved: State | None, epoch: int) -> None:
        """Begin an epoch, or resume from a saved state.

        Args:
            saved: the state of this shard. If None, begin from the start.
            epoch: the loader's epoch.

        Raises:
            ValueError: the dataset ends within the samples to skip.
        """
        self._owner, self._epoch = protocols.shard(), epoch
        self._waiting = [] if saved is None else list(saved["waiting"])
        self._open(saved, self._owner if saved is None or not saved["begun"] else tuple(saved["shard"]))

    def _open(self, saved: State | None, shard: tuple[int, int]) -> None:
        self._base, self._failed, self.samples, self.ended = None, None, 0, False
        self.legs += 1
        self._shard, self._was_begun = shard, saved is not None and saved["begun"]
        self._acting = protocols.Acting(shard, self._epoch)
        with self._acting:
            if saved is None:
                self._begin()
            else:
                self._restore(saved)
        self._opened, self._opened_at = copy.deepcopy(self.state()), self.samples

    def _begin(self) -> None:
        before = self.dataset.state_dict() if is_stateful(self.dataset) and not is_iterator(self.dataset) else None
        self.iterator = iter(self.dataset)
        if before is not None and not is_stateful(self.iterator):
            self._base = self._state(dataset=before, ended=self.exhausted, boundary=True)

    def _restore(self, saved: State) -> None:
        if saved["boundary"] or saved["ended"]:
            load_end(self.dataset, saved, protocols.Acting(tuple(saved["shard"]), self._epoch))
            if saved["boundary"]:
                self.iterator = iter(self.dataset)
            else:
                self.ended, self.exhausted = not self._waiting, True
                self.iterator = iter(())
        else:
            if saved["dataset"] is not None:
                load_state(self.dataset, saved["dataset"])
            self.iterator = iter(self.dataset)
            if saved["iterator"] is not None:
                load_state(self.iterator, saved["iterator"])
        self._skip(saved)

    def _skip(self, saved: State) -> None:
        ended = saved["ended"] and not saved["boundary"]
        skip = 0 if ended else saved["samples"]
        skipped = sum(1 for _ in islice(items(self.iterator), skip))
        if skipped < skip:
            raise ValueError(
                f"the dataset {type(self.dataset).__name__} ended after {skipped} of the {skip} samples to skip: it is "
                "shorter than when the state was saved; use the same data, or start it from the beginning"
            )
        if not self.is_stateful:
            self.samples = saved["samples"]
        if ended or (self.is_stateful and not skip):
            # Keep the saved state until a sample is taken, because a generator has not started to run yet.
            self._base = {**saved, "owner": list(self._owner), "shard": list(self._shard)}

    @property
    def is_stateful(self) -> bool:
        return is_stateful(self.iterator) or is_stateful(self.dataset)

    def fetch(self) -> tuple[Any, int]:
        """Return the next batch, and the number of samples in it.

        Raises:
            StopIteration: the dataset has ended.
            RuntimeError: the dataset raised StopIteration before its end.
            Exception: any error from the dataset. The index of the sample and the process are added to the message.
        """
        before = self._opened, self.samples - self._opened_at, list(self._waiting)
        samples: list[Any] = []
        try:
            while not self.ended and not self._fill(samples):
                if self._waiting:
                    leg = self._waiting.pop(0)
                    self._open(leg, tuple(leg["shard"]))
                else:
                    self.ended = True
            if not samples or (self.drop_last and len(samples) < (self.batch_size or 1)):
                raise StopIteration
            batch = collate(self.collate_fn, samples[0] if self.batch_size is None else samples)
        except StopIteration:
            raise
        except BaseException:  # includes KeyboardInterrupt
            opened, since, waiting = before
            self._failed = {**opened, "samples": opened["samples"] + since, "waiting": waiting}
            self._failed["begun"] = opened["begun"] or since > 0
            raise
        self._base = self._failed = None
        return batch, len(samples)

    def _fill(self, samples: list[Any]) -> bool:
        """Add samples of this leg to a batch, and return whether the batch is full. If not, the leg has ended."""
        was_begun = self._was_begun or self.samples > 0
        first, full = len(samples), True
        try:
            with self._acting:
                keep, take = samples.append, self.iterator.__next__
                for _ in range(1 if self.batch_size is None else self.batch_size - first):
                    keep(take())
        except StopIteration as error:
            if _is_of_a_callback(error, self.iterator):
                raise stopped(f"a function that {type(self.dataset).__name__} maps") from error
            full, self.exhausted = False, True
        except Exception as error:
            annotate(error, f"sample {len(samples)} of the next batch of {type(self.dataset).__name__}")
            raise
        finally:
            self.samples += len(samples) - first
        if self._shard != self._owner and not was_begun and not self._acting.asked:
            raise LoaderStateError(
                f"the number of ranks or workers changed, and {type(self.dataset).__name__} does not ask "
                "exactdata.shard() which part to read: resume with the same number of both, or let it ask"
            )
        return full

    def state(self) -> State:
        """Return the state after the last batch returned by `fetch`."""
        if self._failed is not None:
            return self._failed
        if self._base is not None:
            return {**self._base, "waiting": list(self._waiting)}
        same = self.iterator is self.dataset
        inner = self.iterator.state_dict() if is_stateful(self.iterator) else None
        outer = self.dataset.state_dict() if is_stateful(self.dataset) and not (same and inner is not None) else None
        known = inner is not None or outer is not None
        return self._state(dataset=outer, iterator=inner, samples=0 if known else self.samples, ended=self.ended)

    def boundary_state(self) -> State:
        """Return the state between the epoch that has ended and the next epoch."""
        dataset = self.dataset.state_dict() if is_stateful(self.dataset) else None
        return {**self._state(dataset=dataset, ended=True, boundary=True), "begun": False}

    def _state(
        self, dataset: Any = None, iterator: Any = None, samples: int = 0, ended: bool = False, boundary: bool = False
    ) -> State:
        return {
            **between_epochs(self._owner, dataset, iterator),
            "samples": samples,
            "begun": self._was_begun or self.samples > 0 or (ended and not boundary),
            "ended": ended,
            "boundary": boundary,
            "shard": list(self._shard),
            "waiting": list(self._waiting),
        }


def between_epochs(owner: tuple[int, int], dataset: Any = None, iterator: Any = None) -> State:
    """Return the state of a shard that has not begun.

    Args:
        owner: number of the shard, and number of shards.
        dataset: the dataset's state, if it has one.
        iterator: the dataset's state, if the dataset is its own iterator.
    """
    return {
        "dataset": dataset,
        "iterator": iterator,
        "samples": 0,
        "begun": False,
        "ended": False,
        "boundary": iterator is None,
        "owner": list(owner),
        "shard": list(owner),
        "waiting": [],
    }


def has_ended(state: State) -> bool:
    """Return whether the shard with this state has nothing left to read in this epoch."""
    return bool(state["ended"] and not state["boundary"] and not state["waiting"])


def _is_of_a_callback(error: StopIteration, iterator: Any) -> bool:
    """Return whether the error is from a function called by an iterator written in C, such as `map`.

    A Python generator converts such an error to a RuntimeError. A `__next__` method may raise it on purpose.
    """
    raised_in = error.__traceback__ and error.__traceback__.tb_next
    if raised_in is None or isinstance(type(iterator).__next__, FunctionType):
        return False
    return not isinstance(iterator, _CALLABLE_ITERATOR) and raised_in.tb_frame.f_code.co_name != "__next__"

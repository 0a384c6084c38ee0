"""Provide ElasticSampler, whose global sequence of samples is the same for any number of ranks, batches and workers.

`exactdata.order.sequence.ElasticSequence` computes the sequence. This module selects the samples of one rank, saves and
loads the state, and changes the order during a run. Rank r of N takes positions start + r, start + r + N, ... The
micro-batches of all ranks therefore cover a contiguous range of positions, and after every step the samples consumed
are exactly a prefix of the sequence.

This module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np

from exactdata.errors import nearest
from exactdata.order.arrays import I64, U64
from exactdata.order.exclusions import Exclusion, Exclusions, Selections, check_selections, excluded_from
from exactdata.order.packed import pack_json, unpack_json
from exactdata.order.plan import OrderPlan
from exactdata.order.segments import (
    Segment,
    check_sizes,
    check_values,
    planned_segments,
    segment_at,
    segments_from_json,
)
from exactdata.order.sequence import VERSION, ElasticSequence
from exactdata.order.spans import END
from exactdata.order.state_checks import (
    ListOf,
    MapOf,
    Record,
    any_integer,
    anything,
    check,
    check_same_seal,
    digest_of,
    flag,
    mapping,
    shown,
    text,
    whole,
)
from exactdata.order.weights import (
    SamplerError,
    SamplerStateError,
    Weights,
    integer,
    replicas_and_rank,
    weights_by_name,
)

_INT64_MAX = int(np.iinfo(np.int64).max)
_STATE = Record(
    {
        "seed": any_integer,
        "shuffle": flag,
        "position": whole(),
        "samples": whole(),
        "num_replicas": whole(1),
        "global_batch_size": whole(1),
        "order": text,
        "seal": text,
    }
)
_ORDER = Record(  # fields of the JSON text in `order`
    {
        "sizes": MapOf(whole()),
        "retired": ListOf(text),
        "segments": anything,
        "exclusions": ListOf(mapping),
        "plan": mapping,
    }
)
_MESSAGE = (
    "the saved data order has {key} {value}; expected {allowed}: it was truncated or edited; use another checkpoint"
)

FIRST = 256  # samples in the first block
MOST = 8192  # maximum samples in a block; larger blocks are no cheaper per sample


@dataclass
class Iteration:
    """The progress of one iteration. Iterations do not share it, so an older iteration can be continued.

    Attributes:
        start: position in the order at which the iteration began.
        counted: samples of this rank before `start` that the loaded state includes.
        drawn: number of samples drawn for this rank.
        follow: returns how many of the drawn samples the loader has yielded. If None, all of them.
    """

    start: int = 0
    counted: int = 0
    drawn: int = 0
    follow: Callable[[], int] | None = None

    @property
    def yielded(self) -> int:
        """Return how many samples the iteration has yielded on this rank."""
        return self.drawn if self.follow is None else self.follow()

    def __getstate__(self) -> dict[str, Any]:
        return {"start": self.start, "counted": self.counted, "drawn": self.yielded, "follow": None}


class ElasticIterator(Iterator[Any]):
    """Iterate over the order once, as an `exactdata.loading.index_stream.ChangingIndices`.

    Args:
        sampler: the sampler to iterate over.
        iteration: the progress of the iteration, with the position where it begins.
        draw: returns a generator of the items that follow the samples drawn so far.
    """

    def __init__(
        self, sampler: ElasticSampler, iteration: Iteration, draw: Callable[[Iteration], Iterator[Any]]
    ) -> None:
        self._sampler = sampler
        self._iteration = iteration
        self._draw = draw
        self._items = draw(iteration)

    def __next__(self) -> Any:
        return next(self._items)

    @property
    def version(self) -> int:
        """Return the version of the order. It grows with every change."""
        return self._sampler.order_version

    def follow(self, yielded: Callable[[], int]) -> None:
        """Apply changes after the samples that the loader has yielded, not after those drawn. `yielded` counts them."""
        self._iteration.follow = yielded

    def seek(self, samples: int) -> None:
        """Continue after the first `samples` samples of the iteration, counted on this rank."""
        self._iteration.drawn = samples
        self._items = self._draw(self._iteration)


class ElasticSampler:
    """Sample indices into a MixtureDataset, in an order that does not depend on ranks or batches.

    Memory and start-up cost do not depend on the number of samples. Any position can be looked up directly.

    Example:
        ```python
        from exactdata import ElasticSampler

        options = {"global_batch_size": 8, "seed": 1, "samples": 32}
        sizes, weights = {"code": 90, "prose": 30}, {"code": 2, "prose": 1}
        sampler = ElasticSampler(sizes, weights, num_replicas=1, rank=0, **options)
        order = list(sampler)
        state = sampler.state_dict_at(16)  # after two global batches

        rest = []
        for rank in range(2):  # resume on two ranks
            sampler = ElasticSampler(sizes, weights, num_replicas=2, rank=rank, **options)
            sampler.load_state_dict(state)
            rest.append(list(sampler))
        assert [index for pair in zip(*rest) for index in pair] == order[16:]
        print(sampler.locate(20))  # source, index and epoch of the sample at position 20
        ```

    Args:
        sizes: number of samples by source name, in the order of the MixtureDataset.
        weights: a weight for every source, by name or in the order of `sizes`. Weight 0 excludes a source.
        global_batch_size: samples per step over all ranks, a multiple of num_replicas. It does not affect the order.
        num_replicas: number of ranks. If None, the world size of torch.distributed, or 1 without it.
        rank: this rank. If None, the rank in torch.distributed, or 0 without it.
        seed: seed of the order.
        temperature: shares are proportional to weight^(1/temperature).
        segments: planned weight changes, as Segments, mappings, or tuples (start, weights, temperature). Sources that a
            segment does not name have their weight from `weights`.
        max_epochs: maximum epochs of a source, as one number for all sources or by name. A source at its cap is no
            longer drawn, and the sampler ends when every source has reached its cap.
        exclude: samples to skip from now on, as `NAME:INDEX`, `NAME:FIRST-LAST` or `positions:FIRST-LAST`. Both ends
            are included.
        samples: length of the run in samples, counted over all ranks. It does not affect the order, and may differ
            after a resume. Each rank gets the same number of samples, and the remainder is dropped.
        epochs: length of the run as a multiple of the total size of the sources with a positive weight. Pass at most
            one of `samples` and `epochs`.
        epoch_samples: length of one pass in samples, counted over all ranks. Each iteration yields one pass, and
            `set_epoch(e)` moves to position e * epoch_samples. It does not affect the order, and may differ after a
            resume. If too few samples for all ranks are left in a pass, they begin the next pass. If None, the complete
            order is one pass.
        shuffle: if False, yield each source in its stored order, epoch after epoch. Sources are interleaved as before.
        allow_data_change: let `load_state_dict` accept a state that was saved with different weights, segments, caps or
            sources. The new plan applies from the position in the state on.

    Attributes:
        order: the `ElasticSequence`, which looks up shares, keys and epochs at any position.
        order_version: a number that grows with every change of the order.
        sizes: number of samples by source name.
        limit: the position at which `samples` or `epochs` ends the sampler. If None, the sampler ends only when the
            order does.

    Raises:
        SamplerError: a source is unknown, a weight is invalid, or the ranks cannot share the global batch evenly.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        weights: Weights,
        *,
        global_batch_size: int,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        temperature: float = 1.0,
        segments: Iterable[Segment | Mapping[str, Any] | Sequence[Any]] | None = None,
        max_epochs: float | Mapping[str, float] | None = None,
        exclude: Iterable[str] = (),
        samples: int | None = None,
        epochs: float | None = None,
        epoch_samples: int | None = None,
        shuffle: bool = True,
        allow_data_change: bool = False,
    ) -> None:
        self.num_replicas, self.rank = replicas_and_rank(num_replicas, rank)
        self.global_batch_size = check_global_batch(global_batch_size, self.num_replicas)
        self.seed = integer("seed", seed)
        self.shuffle, self.allow_data_change = bool(shuffle), bool(allow_data_change)
        self.sizes = check_sizes(sizes)
        if max_epochs is None or isinstance(max_epochs, Mapping):
            caps = dict(max_epochs or {})
        else:
            caps = dict.fromkeys(sizes, max_epochs)
        self._base = Segment(0, weights_by_name(weights, self.sizes), temperature, caps)
        self._plan = OrderPlan(planned_segments(segments or (), self._base), Selections.parse(exclude))
        self.limit = self._limit_of(samples, epochs)
        self.epoch_samples = None if epoch_samples is None else integer("epoch_samples", epoch_samples, 1)
        if self.epoch_samples is not None and self.epoch_samples < self.num_replicas:
            raise SamplerError(
                f"epoch_samples {epoch_samples}: it must be at least {self.num_replicas}, one per replica"
            )
        self._position = 0  # where the next iteration starts, unless a skip is set
        self._counted = 0, self.num_replicas  # samples per rank in the loaded state, and its number of ranks
        self._iteration = Iteration()
        self._skip = 0
        self._fixed: tuple[ElasticSequence, dict[str, Any], str] | None = None  # cache of `_fixed_state`
        self._retired: dict[str, int] = {}  # sizes of sources that an earlier part of the run used
        self.order: ElasticSequence
        self.order_version = 0
        self._order_inputs: tuple[Any, ...] = ()
        self._set_order(self._plan.segments, ())
        if self._plan.exclude:
            check_selections(self._plan.exclude, 0, self.sizes)
            self._set_order(self._plan.segments, excluded_from(self._plan.exclude, 0, self.order.key_ranges))

    def _limit_of(self, samples: int | None, epochs: float | None) -> int | None:
        """Return the position at which `samples` or `epochs` ends the sampler, or None if neither was passed."""
        if samples is not None and epochs is not None:
            raise SamplerError(f"samples={samples!r} and epochs={epochs!r}: pass one of the two")
        if samples is not None:
            return integer("samples", samples, 0)
        if epochs is None:
            return None
        if isinstance(epochs, bool) or not hasattr(epochs, "__float__") or not 0 <= epochs < math.inf:
            raise SamplerError(f"epochs {epochs!r}: it must be a finite number of 0 or more")
        size = sum(size for name, size in self.sizes.items() if self._base.weights[name] > 0)
        samples = int(Fraction(str(epochs)) * size)
        if samples > END:
            raise SamplerError(f"epochs {epochs!r} of {size} samples: at most 2^62 samples can be counted; lower it")
        return samples

    # --- iteration -------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Begin the next iteration at pass `epoch`, unless a loaded state is already within that pass.

        Has no effect without `epoch_samples`. In that case only sources have epochs, and an iteration spans many of
        them.

        Raises:
            SamplerError: `epoch` is not an integer >= 0.
        """
        if self.epoch_samples is not None and self.pass_of(self._position) != integer("epoch", epoch, 0):
            self._position, self._counted, self._skip = epoch * self.epoch_samples, (0, self.num_replicas), 0

    def pass_of(self, position: int) -> int:
        """Return the pass, from 0, of the samples from `position` on.

        Samples at the end of a pass that are too few for all ranks belong to the next pass.
        """
        return 0 if self.epoch_samples is None else (position + self.num_replicas - 1) // self.epoch_samples

    def set_skip(self, skip: int) -> None:
        """Skip the first `skip` samples of this rank, in the next iteration only.

        After `load_state_dict`, `skip` includes the samples that the state already covers. A loader can therefore pass
        every sample it has counted, and none is skipped twice.

        Raises:
            SamplerError: the skip is negative, or leads to a position before 0.
        """
        skip = integer("skip", skip, 0)
        counted, replicas = self._counted
        if skip and self._position + (skip - counted) * replicas < 0:
            raise SamplerError(
                f"skip {skip}: the loaded state counts {counted} samples per rank at position {self._position}; "
                "skip at least as many, or 0 to continue from there"
            )
        self._skip = skip

    def __len__(self) -> int:
        """Return the number of samples of this rank in a complete iteration, including those before a loaded state.

        The length is the same before and after a resume, so that progress bars stay correct.

        Raises:
            TypeError: the order is endless.
        """
        stop = self._stop(self._iteration)
        if stop is None:
            raise TypeError(
                "the elastic order is endless, so that it has no length: pass samples=N or epochs=N to ElasticSampler, "
                "or cap every source with max_epochs"
            )
        return self._iteration.counted + max(0, stop - self._iteration.start) // self.num_replicas

    def samples_left_after(self, samples: int) -> int:
        """Return how many samples are left for this rank after the first `samples` samples of the current iteration.

        Raises:
            TypeError: the order is endless.
        """
        return len(self) - self._iteration.counted - samples

    def _stop(self, iteration: Iteration) -> int | None:
        """Return the position at which an iteration ends, or None if it never ends."""
        ends = [end for end in (self.order.total, self.limit) if end is not None]
        if self.epoch_samples is not None:
            ends.append((self.pass_of(iteration.start) + 1) * self.epoch_samples)
        return min(ends, default=None)

    def __iter__(self) -> Iterator[int]:
        return ElasticIterator(self, self._start_iteration(), self._integers)

    def iter_batches(self, batch_size: int, drop_last: bool) -> Iterator[I64]:
        """Yield the samples of `__iter__` in arrays. Like `__iter__`, apply the skip to this iteration only.

        Args:
            batch_size: samples per array, at least 1.
            drop_last: drop an incomplete last array, at the end of a capped order.

        Yields:
            Dataset indices, int64 of shape (batch_size,).
        """
        draw = partial(self._batches, batch_size=integer("batch_size", batch_size, 1), drop_last=drop_last)
        return ElasticIterator(self, self._start_iteration(), draw)

    def _start_iteration(self) -> Iteration:
        in_state, replicas = self._counted
        counted = self._skip or in_state
        self._iteration = Iteration(self._position + (counted - in_state) * replicas, counted)
        self._skip, self._counted = 0, (0, self.num_replicas)
        return self._iteration

    def _remaining(self, iteration: Iteration, drawn: int) -> int:
        """Return how many samples each rank still gets. Final samples that are too few for all ranks are dropped."""
        stop = self._stop(iteration)
        return ((END if stop is None else stop) - iteration.start) // self.num_replicas - drawn

    def _integers(self, iteration: Iteration) -> Iterator[int]:
        return (int(batch[0]) for batch in self._batches(iteration, 1, drop_last=True))

    def _batches(self, iteration: Iteration, batch_size: int, drop_last: bool) -> Iterator[I64]:
        remaining, positions = partial(self._remaining, iteration), partial(self._positions, iteration)
        return drawn_in_blocks(self, iteration, batch_size, drop_last, remaining, positions)

    # --- lookups ---------------------------------------------------------------------------------

    def positions(self, first: int, count: int) -> I64:
        """Return the positions of this rank's samples [first, first + count), counted in the current iteration.

        Returns:
            int64 of shape (count,).
        """
        return self._positions(self._iteration, first, count)

    def _positions(self, iteration: Iteration, first: int, count: int) -> I64:
        start, replicas = iteration.start + self.rank, self.num_replicas
        return np.arange(start + first * replicas, start + (first + count) * replicas, replicas, dtype=np.int64)

    def sample_keys(self, first: int, count: int) -> U64:
        """Return a 64-bit hash of (seed, source, key) for each of the samples at `positions(first, count)`.

        Returns:
            uint64 of shape (count,).
        """
        return self.order.sample_keys(self.positions(first, count))

    def indices_at(self, positions: I64) -> I64:
        """Return the dataset index of the sample at each position. Both arrays are int64 of shape (count,)."""
        return self.order.indices_at(positions)

    def locate(self, position: int | I64) -> tuple[Any, Any, Any]:
        """Look up the sample at a position in the order.

        Args:
            position: an integer, or integers of shape (count,).

        Returns:
            Source name, index within the source, and epoch of the source. If `position` is an array, all three are
                arrays of shape (count,).

        Raises:
            SamplerError: `position` is not an integer, or is outside the order.
        """
        ids, index, epochs = self.order.locate(np.atleast_1d(_integers("position", position)))
        if np.ndim(position) == 0:
            return self.order.names[int(ids[0])], int(index[0]), int(epochs[0])
        return np.array(self.order.names)[ids], index, epochs

    def find(self, source: Any, index: Any, epoch: Any) -> Any:
        """Return the position at which a sample is consumed. This is the inverse of `locate`.

        Args:
            source: a source name, or names of shape (count,).
            index: index within the source, or an array.
            epoch: epoch of the source, or an array. Scalars are broadcast against arrays.

        Returns:
            The position, or int64 positions of shape (count,). The position is -1 if the sample is never consumed,
            because it is excluded or capped, its source is no longer drawn, or its position is above 2^62.

        Raises:
            SamplerError: the source is unknown, or has no such index or epoch.
        """
        wanted = np.atleast_1d(source), _integers("index", index), _integers("epoch", epoch)
        if wanted[0].ndim > 1:
            raise SamplerError(f"source {source!r}: it must be a name or a one-dimensional array of names")
        names, index_array, epochs = np.broadcast_arrays(*wanted)
        ids = np.array([self._id_of(str(name)) for name in names.tolist()], np.int64)
        size = np.array([self.order.sizes[self.order.names[i]] for i in ids.tolist()])
        if ((index_array < 0) | (index_array >= size) | (epochs < 0)).any():
            raise SamplerError("find: every index must be within its source, and every epoch 0 or more")
        found = self.order.find(ids, index_array.astype(np.int64), epochs.astype(np.int64))
        return int(found[0]) if np.ndim(source) == np.ndim(index) == np.ndim(epoch) == 0 else found

    def _id_of(self, name: str) -> int:
        if name not in self.order.sizes:
            raise SamplerError(f"unknown source {name!r}{nearest(name, self.order.sizes)}")
        return self.order.id_of(name)

    # --- changes during a run --------------------------------------------------------------------

    def update_weights(self, weights: Weights, temperature: float = 1.0, *, position: int | None = None) -> None:
        """Change weights and temperature from `position` on. Every source continues with its next sample.

        All ranks must make the same change after the same number of samples.

        Args:
            weights: by source name, or one per source. Sources that are not named have their weight from the
                constructor.
            temperature: shares are proportional to weight^(1/temperature).
            position: where the change begins. By default, the first position that the current iteration has not yielded
                on any rank. Planned segments that begin later still apply.

        Raises:
            SamplerError: a weight is invalid, or `position` was already yielded.
        """
        at = self._first_changeable(position)
        segments = self.order.segments
        current = segment_at(segments, at)
        named = weights_by_name(weights, self.sizes, self._base.weights)
        is_now = at == self._position_after(self._iteration.yielded)  # no other change can come before this one
        if is_now and (named, temperature) == (current.weights, current.temperature):
            return
        segment = replace(current, start=at, weights=named, temperature=temperature)
        check_values([segment])
        changed = [*(one for one in segments if one.start != at), segment]
        self._set_order(tuple(sorted(changed, key=lambda one: one.start)), self.order.exclusions)

    def exclude(self, texts: Iterable[str], *, position: int | None = None) -> None:
        """Exclude more samples from `position` on.

        Args:
            texts: as `exclude` in the constructor. Positions refer to the order before this call.
            position: as for `update_weights`.

        Raises:
            SamplerError: an exclusion is invalid, or `position` was already yielded.
        """
        at, selections = self._first_changeable(position), Selections.parse(texts)
        check_selections(selections, at, self.sizes)
        added = excluded_from(selections, at, self.order.key_ranges, planned=False)
        self._set_order(self.order.segments, self.order.exclusions + added)

    def _first_changeable(self, position: int | None) -> int:
        """Return the position where a change begins: `position`, or if None, the first one not yet yielded."""
        reached = self._position_after(self._iteration.yielded)
        if position is None:
            return reached
        position = integer("position", position, 0)
        if position < reached:
            raise SamplerError(
                f"position {position}: a change cannot begin before position {reached}, the first not yet consumed"
            )
        return position

    def _position_after(self, samples: int) -> int:
        """Return the position in the order after each rank has taken `samples` samples of the current iteration."""
        return self._iteration.start + samples * self.num_replicas

    def _set_order(
        self, segments: tuple[Segment, ...], exclusions: Exclusions, retired: Mapping[str, int] | None = None
    ) -> None:
        retired = self._retired if retired is None else dict(retired)
        sizes = {**self.sizes, **retired}
        inputs = sizes, segments, exclusions
        if self._order_inputs == inputs:
            return
        self.order = self._sequence(sizes, segments, exclusions)
        self._retired = retired
        self._order_inputs = inputs
        self.order_version += 1

    def _sequence(
        self, sizes: Mapping[str, int], segments: tuple[Segment, ...], exclusions: Exclusions
    ) -> ElasticSequence:
        absent = tuple(name for name in sizes if name not in self.sizes)
        return ElasticSequence(sizes, self.seed, segments, exclusions, absent=absent, shuffle=self.shuffle)

    # --- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state after all samples that the current iteration has yielded, as `state_dict_at` does."""
        return self.state_dict_at(self._iteration.yielded)

    def state_dict_at(self, samples: int) -> dict[str, Any]:
        """Return the JSON-serializable state after `samples` samples of each rank in the current iteration.

        The state contains the global position, so no skip is needed after `load_state_dict`, on any number of ranks. It
        also records the samples per rank up to that position. A loader that skips every sample it has counted therefore
        reaches the same position; see `set_skip`.
        """
        fixed, digest = self._fixed_state()
        position, counted = self._position_after(samples), self._iteration.counted + samples
        if self.pass_of(position) != self.pass_of(self._iteration.start):
            counted = 0  # the state belongs to the next pass
        return {**fixed, "position": position, "samples": counted, "seal": _seal(digest, position, counted)}

    def _fixed_state(self) -> tuple[dict[str, Any], str]:
        """Return the part of a state that does not depend on the position, and its digest. Cached for each order.

        The order is stored as one JSON string, without its segments if they equal the plan's. The cost of a state then
        does not depend on the number of segments, and editing one state cannot change another.
        """
        if self._fixed is None or self._fixed[0] is not self.order:
            same = self.order.segments is self._plan.segments
            order = {
                "sizes": dict(self.order.sizes),
                "retired": sorted(self._retired),
                "segments": None if same else [one.to_json() for one in self.order.segments],
                "exclusions": [one.to_json() for one in self.order.exclusions],
                "plan": self._plan.to_json(),
            }
            state = {
                "kind": "elastic",
                "version": VERSION,
                "seed": self.seed,
                "shuffle": self.shuffle,
                "num_replicas": self.num_replicas,
                "global_batch_size": self.global_batch_size,
                "order": pack_json(order),
            }
            self._fixed = self.order, state, digest_of(state)
        return self._fixed[1:]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state saved with any number of ranks and any batch size.

        Raises:
            SamplerStateError: the state is truncated or edited, or has a different version, seed or source size. Also
                raised if its weights, segments, caps or sources differ and `allow_data_change` is not set.
        """
        state = opened_state(state)
        for name, own in (("seed", self.seed), ("shuffle", self.shuffle)):
            if state[name] != own:
                raise SamplerStateError(
                    f"the saved data order has {name} {state[name]}, this sampler has {name} {own}: set {name} "
                    "to the saved value"
                )
        for name, size in state["sizes"].items():
            if self.sizes.get(name, size) != size:
                raise SamplerStateError(
                    f"source {name!r} had {size} samples when the state was saved and has {self.sizes[name]} now: "
                    "restore it, or remove it and add the new data under another name"
                )
        changes = self.changes_from(state)
        if changes and not self.allow_data_change:
            raise SamplerStateError(
                f"the data order differs from the saved one: {'; '.join(changes)}; "
                "go back to that, or pass allow_data_change=True to go on with this one"
            )
        self._adopt(state)

    def changes_from(self, state: Mapping[str, Any]) -> list[str]:
        """List the differences between this sampler's plan and the plan in an `opened_state`, one message each."""
        known = set(state["sizes"]) - set(state["retired"])
        changes = [f"source {name!r} is new" for name in self.sizes if name not in known]
        changes += [f"source {name!r} is retired" for name in sorted(known) if name not in self.sizes]
        return changes + self._plan.changes_from(state["plan"], state["position"])

    def _adopt(self, state: Mapping[str, Any]) -> None:
        position = state["position"]
        saved_segments = state["segments"]
        segments, exclusions = self._plan.continued(
            state["plan"],
            saved_segments,
            state["exclusions"],
            position,
            self.sizes,
            lambda exclusions: self._sequence(state["sizes"], saved_segments, exclusions),
        )
        retired = {name: size for name, size in sorted(state["sizes"].items()) if name not in self.sizes}
        self._set_order(segments, exclusions, retired)
        self._position, self._skip = position, 0
        self._counted = state["samples"], state["num_replicas"]
        self._iteration = Iteration(position, state["samples"])


def drawn_in_blocks(
    sampler: ElasticSampler,
    iteration: Iteration,
    batch_size: int,
    drop_last: bool,
    left_after: Callable[[int], int],
    positions: Callable[[int, int], I64],
) -> Iterator[I64]:
    """Yield batches of indices, int64 of shape (batch_size,), and look them up in blocks.

    A lookup makes about a hundred numpy calls, which take as long for 16 samples as for 500. Blocks begin small and
    grow, so that the first batch, and the first batch after a change, do not wait for a large block.

    Args:
        sampler: the sampler. Its order may change after any batch.
        iteration: progress of the iteration. Its `drawn` grows with the samples yielded.
        batch_size: samples per batch.
        drop_last: drop an incomplete last batch.
        left_after: returns how many samples are left after a given number of samples.
        positions: called with (first, count), returns the positions of samples [first, first + count).
    """
    ahead = FIRST
    while (left := left_after(iteration.drawn)) >= (batch_size if drop_last else 1):
        order, size = sampler.order, min(batch_size, left)
        count = min(max(ahead // size, 1), left // size) * size  # complete batches only
        ahead = min(2 * ahead, MOST)
        for batch in order.indices_at(positions(iteration.drawn, count)).reshape(-1, size):
            iteration.drawn += size
            yield batch
            if sampler.order is not order:
                ahead = FIRST
                break  # the rest of this block is outdated


def _integers(what: str, value: Any) -> I64:
    """Convert an integer or a one-dimensional array of integers to int64, clipped to the int64 range.

    Raises:
        SamplerError: `value` is neither an integer nor such an array.
    """
    array = np.asarray(value)
    values = array.reshape(-1).tolist() if array.dtype.kind in "Ou" else []
    if values and all(isinstance(one, int) for one in values):
        array = np.array([max(-_INT64_MAX, min(one, _INT64_MAX)) for one in values], np.int64).reshape(array.shape)
    if array.ndim > 1 or (array.size and array.dtype.kind != "i"):
        raise SamplerError(f"{what} {value!r}: it must be an integer or a one-dimensional array of integers")
    return array.astype(np.int64)


def opened_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with its order parsed into sizes, retired, segments, exclusions and plan.

    Raises:
        SamplerStateError: the state is truncated or edited, or its version is unknown.
    """
    if not isinstance(state, Mapping):
        raise SamplerStateError(f"the saved sampler state is {shown(state)}: pass what state_dict() returned")
    version = state.get("version")
    if state.get("kind") != "elastic" or version is None:
        raise SamplerStateError(
            f"the saved sampler state has keys {shown(list(state))} and is not an elastic sampler's: "
            "use the sampler it was saved with, or start a new run"
        )
    if version != VERSION:
        raise SamplerStateError(
            f"the saved data order has version {shown(version)}; this program knows version {VERSION}: use the program "
            "that saved it"
        )
    check(state, _STATE, _MESSAGE, SamplerStateError)
    fixed = {name: value for name, value in state.items() if name not in ("position", "samples", "seal")}
    found = _seal(digest_of(fixed), state["position"], state["samples"])
    check_same_seal(state["seal"], found, "the saved data order", SamplerStateError)
    try:
        order = unpack_json(state["order"])
        check(order, _ORDER, _MESSAGE, SamplerStateError)
        order["plan"] = OrderPlan.from_json(order["plan"])
        segments = order["segments"]
        order["segments"] = order["plan"].segments if segments is None else segments_from_json(segments)
        order["exclusions"] = tuple(map(Exclusion.from_json, order["exclusions"]))
    except SamplerStateError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise SamplerStateError(
            f"the saved data order cannot be read ({error!r:.200}): it was edited; use another checkpoint"
        ) from None
    return {**state, **order}


def _seal(fixed: str, position: int, samples: int) -> str:
    """Compute the checksum of a state from the digest of its fixed part, the position and the samples."""
    return blake2b(f"{fixed} {position} {samples}".encode(), digest_size=8).hexdigest()


def check_global_batch(global_batch_size: int, num_replicas: int) -> int:
    """Check the global batch size and return it as an integer.

    Raises:
        SamplerError: it is not a multiple of `num_replicas`. The message names the nearest multiples.
    """
    global_batch_size = integer("global_batch_size", global_batch_size, 1)
    if global_batch_size % num_replicas:
        below = global_batch_size // num_replicas * num_replicas
        near = " or ".join(str(size) for size in (below, below + num_replicas) if size)
        raise SamplerError(
            f"global_batch_size {global_batch_size} is not a multiple of {num_replicas} replicas; the nearest is {near}"
        )
    return global_batch_size

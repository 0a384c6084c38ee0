"""ElasticSampler: the same global sequence of samples for any number of ranks, batches and workers.

The sequence itself is `runner.data.order.ElasticOrder`; here is one rank's part of it, the state, and the
changes that a run may make on its way. Rank r of N takes positions start + r, start + r + N, ...: a
micro-batch of all ranks is a run of positions, so any cut between steps leaves a prefix consumed.

No torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runner.data.hashing import U64
from runner.data.ledger_entries import Exclusion, Segment, as_segment, check_segment, check_sizes, parse_exclusions
from runner.data.order import END, VERSION, ElasticOrder
from runner.data.shares import SamplerError, SamplerStateError, check_temperature, integer, replicas_and_rank
from runner.errors import nearest

I64 = NDArray[np.int64]
Weights = Mapping[str, float] | Sequence[float]

_CHUNK = 4096  # at most so many positions are looked up at a time when samples are yielded one by one


@dataclass(frozen=True)
class Plan:
    """What the configuration asks for: all segments from position 0, and what to exclude."""

    segments: tuple[Segment, ...]
    exclude: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {"segments": [segment.to_json() for segment in self.segments], "exclude": sorted(self.exclude)}


@dataclass
class _Iteration:
    """How far one iteration has come; those of an older one stand still, or go on by themselves.

    Attributes:
        start: the position at which it began.
        counted: samples of this rank that were counted before `start`: those that the loaded state had given.
        yielded: samples of this rank that it has given.
    """

    start: int = 0
    counted: int = 0
    yielded: int = 0


class ElasticSampler:
    """Yields indices into the MixtureDataset of the sources, in an order that no shape of the job changes.

    Args:
        sizes: samples by source name, in the order of the MixtureDataset.
        weights: by source name (every source; 0 leaves one out), or in the order of `sizes`.
        global_batch_size: samples of one step over all ranks; a multiple of num_replicas. It does not
            change the order.
        num_replicas, rank: default to torch.distributed's, else to 1 and 0.
        seed: of everything random in the order.
        temperature: shares are proportional to weight^(1/temperature).
        segments: planned changes: Segments, mappings or tuples (start, weights, temperature); sources
            that one does not name keep their base weight.
        max_epochs: after how many epochs a source is drawn no more: one number for all, or by name.
            When no source is left the sampler ends; without it the sampler is endless.
        exclude: samples to leave out from now on: `NAME:INDEX`, `NAME:FIRST-LAST` or
            `positions:FIRST-LAST` (both ends included).
        shuffle: False gives each source in its own order, epoch after epoch; the interleaving stays.
        allow_data_change: let `load_state_dict` go on from a state that was made with other weights,
            segments, caps or sources: what was consumed stays, the new plan holds from there on.

    Raises:
        SamplerError: unknown sources, bad weights, a global batch that the ranks cannot share evenly.
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
        shuffle: bool = True,
        allow_data_change: bool = False,
    ) -> None:
        self.num_replicas, self.rank = replicas_and_rank(num_replicas, rank)
        self.global_batch_size = check_global_batch(global_batch_size, self.num_replicas)
        self.seed = integer("seed", seed)
        self.shuffle, self.allow_data_change = shuffle, allow_data_change
        self.sizes = check_sizes(sizes)
        caps = dict.fromkeys(sizes, max_epochs) if isinstance(max_epochs, int | float) else dict(max_epochs or {})
        check_temperature(temperature)
        self._base = Segment(0, _by_name(weights, self.sizes), float(temperature), caps)
        check_segment(self._base, self.sizes)
        self._plan = Plan(_planned(self._base, segments or ()), tuple(str(text) for text in exclude))
        self._position = 0  # where an iteration starts, unless there is a skip
        self._carried = 0, self.num_replicas  # samples of a rank that the loaded state had given, and its ranks
        self._now = _Iteration()
        self._skip = 0
        self._retired: dict[str, int] = {}  # sources that the run once had, and their sizes
        self.order: ElasticOrder
        self._inputs: tuple[Any, ...] = ()  # what the order was made from
        self._use(self._plan.segments, parse_exclusions(self._plan.exclude, 0, self.sizes))

    # --- iteration -------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Nothing: epochs belong to the sources, and the order goes on through them."""

    def set_skip(self, skip: int) -> None:
        """Leave out the first `skip` samples of this rank, once: in the next iteration only.

        After `load_state_dict` they are counted as the run that saved the state did, so that a loader may
        skip what it has counted on top of the state: what the state had given is not left out twice.

        Raises:
            SamplerError: a negative skip, or one to before the first position of all.
        """
        skip = integer("skip", skip, 0)
        carried, replicas = self._carried
        if skip and self._position + (skip - carried) * replicas < 0:
            raise SamplerError(
                f"skip {skip}: the loaded state had given {carried} samples a rank at position {self._position}; "
                "skip as many or more, or nothing to go on from there"
            )
        self._skip = skip

    def __len__(self) -> int:
        """Samples of this rank from the position of the state to the end.

        Raises:
            TypeError: there is no end, unless every source has a cap of epochs.
        """
        total = self.order.total
        if total is None:
            raise TypeError("the elastic order is endless: it has no length unless max_epochs caps every source")
        return max(0, total - self._position) // self.num_replicas

    def __iter__(self) -> Iterator[int]:
        return self._integers(self._open())

    def iter_batches(self, batch_size: int, drop_last: bool) -> Iterator[I64]:
        """The same sequence as `__iter__`, in int64 arrays of `batch_size` (a shorter last one at the end
        of a capped order, unless `drop_last`). Consumes the skip like `__iter__`."""
        if batch_size < 1:
            raise SamplerError(f"batch_size {batch_size}: it must be 1 or more")
        return self._batches(self._open(), batch_size, drop_last)

    def _open(self) -> _Iteration:
        carried, replicas = self._carried
        counted = self._skip or carried
        self._now = _Iteration(self._position + (counted - carried) * replicas, counted)
        self._skip, self._carried = 0, (0, self.num_replicas)
        return self._now

    def _left(self, now: _Iteration) -> int:
        """Samples that each rank still gets; the last few positions, too few for all ranks, are left."""
        stop = self.order.total or END
        return (stop - now.start) // self.num_replicas - now.yielded

    def _integers(self, now: _Iteration) -> Iterator[int]:
        chunk = 64  # grows: whoever takes a few samples pays for few
        while (count := min(chunk, self._left(now))) > 0:
            chunk = min(2 * chunk, _CHUNK)
            order = self.order
            for index in order.indices_at(self._positions(now, now.yielded, count)).tolist():
                now.yielded += 1
                yield index
                if self.order is not order:
                    break  # the weights were changed: the rest of the chunk is another

    def _batches(self, now: _Iteration, batch_size: int, drop_last: bool) -> Iterator[I64]:
        while (count := min(batch_size, self._left(now))) > 0:
            if drop_last and count < batch_size:
                return
            indices = self.order.indices_at(self._positions(now, now.yielded, count))
            now.yielded += count
            yield indices

    # --- where a sample stands -------------------------------------------------------------------

    def positions(self, first: int, count: int) -> I64:
        """Positions in the run of this rank's samples [first, first + count) of the current iteration."""
        return self._positions(self._now, first, count)

    def _positions(self, now: _Iteration, first: int, count: int) -> I64:
        return np.arange(first, first + count, dtype=np.int64) * self.num_replicas + (now.start + self.rank)

    def sample_keys(self, first: int, count: int) -> U64:
        """A 64-bit identity (seed, source, key) for each of the same samples."""
        return self.order.sample_keys(self.positions(first, count))

    def indices_at(self, positions: I64) -> I64:
        """Dataset index of the sample at each position of the run."""
        return self.order.indices_at(positions)

    def locate(self, position: int | I64) -> tuple[Any, Any, Any]:
        """Source name, index within the source, and epoch of the source, at a position or an array of them."""
        ids, index, epochs = self.order.locate(np.atleast_1d(_integers("position", position)))
        if np.ndim(position) == 0:
            return self.order.names[int(ids[0])], int(index[0]), int(epochs[0])
        return np.array(self.order.names)[ids], index, epochs

    def find(self, source: Any, index: Any, epoch: Any) -> Any:
        """The position at which a sample is consumed in that epoch of its source; -1: never.

        Args:
            source: a source name or an array of them; index and epoch integers or arrays, all of
                one shape.
        """
        wanted = np.atleast_1d(source), _integers("index", index), _integers("epoch", epoch)
        if wanted[0].ndim > 1:
            raise SamplerError(f"source {source!r}: it must be a name or a one-dimensional array of names")
        names, index_array, epochs = np.broadcast_arrays(*wanted)
        ids = np.array([self._id_of(str(name)) for name in names.tolist()], np.int64)
        size = np.array([self.order.sizes[self.order.names[i]] for i in ids.tolist()])
        if ((index_array < 0) | (index_array >= size) | (epochs < 0)).any():
            raise SamplerError("find: an index outside its source, or a negative epoch")
        found = self.order.find(ids, index_array.astype(np.int64), epochs.astype(np.int64))
        return int(found[0]) if np.ndim(source) == np.ndim(index) == np.ndim(epoch) == 0 else found

    def _id_of(self, name: str) -> int:
        if name not in self.order.sizes:
            raise SamplerError(f"unknown source {name!r}{nearest(name, self.order.sizes)}")
        return self.order.id_of(name)

    # --- changes on the way ----------------------------------------------------------------------

    def update_weights(self, weights: Weights, temperature: float = 1.0, *, position: int | None = None) -> None:
        """Other weights and temperature from `position` on; every source goes on at its key.

        Args:
            weights: by source name (sources not named keep their base weight), or one per source.
            position: default: the first one that the current iteration has not yet given (over all
                ranks, which must call this at the same sample). Planned segments after it stay.
        """
        at = self._from(position)
        current = _in_force(self.order.segments, at)
        named = _by_name(weights, self.sizes, {name: self._base.weights.get(name, 0) for name in self.sizes})
        segment = replace(current, start=at, weights=named, temperature=temperature)
        check_segment(segment, self.sizes)
        if (segment.weights, temperature) == (current.weights, current.temperature):
            return
        kept = tuple(entry for entry in self.order.segments if entry.start != at)
        self._use((*kept, segment), self.order.exclusions)

    def exclude(self, texts: Iterable[str], *, position: int | None = None) -> None:
        """Leave out more samples from `position` (default as for `update_weights`) on; see `exclude` above."""
        at = self._from(position)
        added = parse_exclusions(texts, at, self.sizes)
        self._use(self.order.segments, (*self.order.exclusions, *added))

    def _from(self, position: int | None) -> int:
        """Where a change begins: at `position`, or the first one that the current iteration has not given."""
        reached = self._reached(self._now.yielded)
        if position is not None and integer("position", position) < reached:
            raise SamplerError(f"position {position}: {reached} were given already; a change begins there or later")
        return reached if position is None else integer("position", position)

    def _reached(self, samples: int) -> int:
        """The position after `samples` samples of each rank in the current iteration."""
        return self._now.start + samples * self.num_replicas

    def _use(self, segments: Sequence[Segment], exclusions: Sequence[Exclusion]) -> None:
        inputs = {**self.sizes, **self._retired}, tuple(segments), tuple(exclusions)
        if self._inputs == inputs:
            return
        self._inputs = inputs
        self.order = ElasticOrder(
            {**self.sizes, **self._retired},
            self.seed,
            segments,
            exclusions,
            absent=tuple(self._retired),
            shuffle=self.shuffle,
        )

    # --- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state after what the current iteration has given; see `state_dict_at`."""
        return self.state_dict_at(self._now.yielded)

    def state_dict_at(self, samples: int) -> dict[str, Any]:
        """The state after `samples` samples of this rank (and as many of each other) in the current iteration.

        It holds the global position, so after `load_state_dict` no skip is needed, whatever the number
        of replicas is then. A loader that does skip by what it has counted comes to the same position, since
        the state says how many samples of how many ranks are in it; see `set_skip`.
        """
        state: dict[str, Any] = {
            "kind": "elastic",
            "version": VERSION,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "position": self._reached(samples),
            "samples": self._now.counted + samples,
            "num_replicas": self.num_replicas,
            "global_batch_size": self.global_batch_size,
            "sizes": dict(self.order.sizes),
            "retired": sorted(self._retired),
            "segments": [segment.to_json() for segment in self.order.segments],
            "exclusions": [exclusion.to_json() for exclusion in self.order.exclusions],
            "plan": self._plan.to_json(),
        }
        return {**state, "digest": _digest(state)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, whatever number of replicas and batch size it was made with.

        Raises:
            SamplerStateError: the state is cut or edited, of another version, seed or size of a source;
                or its plan is not this sampler's and `allow_data_change` is not set.
        """
        check_state(state)
        for name, own in (("seed", self.seed), ("shuffle", self.shuffle)):
            if state[name] != own:
                raise SamplerStateError(
                    f"the saved data order has {name} {state[name]}, this sampler has {name} {own}; use the saved one"
                )
        for name, size in state["sizes"].items():
            if self.sizes.get(name, size) != size:
                raise SamplerStateError(
                    f"source {name!r} had {size} samples when the state was saved and has {self.sizes[name]} now; "
                    f"restore it, or retire it and add the new data under another name"
                )
        changes = self.changes_from(state)
        if changes and not self.allow_data_change:
            raise SamplerStateError(
                f"the saved data order is not the configured one: {'; '.join(changes)}; "
                "put the configuration back, or allow the change (run.allow_data_change=true)"
            )
        self._adopt(state)

    def changes_from(self, state: Mapping[str, Any]) -> list[str]:
        """What this sampler's plan changes in the plan of a saved state, in words; empty: nothing.

        A segment that is still to come may begin at another position: a phase begins at a step, and another
        global batch moves it.
        """
        saved, own = state["plan"], self._plan.to_json()
        position = state["position"]
        known = set(state["sizes"]) - set(state["retired"])
        changes = [f"source {name!r} is new" for name in self.sizes if name not in known]
        changes += [f"source {name!r} is retired" for name in sorted(known) if name not in self.sizes]
        for i in range(max(len(saved["segments"]), len(own["segments"]))):
            before, after = (plan["segments"][i] if i < len(plan["segments"]) else None for plan in (saved, own))
            if not _same(before, after, position):
                changes.append(f"segment {i} was {_words(before)} and is {_words(after)}")
        if saved["exclude"] != own["exclude"]:
            changes.append(f"exclude was {saved['exclude']} and is {own['exclude']}")
        return changes

    def _adopt(self, state: Mapping[str, Any]) -> None:
        position = state["position"]
        segments = [Segment.from_json(entry) for entry in state["segments"]]
        exclusions = [Exclusion.from_json(entry) for entry in state["exclusions"]]
        if state["plan"] != self._plan.to_json() or set(state["sizes"]) - set(state["retired"]) != set(self.sizes):
            planned = [Segment.from_json(entry) for entry in state["plan"]["segments"]]
            before, now = (_in_force(plan, position) for plan in (planned, self._plan.segments))
            later = [segment for segment in self._plan.segments if segment.start > position]
            if replace(before, start=now.start) == now:
                segments = [*(segment for segment in segments if segment.start <= position), *later]
            else:
                past = (segment for segment in segments if segment.start < position)
                segments = [*past, replace(now, start=position), *later]
            known = set(state["plan"]["exclude"])
            added = [text for text in self._plan.exclude if text not in known]
            kept = [entry for entry in exclusions if entry.at < position or entry.text in self._plan.exclude]
            exclusions = [*kept, *parse_exclusions(added, position, self.sizes)]
        self._retired = {name: size for name, size in sorted(state["sizes"].items()) if name not in self.sizes}
        self._use(segments, exclusions)
        self._position, self._skip = position, 0
        # The first states did not say how many samples are in them: a skip on top of one is counted from there.
        self._carried = state.get("samples", 0), state.get("num_replicas", self.num_replicas)
        self._now = _Iteration(position, self._carried[0])


def _integers(what: str, value: Any) -> I64:
    """One integer or a row of them as int64, or a SamplerError."""
    array = np.asarray(value)
    if array.ndim > 1 or (array.size and array.dtype.kind not in "iu"):
        raise SamplerError(f"{what} {value!r}: it must be an integer or a one-dimensional array of integers")
    return array.astype(np.int64)


def check_state(state: Mapping[str, Any]) -> None:
    """Raise a SamplerStateError unless this is a whole, unedited state of a version that is known."""
    if not isinstance(state, Mapping):
        raise SamplerStateError(f"the saved sampler state is {state!r}: give what state_dict() returned")
    version = state.get("version")
    if state.get("kind") != "elastic" or version is None:
        raise SamplerStateError(
            f"the saved sampler state has keys {', '.join(map(str, state)) or 'none'}; it is not an elastic sampler's: "
            "use the sampler it was saved with, or begin a new run"
        )
    if version != VERSION:
        raise SamplerStateError(f"the saved data order has version {version}; this program knows version {VERSION}")
    content = {name: value for name, value in state.items() if name != "digest"}
    if state.get("digest") != _digest(content):
        raise SamplerStateError(
            f"the saved data order says digest {state.get('digest')} and its content gives {_digest(content)}: "
            "it was cut short or edited; use another checkpoint"
        )


def check_global_batch(global_batch_size: int, num_replicas: int) -> int:
    """The global batch, or a SamplerError with the nearest sizes if the ranks cannot share it evenly."""
    global_batch_size = integer("global_batch_size", global_batch_size, 1)
    if global_batch_size % num_replicas:
        below = global_batch_size // num_replicas * num_replicas
        near = " or ".join(str(size) for size in (below, below + num_replicas) if size)
        raise SamplerError(
            f"global_batch_size {global_batch_size} cannot be shared by {num_replicas} replicas; the nearest is {near}"
        )
    return global_batch_size


def _in_force(segments: Sequence[Segment], position: int) -> Segment:
    return max((segment for segment in segments if segment.start <= position), key=lambda segment: segment.start)


def _same(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None, position: int) -> bool:
    """The same planned segment, which may have moved while it is still to come."""
    if before is None or after is None:
        return False
    ahead = before["start"] >= position and after["start"] >= position
    return before == (dict(after, start=before["start"]) if ahead else after)


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _words(segment: Mapping[str, Any] | None) -> str:
    if segment is None:
        return "absent"
    weights = ", ".join(f"{name} {weight:g}" for name, weight in segment["weights"].items())
    caps = ", ".join(f"{name} {cap:g}" for name, cap in segment["max_epochs"].items())
    return (
        f"[from position {segment['start']}: {weights}, temperature {segment['temperature']:g}"
        + (f", max_epochs {caps}" if caps else "")
        + "]"
    )


def _by_name(weights: Weights, sizes: Mapping[str, int], base: Mapping[str, float] | None = None) -> dict[str, float]:
    """Weights by name, in the order of `sizes`; those not named come from `base`, without one it is an error."""
    if not isinstance(weights, Mapping):
        if len(weights) != len(sizes):
            raise SamplerError(f"Expected {len(sizes)} weights (one per source), got {len(weights)}")
        weights = dict(zip(sizes, weights, strict=True))
    for name in weights:
        if name not in sizes:
            raise SamplerError(
                f"weight for unknown source {name!r}{nearest(name, sizes)}; the sources are {', '.join(sizes)}"
            )
    named = {**(base or {}), **weights}
    missing = [name for name in sizes if name not in named]
    if missing:
        raise SamplerError(f"no weight for source {missing[0]!r}: give every source one (0 leaves it out)")
    return {name: float(named[name]) for name in sizes}


def _planned(base: Segment, segments: Iterable[Segment | Mapping[str, Any] | Sequence[Any]]) -> tuple[Segment, ...]:
    """The base and the planned segments by position; one that starts at 0 takes the place of the base."""
    planned = sorted((as_segment(value, base) for value in segments), key=lambda segment: segment.start)
    starts = [segment.start for segment in planned]
    if len(set(starts)) != len(starts):
        raise SamplerError(f"two segments start at the same position: {starts}")
    return tuple(planned) if starts[:1] == [0] else (base, *planned)

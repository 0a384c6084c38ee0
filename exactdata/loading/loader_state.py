"""Check that a loader's state matches the loader, and combine the states of all ranks."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

from exactdata.loading.protocols import LoaderStateError, State
from exactdata.order.state_checks import (
    LARGEST,
    ListOf,
    Record,
    any_integer,
    anything,
    check,
    check_same_seal,
    digest_of,
    flag,
    mapping,
    maybe,
    one_of,
    shown,
    text,
    whole,
    without_foreign,
)

NAME = "exactdata.StatefulDataLoader"
VERSION = 1

_MESSAGE = "{key} in this state is {value}; it must be {allowed}: the state was edited; use another checkpoint"
_OTHER_LOADERS = {  # keys in states written by other loaders with the same sampler
    "epoch": whole(),
    "batches_yielded": whole(),
    "samples_yielded": whole(),
    "batch_size": maybe(whole(1)),
    "sampler": maybe(mapping),
}
_SEEDS = Record(
    {"base_seed": maybe(any_integer), "chained": flag},
    {"private": text, "generator": text, "sampler_generator": text},
)
_PLAIN_SAMPLER = Record({"sampler": anything, "iterator": anything, "boundary": flag, "ended": flag})
_OWN = Record(
    {
        **_OTHER_LOADERS,
        "version": whole(1),
        "loader": one_of(NAME),
        "style": one_of("map", "iterable"),
        "in_epoch": flag,
        "batches_before": whole(),
        "num_workers": whole(),
        "next_worker": whole(),
        "seeds": _SEEDS,
        "order": anything,
        "dataset": anything,
        "digest": text,
    },
    {"dataset_size": maybe(whole())},
)
_ANY = Record({}, {**_OWN.required, **_OWN.optional})
_RANKS = Record({"version": whole(1), "loader": one_of(NAME), "ranks": ListOf(mapping)})

_UNCHANGEABLE = (int, str, bool, float, type(None))

DatasetStates = list[dict[str, Any]]  # one state per worker or, for an iterable dataset, per shard


def copied(value: Any) -> Any:
    """Return a copy that later changes to the original do not affect. Fast for flat dicts of plain values."""
    kind = type(value)
    if kind in _UNCHANGEABLE:
        return value
    if kind is dict and all(type(each) in _UNCHANGEABLE for each in value.values()):
        return dict(value)
    return copy.deepcopy(value)


def one_value(value: Any) -> Any:
    """Return a value as a JSON string if JSON preserves it, otherwise a copy of the value.

    torch.distributed.checkpoint would flatten a list of dicts into keys, and the number of keys would vary between
    states.
    """
    if value is None:
        return None
    try:
        line = json.dumps(value)
        if json.loads(line) == value:
            return line
    except (TypeError, ValueError, RecursionError):
        pass
    return copied(value)


def opened(value: Any) -> Any:
    """Parse the result of `one_value`.

    Raises:
        LoaderStateError: the value is a string that is not JSON.
    """
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        raise LoaderStateError(
            f"this state has the text {shown(value)}, which is not JSON: the state was edited; use another checkpoint"
        ) from None


def sealed(state: State) -> State:
    """Return a state with its digest, which is the same on every rank."""
    return {**state, "digest": _digest_of(state)}


def check_seal(state: State, what: str) -> None:
    """Check that a loader's state has not changed since it was sealed.

    Raises:
        LoaderStateError: the state has changed.
    """
    check_same_seal(state.get("digest"), _digest_of(state), what, LoaderStateError, "digest")


def _digest_of(state: State) -> str:
    """Compute the digest of a state, without the sampler's rank, which no sampler restores."""
    sampler = state.get("sampler")
    if isinstance(sampler, dict) and "rank" in sampler:
        state = {**state, "sampler": {key: value for key, value in sampler.items() if key != "rank"}}
    return digest_of(state)


def is_in_epoch(state: State) -> bool:
    """Return whether the state was saved within an epoch, rather than between epochs."""
    return bool(state.get("in_epoch", state["batches_yielded"] > 0))


def size_of(dataset: Any) -> int | None:
    """Return the number of samples in the dataset, or None if it has no length."""
    try:
        return len(dataset)
    except TypeError:
        return None


def require(state: Any, keys: Sequence[str]) -> None:
    """Check that `state` is a dict with all `keys`.

    Raises:
        LoaderStateError: keys are missing. The message names them and the loader that wrote the state.
    """
    if not isinstance(state, dict):
        raise LoaderStateError(f"{NAME} cannot load a {type(state).__name__}; pass what its state_dict() returned")
    missing = [key for key in keys if key not in state]
    if missing:
        raise LoaderStateError(
            f"{NAME} cannot load this state: {', '.join(map(repr, missing))} missing; it was written by "
            f"{state.get('loader') or 'an unknown loader'} and has the keys {sorted(map(str, state))}; load it into "
            "that loader, or start the data from the beginning"
        )


def _check_declared(state: Any) -> None:
    """Check the keys that the states of all loaders have."""
    require(state, ("epoch", "batches_yielded"))
    check(state, _ANY, _MESSAGE, LoaderStateError)


def check_state(state: Any, iterable: bool, size: int | None, sampler_checks: bool, counts_batches: bool) -> None:
    """Check that a loader of this kind wrote `state`, for a dataset of this size.

    A state with only the keys `epoch`, `batches_yielded`, `samples_yielded`, `batch_size` and `sampler` may be from a
    different loader, and has no seal.

    Args:
        state: the state to check.
        iterable: whether this loader's dataset is iterable-style.
        size: number of samples in this loader's dataset, if known.
        sampler_checks: whether the sampler compares the sizes.
        counts_batches: whether the sampler yields batches, which may be empty.

    Raises:
        LoaderStateError: the state does not match the loader.
    """
    _check_declared(state)
    version = state.get("version", VERSION)
    if version > VERSION:
        raise LoaderStateError(
            f"this state has version {version}, but this {NAME} reads versions up to {VERSION}: use the newer "
            "program that wrote it"
        )
    style = "iterable" if iterable else "map"
    if state.get("style", style) != style:
        raise LoaderStateError(
            f"this state's dataset is {state['style']}-style, this loader's is {style}-style: load the state with the "
            "dataset that it was saved with"
        )
    saved = state.get("dataset_size")
    if saved is not None and size is not None and saved != size and not sampler_checks:
        raise LoaderStateError(
            f"this state was saved over a dataset of {saved} samples, this one has {size}: resuming would repeat or "
            "skip samples; use the same data, or start it from the beginning"
        )
    batches, samples = state["batches_yielded"], state.get("samples_yielded")
    if samples is not None and not counts_batches and not batches <= samples <= samples * batches:
        raise LoaderStateError(
            f"samples_yielded in this state is {samples}, in {batches} batches; it must be {batches} or more, and 0 "
            "for no batches: the state was edited; use another checkpoint"
        )


def check_place(state: State, epoch_size: int | None, batch_size: int | None, counts_batches: bool) -> None:
    """Check that the position is within the epoch, if its length is known, and that the state is unchanged.

    Args:
        state: the state to check.
        epoch_size: samples per epoch, or batches per epoch if `counts_batches`.
        batch_size: samples per batch. None means 1.
        counts_batches: whether the sampler yields batches.

    Raises:
        LoaderStateError: the position is outside the epoch, or the state was changed.
    """
    key = "batches_yielded" if counts_batches or "samples_yielded" not in state else "samples_yielded"
    if epoch_size is not None and is_in_epoch(state):
        unit = key.removesuffix("_yielded")
        per = 1 if unit == "samples" or counts_batches else state.get("batch_size") or batch_size or 1
        longest = -(-epoch_size // per)
        if state[key] > longest:
            raise LoaderStateError(
                f"{key} in this state is {state[key]}, but an epoch has {longest} {unit}: the state was edited or "
                "belongs to another data order; use another checkpoint"
            )
    if set(without_foreign(state)) <= set(_OTHER_LOADERS):
        return
    check(state, _OWN, _MESSAGE, LoaderStateError)
    check_seal(state, "this state")
    if (order := opened(state["order"])) is not None:
        check({"order": order}, Record({"order": _PLAIN_SAMPLER}), _MESSAGE, LoaderStateError)


def check_sampler_epoch(state: State) -> None:
    """Check the epoch in a state with which the sampler's `set_epoch` will be called, if there is one.

    Raises:
        LoaderStateError: the epoch is not an integer with which torch can seed a generator.
    """
    declared = Record({}, {"epoch": whole(-LARGEST)})
    check({"sampler": state.get("sampler") or {}}, Record({"sampler": declared}), _MESSAGE, LoaderStateError)


def aggregate(states: Sequence[State]) -> State:
    """Combine the states of all ranks, ordered by rank, into one.

    Raises:
        LoaderStateError: there are no states, or the ranks are at different positions.
    """
    if not isinstance(states, Sequence) or not states:
        raise LoaderStateError("aggregate_state_dict got no states: pass a list of one per rank")
    check_ranks(states)
    return {"version": VERSION, "loader": NAME, "ranks": list(states)}


def check_ranks(states: Sequence[State]) -> None:
    """Check that the states of all ranks were saved at the same position.

    Ranks with streams or user-defined samplers may be in different epochs. For these, the number of batches since the
    start of the run is compared.

    Raises:
        LoaderStateError: a rank differs from rank 0. The message names the first such rank and both positions.
    """
    for state in states:
        _check_declared(state)
    first = _place(states[0])
    for rank, state in enumerate(states):
        mine = _place(state)
        for key in [*first, *(key for key in mine if key not in first)]:
            if first.get(key) != mine.get(key):
                raise LoaderStateError(
                    f"the ranks were saved at different places: {key} is {shown(first.get(key))} on rank 0 and "
                    f"{shown(mine.get(key))} on rank {rank}: all ranks must be saved after the same step, with the "
                    "same settings; use another checkpoint"
                )


def _place(state: State) -> dict[str, Any]:
    """Return the part of a state that must be the same on all ranks."""
    place = {key: state.get(key) for key in ("version", "style", "batch_size")}
    if not counts_ranks(state):  # ranks may have different data and epochs
        batches = state["batches_yielded"]
        if "batches_before" in state:
            return {**place, "batches since the start of the run": state["batches_before"] + batches}
        return {**place, "epoch": state["epoch"], "batches_yielded": batches}
    place |= {"in_epoch": is_in_epoch(state), "dataset_size": state.get("dataset_size")}
    place |= {key: state.get(key) for key in ("epoch", "batches_yielded", "samples_yielded")}
    return place | {f"sampler.{key}": value for key, value in state["sampler"].items() if key not in ("rank", "seal")}


def counts_ranks(state: State) -> bool:
    """Return whether the saved sampler splits its epoch equally over ranks, and records the number of ranks."""
    return "num_replicas" in (state.get("sampler") or ())


def check_aggregated(aggregated: Any, rank: int, world_size: int) -> list[State]:
    """Check a result of `aggregate`, and that `rank` is one of `world_size` ranks.

    Returns:
        The saved states of all ranks.

    Raises:
        LoaderStateError: the state was changed, its ranks disagree, or there is no such rank.
    """
    require(aggregated, ("ranks",))
    if type(rank) is not int or type(world_size) is not int or not 0 <= rank < world_size:
        raise LoaderStateError(f"rank={rank!r} is outside the ranks of world_size={world_size!r}, numbered from 0")
    check(aggregated, _RANKS, _MESSAGE, LoaderStateError)
    ranks: list[State] = aggregated["ranks"]
    if not ranks:
        raise LoaderStateError("ranks in this state is []; it must have one state per rank: use another checkpoint")
    check_ranks(ranks)
    for number, state in enumerate(ranks):
        if "digest" in state:
            check_seal(state, f"this state of rank {number}")
    return ranks

"""The loader's state: checking that it fits, and splitting it among ranks and workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runner.data.loading.protocols import LoaderStateError, State, require

NAME = "runner.data.StatefulDataLoader"
VERSION = 1

DatasetStates = list[dict[str, Any]]  # one per worker; of an iterable dataset they are those of its shards


def is_in_epoch(state: State) -> bool:
    """Whether the state was taken within an epoch, not between two."""
    return bool(state.get("in_epoch", state["batches_yielded"] > 0))


def size_of(dataset: Any) -> int | None:
    """Samples in the dataset, None if it has no length."""
    try:
        return len(dataset)
    except TypeError:
        return None


def check_samples(samples: int, epoch_size: int | None) -> None:
    """Check that no more samples were yielded than an epoch has, if that is known.

    Raises:
        LoaderStateError: there were more.
    """
    if epoch_size is not None and samples > epoch_size:
        raise LoaderStateError(
            f"samples_yielded in this state is {samples}, but an epoch has {epoch_size} samples: the state was edited "
            "or belongs to another data order; use another checkpoint"
        )


def check(state: State, iterable: bool, size: int | None, sampler_checks: bool) -> None:
    """Check that a loader of this kind wrote `state`, for a dataset of this size.

    Args:
        iterable: this loader's dataset is iterable-style.
        size: samples in this loader's dataset, if known.
        sampler_checks: the sampler compares the sizes itself.

    Raises:
        LoaderStateError: the state does not fit.
    """
    require(state, ("epoch", "batches_yielded"), NAME)
    version = state.get("version", VERSION)
    if version > VERSION:
        raise LoaderStateError(
            f"this state has version {version}, but this {NAME} reads versions up to {VERSION}: use the newer runner "
            "that wrote it"
        )
    style = "iterable" if iterable else "map"
    if state.get("style", style) != style:
        raise LoaderStateError(
            f"this state's dataset is {state['style']}-style, this loader's is {style}-style: load the state with the "
            "dataset that it was saved with"
        )
    for key in ("epoch", "batches_yielded", "samples_yielded"):
        value = state.get(key, 0)
        if not isinstance(value, int) or value < 0:
            raise LoaderStateError(f"{key} in this state is {value!r}; it must be an integer of 0 or more")
    saved = state.get("dataset_size")
    if saved is not None and size is not None and saved != size and not sampler_checks:
        raise LoaderStateError(
            f"this state was saved over a dataset of {saved} samples, this one has {size}: resuming would repeat or "
            "skip samples; use the same data, or start it from the beginning"
        )


def states_for_workers(state: State, dataset: Any, workers: int) -> DatasetStates | None:
    """The states from which this rank's `workers` resume an iterable dataset; None: from the beginning.

    If the number of shards changed, each state is `{"redistribute": [all old states]}`; each worker then picks its
    part (`runner.data.loading.workers.redistribute`).

    Raises:
        LoaderStateError: the number of shards changed, and the dataset cannot redistribute its states.
    """
    saved = state.get("dataset")
    if saved is None:
        if state["batches_yielded"]:
            raise LoaderStateError(
                f"this state of {state['batches_yielded']} batches has no position of the iterable dataset: it was "
                "written by another loader; start the data from the beginning"
            )
        return None
    if len(saved) == workers and not state.get("all_shards"):
        return list(saved)
    if all(part["dataset"] is None for part in saved) and (not is_in_epoch(state) or state["batches_yielded"] == 0):
        return None  # no shard has a state yet
    methods = ("aggregate_state_dict", "deaggregate_state_dict")
    if not all(callable(getattr(dataset, name, None)) for name in methods):
        raise LoaderStateError(
            f"the number of ranks or workers changed: this state has {len(saved)} shards of {type(dataset).__name__} "
            f"(num_workers={state.get('num_workers')}), now there are {workers} per rank; resume with the same number "
            "of ranks and workers, or give the dataset aggregate_state_dict(states) and "
            "deaggregate_state_dict(aggregated, shard, shards)"
        )
    if any(part["samples"] for part in saved):
        raise LoaderStateError(
            "the number of ranks or workers changed, and this state cannot be redistributed, since it was taken some "
            "samples after the dataset's own state: resume with the same number of ranks and workers, or save with "
            "snapshot_every_n_steps=1 and a dataset that has state_dict"
        )
    return [{"redistribute": list(saved)}] * workers


def aggregate(states: Sequence[State]) -> State:
    """Combine the states of all ranks, ordered by rank, into one."""
    if not states:
        raise LoaderStateError("aggregate_state_dict got no states: pass one per rank")
    for state in states:
        require(state, ("epoch", "batches_yielded"), NAME)
    return {"version": VERSION, "loader": NAME, "ranks": list(states)}


def deaggregate(aggregated: State, rank: int, world_size: int, workers: int, by_position: bool) -> State:
    """The state of `rank` out of `world_size`, each with `workers` shards of an iterable dataset.

    Args:
        by_position: the sampler's state does not depend on the number of ranks.
    """
    require(aggregated, ("ranks",), NAME)
    ranks = aggregated["ranks"]
    if not 0 <= rank < world_size:
        raise LoaderStateError(f"rank={rank} is outside 0..{world_size - 1}")
    if len(ranks) == world_size:
        return dict(ranks[rank])
    mine = dict(ranks[rank % len(ranks)])
    if mine.get("style", "map") == "map":
        if not by_position and mine.get("sampler") is None:
            raise LoaderStateError(
                f"this state was saved by {len(ranks)} ranks, now there are {world_size}, and the sampler cannot "
                "redistribute it: resume with the same number of ranks, or use ElasticSampler"
            )
        return mine
    shards = [shard for state in ranks for shard in state.get("dataset") or ()]
    if not shards:
        return mine
    if len(shards) == world_size * workers:
        mine["dataset"] = shards[rank * workers : (rank + 1) * workers]
    else:
        mine["dataset"], mine["all_shards"] = shards, True
    mine["next_worker"] = 0
    return mine

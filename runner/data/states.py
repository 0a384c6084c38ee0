"""The loader's state: what is in it, whether it fits, and how ranks and workers share it out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runner.data.restartable import LoaderStateError, State, require

NAME = "runner.data.StatefulDataLoader"
VERSION = 1


def begun(state: State | None) -> bool:
    """Whether the state lies within an epoch, and not between two."""
    if state is None:
        return False
    return bool(state.get("begun", state["batches_yielded"] > 0))


def next_worker(state: State | None) -> int:
    return 0 if state is None else int(state.get("next_worker", 0))


def size_of(dataset: Any) -> int | None:
    """Samples in the dataset, None where it does not say."""
    try:
        return len(dataset)
    except TypeError:
        return None


def check_samples(samples: int, epoch: int | None) -> None:
    """Raise LoaderStateError if more `samples` were yielded than an `epoch` has, where the sampler says how many."""
    if epoch is not None and samples > epoch:
        raise LoaderStateError(
            f"samples_yielded in this state is {samples} and an epoch has {epoch}: it was edited or is of another "
            "data order; use another checkpoint"
        )


def check(state: State, iterable: bool, size: int | None, sampler_checks: bool) -> None:
    """Raise LoaderStateError unless `state` is one that this kind of loader wrote, for data of this size."""
    require(state, ("epoch", "batches_yielded"), NAME)
    version = state.get("version", VERSION)
    if version > VERSION:
        raise LoaderStateError(
            f"this state has version {version} and {NAME} here knows versions up to {VERSION}: use the newer runner "
            "that wrote it"
        )
    style = "iterable" if iterable else "map"
    if state.get("style", style) != style:
        raise LoaderStateError(
            f"this state is of a loader over {_article(state['style'])} dataset, this loader's dataset is of "
            f"{style} style: load it with the dataset it was saved with"
        )
    for key in ("epoch", "batches_yielded", "samples_yielded"):
        value = state.get(key, 0)
        if not isinstance(value, int) or value < 0:
            raise LoaderStateError(f"{key} in this state is {value!r}; it must be an integer of 0 or more")
    saved = state.get("dataset_size")
    if saved is not None and size is not None and saved != size and not sampler_checks:
        raise LoaderStateError(
            f"this state was saved over a dataset of {saved} samples, this one has {size}: resuming would repeat or "
            "skip samples; give the same data or start it anew"
        )


def _article(style: str) -> str:
    return f"an {style}-style" if style == "iterable" else f"a {style}-style"


def shared_out(state: State, dataset: Any, workers: int) -> list[dict[str, Any]] | None:
    """The states that `workers` workers of an iterable dataset start from; None: from the beginning.

    Raises:
        LoaderStateError: there were as many workers as there are not now, and the dataset cannot say
            how to share their states out.
    """
    saved = state.get("dataset")
    if saved is None:
        if state["batches_yielded"]:
            raise LoaderStateError(
                f"the place of the iterable dataset is missing from this state of {state['batches_yielded']} batches: "
                "it was written by another loader; start the data anew"
            )
        return None
    if len(saved) == workers and not state.get("reshared"):
        return list(saved)
    nothing_to_keep = all(part["dataset"] is None for part in saved)
    if nothing_to_keep and (not begun(state) or state["batches_yielded"] == 0):
        return None
    methods = ("aggregate_state_dict", "deaggregate_state_dict")
    if not all(callable(getattr(dataset, name, None)) for name in methods):
        raise LoaderStateError(
            f"this state has {len(saved)} shards of {type(dataset).__name__} "
            f"(num_workers={state.get('num_workers')}) and now there are {workers} a rank: resume with as many "
            "ranks and workers as before, or give the dataset "
            "aggregate_state_dict(states) and deaggregate_state_dict(aggregated, shard, shards)"
        )
    if any(part["samples"] for part in saved):
        raise LoaderStateError(
            "this state cannot be shared out anew, since it was saved some batches after the dataset's own: resume "
            "with as many ranks and workers as before, or save with snapshot_every_n_steps=1 and a dataset that has "
            "state_dict"
        )
    return [{"deal": list(saved)}] * workers


def aggregate(states: Sequence[State]) -> State:
    """One state out of those of all ranks, in the order of their ranks."""
    if not states:
        raise LoaderStateError("aggregate_state_dict got no state: give one of each rank")
    for state in states:
        require(state, ("epoch", "batches_yielded"), NAME)
    return {"version": VERSION, "loader": NAME, "ranks": list(states)}


def deaggregate(aggregated: State, rank: int, world_size: int, workers: int, by_position: bool) -> State:
    """The state of `rank` out of `world_size`, each with `workers` shards of its data."""
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
                f"this state is of {len(ranks)} ranks, now there are {world_size}, and the sampler cannot share them "
                "out: resume with as many ranks as before, or use ElasticSampler"
            )
        return mine
    parts = [part for state in ranks for part in state.get("dataset") or ()]
    if not parts:
        return mine
    if len(parts) == world_size * workers:
        mine["dataset"] = parts[rank * workers : (rank + 1) * workers]
    else:
        mine["dataset"], mine["reshared"] = parts, True
    mine["next_worker"] = 0
    return mine

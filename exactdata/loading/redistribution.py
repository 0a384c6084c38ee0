"""Decide which shards of a stream a process resumes, and split the rest of an epoch over a new number of shards.

The dataset redistributes the states of unfinished shards, using its `aggregate_state_dict` and
`deaggregate_state_dict`. The loader handles shards that have ended or not begun, because the dataset's state need not
distinguish them. A shard that has ended has nothing left to read. A shard that has not begun is read under its old
shard number. For the term *leg*, see `stream_fetch`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from exactdata.loading import protocols
from exactdata.loading.fetch import is_iterator, is_stateful, load_state
from exactdata.loading.loader_state import DatasetStates, is_in_epoch, one_value, opened, require
from exactdata.loading.protocols import LoaderStateError, State
from exactdata.loading.stream_fetch import between_epochs, has_ended

_KEYS = ("dataset", "iterator", "samples", "begun", "ended", "boundary", "owner", "shard", "waiting")


def for_rank(aggregated: State, rank: int, world_size: int, workers: int) -> State:
    """Return the state from which `rank` of `world_size` resumes a stream, each with `workers` shards.

    Raises:
        LoaderStateError: the ranks are in different epochs.
    """
    ranks = aggregated["ranks"]
    if len(ranks) == world_size and all(max(state.get("num_workers", 0), 1) == workers for state in ranks):
        return dict(ranks[rank])
    epoch = min(state["epoch"] for state in ranks)
    behind = [state for state in ranks if state["epoch"] == epoch]
    # Ranks that have loaded a state but not yet read from it still hold the shards of all ranks.
    shards = {tuple(shard["owner"]): shard for state in ranks for shard in _shards_of(state, ranks, epoch)}
    dealt = one_value([shards[of] for of in sorted(shards)])
    return {**behind[rank % len(behind)], "dataset": dealt, "next_worker": 0}


def _shards_of(state: State, ranks: Sequence[State], epoch: int) -> DatasetStates:
    """Return the states of one rank's shards, relative to `epoch`."""
    workers = max(int(state.get("num_workers", 0)), 1)
    rank = next(number for number, other in enumerate(ranks) if other is state)
    saved: DatasetStates | None = opened(state.get("dataset"))
    if saved is None:
        saved = [between_epochs((rank * workers + worker, len(ranks) * workers)) for worker in range(workers)]
    for shard in saved:
        require(shard, _KEYS)
    if state["epoch"] == epoch:
        return saved
    if state["epoch"] > epoch + 1 or is_in_epoch(state):
        raise LoaderStateError(
            f"the states of the ranks are of the epochs {sorted({other['epoch'] for other in ranks})}: they were not "
            "saved together; use a checkpoint that all ranks saved at once"
        )
    return [{**shard, "begun": True, "ended": True, "boundary": False} for shard in saved]


def check_alike(dataset: Any, states: Sequence[State]) -> None:
    """Call the dataset's `check_state_dicts`, if it has one, on the dataset's states in all shards of all ranks."""
    if not callable(getattr(dataset, "check_state_dicts", None)):
        return
    shards = [shard for state in states for shard in opened(state.get("dataset")) or ()]
    inner = [leg[key] for shard in shards for leg in (shard, *shard["waiting"]) for key in ("dataset", "iterator")]
    dataset.check_state_dicts([state for state in inner if state is not None])


def for_workers(state: State, dataset: Any, ranks: tuple[int, int], workers: int) -> tuple[DatasetStates | None, bool]:
    """Return the states from which this rank's `workers` resume a stream, and whether the shards have changed.

    If there is nothing to resume, the states are None. If the number of shards has changed, each state is
    `{"redistribute": [all old states]}`, and each worker extracts its part using `own`.

    Args:
        state: the loader's state.
        dataset: the stream.
        ranks: (rank, world size).
        workers: number of workers of this rank.

    Raises:
        LoaderStateError: the number of shards has changed, and the dataset cannot redistribute its states.
    """
    saved = opened(state.get("dataset"))
    if saved is None:
        if state["batches_yielded"]:
            raise LoaderStateError(
                f"this state of {state['batches_yielded']} batches has no position of the iterable dataset: it was "
                "written by another loader; start the data from the beginning"
            )
        return None, False
    for shard in saved:
        require(shard, _KEYS)
    owners = [tuple(shard["owner"]) for shard in saved]
    first, now = ranks[0] * workers, ranks[1] * workers
    if owners == [(first + worker, now) for worker in range(workers)]:
        return list(saved), False
    before = owners[0][1] if owners else 0
    if not any(shard["begun"] or shard["ended"] or shard["waiting"] for shard in saved) and not _can_redistribute(
        dataset
    ):
        return None, True  # nothing was read yet
    shape = (
        f"this state is of {before} shards of {type(dataset).__name__}, now there are {now} "
        f"({ranks[1]} ranks of {workers}): resume with the same number of ranks and workers"
    )
    if owners != [(number, before) for number in range(before)]:
        raise LoaderStateError(f"{shape}, or load what aggregate_state_dict() returns for the states of all ranks")
    if before == now:
        return list(saved[first : first + workers]), True
    if not _can_redistribute(dataset):
        raise LoaderStateError(f"{shape}, or make the dataset an exactdata.ShardedStream, which can be dealt out anew")
    return [{"redistribute": list(saved)}] * workers, True


def _can_redistribute(dataset: Any) -> bool:
    methods = ("aggregate_state_dict", "deaggregate_state_dict")
    return all(callable(getattr(dataset, name, None)) for name in methods)


def own(dataset: Any, saved: State) -> State | None:
    """Return the state from which this process's shard resumes, or None to start from the beginning.

    Args:
        dataset: the stream.
        saved: one of the states that `for_workers` returned.
    """
    if "redistribute" in saved:
        return _redistribute(dataset, [_with_inner(dataset, state) for state in saved["redistribute"]])
    return _with_inner(dataset, saved)


def _with_inner(dataset: Any, state: State) -> State:
    """Add the dataset's state to each leg saved before a worker began it, because a different leg may change it."""
    if not is_stateful(dataset) or is_iterator(dataset):
        return state
    if state["boundary"] and state["dataset"] is None:
        state = {**state, "dataset": copy.deepcopy(dataset.state_dict())}
    return {**state, "waiting": [_with_inner(dataset, leg) for leg in state["waiting"]]}


def _redistribute(dataset: Any, states: DatasetStates) -> State | None:
    shard, shards = owner = protocols.shard()
    if not any(state["begun"] or has_ended(state) or state["waiting"] for state in states):
        first = states[0]  # if any shard has samples left, this one does
        if first["dataset"] is None:
            return None
        return {**first, "iterator": None, "boundary": True, "owner": list(owner)}
    legs = [leg for state in states for leg in ({**state, "waiting": []}, *state["waiting"])]
    left = [leg for leg in legs if not has_ended(leg)]
    dealt = [leg for leg in left if leg["begun"] and not leg["samples"]]
    whole = [leg for leg in left if not leg["begun"] or leg["samples"]]
    mine = {**between_epochs(owner), "begun": True, "boundary": False, "waiting": whole[shard::shards]}
    return mine | (_inner_part(dataset, dealt, shard, shards) if dealt else _nothing(dataset, legs))


def _nothing(dataset: Any, legs: DatasetStates) -> State:
    """Return the dataset's state for a shard that gets no unfinished leg, and rejoins in the next epoch."""
    inner = [leg for leg in legs if leg["dataset"] is not None]
    for leg in inner:
        if has_ended(leg):
            return {"dataset": leg["dataset"], "ended": True, "shard": leg["shard"]}
    if inner and callable(getattr(dataset, "finish_state_dict", None)):
        return {"dataset": dataset.finish_state_dict(copy.deepcopy(inner[0]["dataset"]))}
    return {"ended": True}


def _inner_part(dataset: Any, legs: DatasetStates, shard: int, shards: int) -> State:
    """Return the dataset's state for one shard, given the states of unfinished legs."""
    inner = copy.deepcopy([leg["dataset"] if leg["iterator"] is None else leg["iterator"] for leg in legs])
    part = dataset.deaggregate_state_dict(dataset.aggregate_state_dict(inner), shard, shards)
    if legs[0]["iterator"] is not None and not is_iterator(dataset):
        return {"dataset": None, "iterator": part}
    if isinstance(part, dict) and isinstance(inner[0], dict) and part.keys() != inner[0].keys():
        load_state(dataset, part)  # `part` can be loaded, but not aggregated again
        part = dataset.state_dict()
    return {"dataset": part, "iterator": None}

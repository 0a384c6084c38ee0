"""Convert states of torchdata's StatefulDataLoader, for map-style datasets, to states of this package's loader.

torchdata saves the number of samples drawn, and the sampler's state if it has one. With `shuffle=True`, that is the
generator's state at the start of the epoch. torchdata does not save the epoch. If a state does not determine the
samples that follow, an error names the missing part. States are read as numbers, mappings and tensors, so that no code
in them is executed.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DistributedSampler as TorchSampler
from torch.utils.data import RandomSampler, SequentialSampler

from exactdata.loading.fetch import is_stateful
from exactdata.loading.index_stream import IndexStream
from exactdata.loading.loader_state import NAME, VERSION, one_value, sealed, size_of
from exactdata.loading.protocols import LoaderStateError, State
from exactdata.loading.seeds import draw_seed
from exactdata.order.state_checks import Kind, MapOf, Record, anything, check, flag, mapping, maybe, whole

_MESSAGE = "{key} in this state of torchdata's StatefulDataLoader is {value}; it must be {allowed}: use another state"
_BYTES = Kind("a tensor of bytes", lambda value: isinstance(value, torch.Tensor) and value.dtype == torch.uint8)
_SAMPLER = Record({"_sampler_iter_state": maybe(mapping), "_index_sampler_state": maybe(mapping)})
_FETCHED = Record({"dataset_state": anything, "fetcher_state": anything})
_SINGLE = Record({**_SAMPLER.required, **_FETCHED.required, "_num_yielded": whole()})
_SNAPSHOT = Record({"_snapshot_step": whole(), "_main_snapshot": _SAMPLER, "_worker_snapshots": MapOf(_FETCHED)})
_PARALLEL = Record({"_snapshot": _SNAPSHOT, "_steps_since_snapshot": whole()})
_EITHER = Record({"_iterator_finished": flag}, {"epoch": whole()})
_DRAWN = Record({"samples_yielded": whole()}, {"sampler_state": maybe(mapping), "sampler_iter_state": maybe(mapping)})
_SHUFFLED = Record({"generator": _BYTES})


def is_torchdatas(state: Any) -> bool:
    """Return whether `state` was saved by torchdata's StatefulDataLoader."""
    return isinstance(state, Mapping) and ("_snapshot" in state or "_num_yielded" in state)


def from_torchdata(state: Mapping[str, Any], stream: IndexStream, iterable: bool) -> State:
    """Convert a state of torchdata's loader to a state from which this package's loader yields the same batches.

    Args:
        state: the state. Add a key `epoch` if the order depends on the epoch and the sampler's state lacks it.
        stream: the batches of indices from this loader's sampler.
        iterable: whether this loader's dataset is iterable-style.

    Raises:
        LoaderStateError: the state is damaged, or does not determine the samples that follow.
    """
    _check(state, _EITHER)
    _check(state, _PARALLEL if "_snapshot" in state else _SINGLE)
    if "_snapshot" in state:
        snapshot, since = state["_snapshot"], state["_steps_since_snapshot"]
        batches, main = snapshot["_snapshot_step"], snapshot["_main_snapshot"]
        fetched = list(snapshot["_worker_snapshots"].values())
    else:
        batches, since, main, fetched = state["_num_yielded"], 0, state, [state]
    if iterable or any(each[key] is not None for each in fetched for key in _FETCHED.required):
        raise _refused("is of a stream, or of a dataset with a state", "end the epoch with torchdata's loader")
    drawn = main["_sampler_iter_state"] or main["_index_sampler_state"] or {}  # the second key is for torchdata < 0.11
    if stream.one_by_one and "samples_yielded" not in drawn:
        drawn = {"samples_yielded": batches, "sampler_iter_state": main["_sampler_iter_state"]}
        drawn["sampler_state"] = main["_index_sampler_state"]
    _check({"the sampler's state": drawn}, Record({"the sampler's state": _DRAWN}))
    samples = _samples(drawn["samples_yielded"], batches, since, stream)
    place: State = {"epoch": state.get("epoch"), "batches_yielded": batches + since, "samples_yielded": samples}
    place |= {"batch_size": stream.batch_size, "sampler": None}
    own: Any = drawn.get("sampler_state")
    iterator = drawn.get("sampler_iter_state")
    if set(own or ()) == {"yielded"}:  # torchdata's own sampler; its state is outdated until the first sample
        own = {"yielded": samples}
    place |= _order(own, iterator, place["epoch"], since, stream)
    place["epoch"] = place["epoch"] or 0
    if stream.by_position and (state["_iterator_finished"] or (samples and own.get("samples") == 0)):
        place |= {"epoch": place["epoch"] + 1, "batches_yielded": 0, "samples_yielded": 0}
    if not place.keys() & {"order", "seeds"}:
        return place
    whole_state = {"version": VERSION, "loader": NAME, "style": "map", "in_epoch": True, "batches_before": 0}
    whole_state |= {"num_workers": 0, "next_worker": 0, "seeds": {"base_seed": None, "chained": False}}
    return sealed({**whole_state, "order": None, "dataset": None, **place})


def _samples(samples: int, batches: int, since: int, stream: IndexStream) -> int:
    """Count the samples in all batches. The last batch of an epoch may be smaller, or dropped."""
    per_batch, size = stream.batch_size or 1, size_of(stream.sampler)
    is_end = size in (None, samples) and batches in (samples // per_batch, -(-samples // per_batch))
    if samples != batches * per_batch and not is_end:
        raise _refused(f"has {samples} samples in {batches} batches, not of {per_batch}", "use its batch_size")
    samples += since * per_batch
    return samples if size is None else min(samples, size)


def _order(own: Any, iterator: Any, epoch: int | None, since: int, stream: IndexStream) -> State:
    """Return the part of a loader state that determines the order, from the states of the sampler and its iterator."""
    sampler, kind = stream.sampler, type(stream.sampler)
    only_counts = iterator is None and set(own or ()) <= {"yielded"}
    if stream.by_skip and set(own or ()) - {"yielded"}:
        return {"sampler": own, "epoch": own.get("epoch")}
    if hasattr(sampler, "set_epoch") and epoch is None and not stream.by_position and getattr(sampler, "shuffle", True):
        raise _refused("has no epoch, on which the order depends", "load {**state, 'epoch': EPOCH}, counted from 0")
    set_to = None if epoch is None or not hasattr(sampler, "set_epoch") else {"epoch": epoch}
    if kind in (SequentialSampler, TorchSampler) or stream.by_skip:
        if only_counts and not hasattr(sampler, "counts"):
            return {"sampler": None if stream.by_skip else set_to}
    elif kind is RandomSampler:
        if iterator is not None:
            return {"seeds": _seeds(iterator, sampler)}
    elif (own is not None and is_stateful(sampler)) or (iterator is not None and not stream.by_position):
        if since:
            raise _refused(f"has a sampler's state that is {since} batches old", "save one after every batch")
        if stream.by_position:
            return {"sampler": own}
        order = {"sampler": own, "iterator": iterator, "boundary": False, "ended": False}
        return {"order": one_value(order), "sampler": set_to}
    raise _refused(f"has no state of a {kind.__name__}", "pass the sampler that it was saved with")


def _seeds(iterator: Mapping[str, Any], sampler: RandomSampler) -> State:
    """Convert the generator's state at the start of the epoch to a state of this loader's seeds."""
    _check({"the sampler's state": iterator}, Record({"the sampler's state": _SHUFFLED}))
    if sampler.generator is None or sampler.replacement:
        what = "draws with replacement" if sampler.replacement else "has no generator"
        advice = "pass sampler=RandomSampler(dataset, generator=torch.Generator())"
        raise _refused(f"has a generator's state, and the RandomSampler here {what}", advice)
    generator = torch.Generator()
    try:
        generator.set_state(iterator["generator"])
    except (RuntimeError, TypeError) as error:
        raise _refused(f"has no valid state of a generator ({error})", "use another state") from None
    states = {"private": torch.get_rng_state(), "sampler_generator": iterator["generator"]}
    encoded = {name: base64.b64encode(state.numpy().tobytes()).decode() for name, state in states.items()}
    return {"base_seed": draw_seed(generator), "chained": True, **encoded}


def _check(state: Any, declared: Record) -> None:
    check(state, declared, _MESSAGE, LoaderStateError)


def _refused(what: str, advice: str) -> LoaderStateError:
    return LoaderStateError(f"this state of torchdata's StatefulDataLoader {what}: {advice}")

"""States of torchdata's and KempnerForge's loaders: continue with the same batches, or name what is missing."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loading import CursorSampler, EpochSampler, Generated
from torch.utils.data import DistributedSampler as TorchSampler
from torch.utils.data import RandomSampler

from exactdata import (
    DistributedSampler,
    ElasticSampler,
    LoaderStateError,
    MixtureSampler,
    StatefulDataLoader,
    TrainerLoader,
)

SIZE = 22
DATA: Any = range(SIZE)

Arguments = Callable[[], dict[str, Any]]


def in_order() -> dict[str, Any]:
    return {}


def shuffled() -> dict[str, Any]:
    return {"shuffle": True}


def generated() -> dict[str, Any]:
    return {"shuffle": True, "generator": torch.Generator().manual_seed(7)}


def drawn() -> dict[str, Any]:
    return {"sampler": RandomSampler(DATA, generator=torch.Generator().manual_seed(5))}


def dealt(shuffle: bool = True) -> dict[str, Any]:
    return {"sampler": TorchSampler(DATA, 2, 1, shuffle=shuffle, drop_last=True)}


def dealt_in_order() -> dict[str, Any]:
    return dealt(False)


def theirs_dealt() -> dict[str, Any]:
    module = pytest.importorskip("torchdata.stateful_dataloader.sampler")
    return {"sampler": module.StatefulDistributedSampler(DATA, 2, 1, drop_last=True)}


def ours() -> dict[str, Any]:
    return {"sampler": DistributedSampler(DATA, 2, 1)}


def mixture() -> dict[str, Any]:
    return {"sampler": MixtureSampler([0, 9, SIZE], [2, 1], 2, 1, seed=2)}


def elastic() -> dict[str, Any]:
    sizes = {"a": 10, "b": 12}
    return {"sampler": ElasticSampler(sizes, [1, 2], num_replicas=1, rank=0, global_batch_size=4, epoch_samples=SIZE)}


def cursor() -> dict[str, Any]:
    return {"sampler": CursorSampler(SIZE)}


def one_by_one() -> dict[str, Any]:
    return {**drawn(), "batch_size": None}


def shuffled_one_by_one() -> dict[str, Any]:
    return {"shuffle": True, "batch_size": None}


SAMPLERS: list[tuple[Arguments, Arguments]] = [
    (in_order, in_order),
    (shuffled, drawn),
    (generated, generated),
    (shuffled_one_by_one, one_by_one),
    (dealt, dealt),
    (dealt_in_order, dealt_in_order),
    (dealt, ours),
    (theirs_dealt, theirs_dealt),
    (theirs_dealt, ours),
    (ours, ours),
    (mixture, mixture),
    (elastic, elastic),
    (cursor, cursor),
]


def torchdata(**arguments: Any) -> Any:
    """Make a torchdata loader."""
    module = pytest.importorskip("torchdata.stateful_dataloader")
    return module.StatefulDataLoader(DATA, **{"batch_size": 4, **arguments})


def batches(loader: Any) -> list[list[int]]:
    return [torch.as_tensor(batch).tolist() for batch in loader]


def set_epoch(loader: Any, epoch: int) -> None:
    if hasattr(loader.sampler, "set_epoch"):
        loader.sampler.set_epoch(epoch)


def through_a_file(state: Any) -> Any:
    """Save and load a state without executing code from it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("their_arguments", "our_arguments"), SAMPLERS)
def test_an_epoch_of_torchdata_continues_with_equal_batches(
    their_arguments: Arguments, our_arguments: Arguments, workers: int
) -> None:
    loader = torchdata(**their_arguments(), num_workers=workers)
    batches(loader)
    set_epoch(loader, 1)
    length = len(loader)
    iterator, states = iter(loader), [loader.state_dict()]
    epoch = []
    for batch in iterator:
        epoch.append(torch.as_tensor(batch).tolist())
        states.append(through_a_file(loader.state_dict()))
    states.append(through_a_file(loader.state_dict()))
    set_epoch(loader, 2)
    next_epoch = batches(loader)
    assert len(epoch) == length
    for count, state in enumerate(states):
        again = StatefulDataLoader(DATA, **{"batch_size": 4, **our_arguments()})
        again.load_state_dict({**state, "epoch": 1})
        if count < length:
            assert again.batches_yielded == count
            assert batches(again) == epoch[count:]
        assert again.epoch == 2
        if isinstance(again.sampler, TorchSampler):
            again.sampler.set_epoch(2)
        if (
            "shuffle" in their_arguments()
        ):  # torchdata draws more often between two epochs, and even more often with workers
            assert sorted(torch.hstack([torch.as_tensor(batch) for batch in again]).tolist()) == list(DATA)
        else:
            assert batches(again) == next_epoch


@pytest.mark.parametrize(("their_arguments", "our_arguments"), [(in_order, in_order), (shuffled, drawn), (dealt, ours)])
def test_batches_since_torchdatas_last_snapshot_count(their_arguments: Arguments, our_arguments: Arguments) -> None:
    loader = torchdata(**their_arguments(), num_workers=2, snapshot_every_n_steps=2)
    iterator, epoch, states = iter(loader), [], []
    for batch in iterator:
        epoch.append(batch.tolist())
        states.append(loader.state_dict())
    for count, state in enumerate(states[:-1], 1):
        again = StatefulDataLoader(DATA, 4, **our_arguments())
        again.load_state_dict({**state, "epoch": 0})
        assert batches(again) == epoch[count:]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("arguments", [in_order, shuffled, theirs_dealt, elastic])
def test_torchdata_continues_its_states_in_the_same_way(arguments: Arguments, workers: int) -> None:
    loader = torchdata(**arguments(), num_workers=workers)
    iterator = iter(loader)
    next(iterator), next(iterator)
    state = loader.state_dict()
    theirs = torchdata(**arguments(), num_workers=workers)
    theirs.load_state_dict(state)
    again = StatefulDataLoader(DATA, 4, **(drawn() if arguments is shuffled else arguments()), num_workers=workers)
    again.load_state_dict({**state, "epoch": 0})
    assert batches(again) == batches(theirs)


def single(samples: int, counted: int | None = None, **more: Any) -> dict[str, Any]:
    """Return the state of torchdata's loader without workers, after batches of 4."""
    drawn = {key: more.pop(key) for key in ("sampler_state", "sampler_iter_state") if key in more}
    count = -(-samples // 4) if counted is None else counted
    return {
        "_index_sampler_state": None,
        "_sampler_iter_state": {"samples_yielded": samples, **drawn},
        "_sampler_iter_yielded": count,
        "_num_yielded": count,
        "_IterableDataset_len_called": None,
        "_shared_seed": None,
        "fetcher_state": None,
        "dataset_state": None,
        "_iterator_finished": False,
        **more,
    }


def parallel(samples: int, since: int = 0, **more: Any) -> dict[str, Any]:
    """Return the state of torchdata's loader with two workers, `since` batches after its last snapshot."""
    main = {**single(samples, **more), "_num_workers": 2, "_base_seed": 5}
    workers = {f"worker_{at}": {"worker_id": at, "dataset_state": None, "fetcher_state": None} for at in range(2)}
    snapshot = {"_snapshot_step": main["_num_yielded"], "_last_yielded_worker_id": 1, "_main_snapshot": main}
    return {
        "_snapshot": {**snapshot, "_worker_snapshots": workers},
        "_steps_since_snapshot": since,
        "_iterator_finished": False,
    }


def generator(seed: int) -> torch.Tensor:
    return torch.Generator().manual_seed(seed).get_state()


@pytest.mark.parametrize("make", [single, parallel])
def test_a_state_is_saved_again_as_ours(make: Callable[..., dict[str, Any]]) -> None:
    order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(5)).tolist()
    loader = StatefulDataLoader(DATA, 4, **drawn())
    loader.load_state_dict(make(8, sampler_iter_state={"yielded": 8, "generator": generator(5)}))
    again = StatefulDataLoader(DATA, 4, **drawn(), num_workers=2)
    again.load_state_dict(loader.state_dict())
    iterator = iter(again)
    assert next(iterator).tolist() == order[8:12]
    last = StatefulDataLoader(DATA, 4, **drawn())
    last.load_state_dict(again.state_dict())
    rest, following = torch.hstack(list(last)).tolist(), batches(last)
    assert rest == order[12:]
    list(iterator)
    assert following == batches(again)


def test_a_sampler_with_a_state_continues_from_it() -> None:
    loader = StatefulDataLoader(DATA, 4, sampler=EpochSampler(SIZE))
    loader.load_state_dict(parallel(8, sampler_state={"at": 8, "epoch": 3}))
    assert next(iter(loader)).tolist() == [(place * 5 + 3) % SIZE for place in range(8, 12)]


SHUFFLED = {"yielded": 8, "generator": generator(5)}
REFUSED: list[tuple[Arguments, dict[str, Any], str]] = [
    (dealt, single(8), r"has no epoch, on which the order depends: load \{\*\*state, 'epoch': EPOCH\}"),
    (ours, parallel(8), "has no epoch, on which the order depends"),
    (ours, single(8, sampler_state={"yielded": 8}), "has no epoch, on which the order depends"),
    (shuffled, single(8, sampler_iter_state=SHUFFLED), "RandomSampler here has no generator: pass sampler=RandomS"),
    (
        lambda: {"sampler": RandomSampler(DATA, True, generator=torch.Generator())},
        single(8, sampler_iter_state=SHUFFLED),
        "RandomSampler here draws with replacement",
    ),
    (shuffled, single(8), "has no state of a RandomSampler: pass the sampler that it was saved with"),
    (in_order, single(8, sampler_iter_state=SHUFFLED), "has no state of a SequentialSampler"),
    (dealt, single(8, sampler_iter_state=SHUFFLED, epoch=1), "has no state of a DistributedSampler"),
    (ours, single(8, sampler_iter_state=SHUFFLED, epoch=1), "has no state of a DistributedSampler"),
    (elastic, single(8), "has no state of a ElasticSampler"),
    (elastic, single(0, sampler_iter_state=SHUFFLED), "has no state of a ElasticSampler"),
    (mixture, single(8, epoch=0), "has no state of a MixtureSampler"),
    (cursor, parallel(8), "has no state of a CursorSampler"),
    (cursor, parallel(8, 1, sampler_iter_state={"at": 8}), "has a sampler's state that is 1 batches old"),
    (in_order, single(8, 1), "has 8 samples in 1 batches, not of 4: use its batch_size"),
    (in_order, single(9, 2), "has 9 samples in 2 batches, not of 4"),
    (in_order, single(8, dataset_state={"at": 8}), "is of a stream, or of a dataset with a state"),
    (in_order, single(8, fetcher_state={}), "is of a stream"),
    (in_order, single(0, _sampler_iter_state=None), "samples_yielded in this state .* is missing"),
    (in_order, single(8, _num_yielded=-1), "_num_yielded in this state of .* is -1; it must be an integer of 0 or"),
    (in_order, single(8, epoch="1"), "epoch in this state of torchdata's StatefulDataLoader is '1'"),
    (
        drawn,
        single(8, sampler_iter_state={"yielded": 8, "generator": b""}),
        "generator in this .* is b''; it must be a",
    ),
    (drawn, single(8, sampler_iter_state={**SHUFFLED, "generator": generator(0)[:9]}), "no valid state of a generator"),
    (in_order, {"_snapshot": {}, "_steps_since_snapshot": 0}, "_iterator_finished in this state .* is missing"),
    (in_order, {**single(8), "_snapshot": None}, "_snapshot in this state .* is None; it must be a mapping"),
]


@pytest.mark.parametrize(("arguments", "state", "message"), REFUSED)
def test_missing_entries_of_a_torchdata_state_are_named(
    arguments: Arguments, state: dict[str, Any], message: str
) -> None:
    loader = StatefulDataLoader(DATA, 4, **arguments())
    with pytest.raises(ValueError, match=message) as caught:
        loader.load_state_dict(state)
    assert "\n" not in str(caught.value)
    assert loader.epoch == loader.batches_yielded == 0


def test_a_state_of_torchdatas_stream_is_refused() -> None:
    loader = StatefulDataLoader(Generated([20]), 4)
    with pytest.raises(LoaderStateError, match="is of a stream"):
        loader.load_state_dict(single(0, fetcher_state={"dataset_iter_state": None, "fetcher_ended": False}))


def test_iterator_state_that_does_not_load_is_refused() -> None:
    loader = StatefulDataLoader(DATA, 4, batch_sampler=None, sampler=list(DATA))
    loader.load_state_dict(single(8, sampler_iter_state={"at": 8}))
    with pytest.raises(LoaderStateError, match="which list cannot load: pass the sampler that it was saved with"):
        iter(loader)


@pytest.mark.parametrize("epoch", [0, 2])
@pytest.mark.parametrize("arguments", [ours, mixture])
def test_a_state_of_kempnerforge_continues_its_order(arguments: Arguments, epoch: int) -> None:
    sampler = arguments()["sampler"]
    sampler.set_epoch(epoch)
    order = list(sampler)
    saved = {"epoch": epoch, "seed": sampler.seed, "num_replicas": 2, "rank": 1}
    loader = StatefulDataLoader(DATA, 4, **arguments())
    loader.load_state_dict({"epoch": epoch, "batches_yielded": 1, "sampler": saved})
    assert torch.hstack(list(loader)).tolist() == order[4:]
    sampler.set_epoch(epoch + 1)
    order = list(sampler)
    for state in (
        {"epoch": epoch + 1, "batches_yielded": 0, "sampler": saved},  # between two epochs its sampler is one behind
        loader.state_dict(),
    ):
        again = StatefulDataLoader(DATA, 4, **arguments())
        again.load_state_dict(state)
        assert again.epoch == epoch + 1
        assert torch.hstack(list(again)).tolist() == order


def test_kempnerforge_state_with_another_seed_is_refused() -> None:
    saved = {"epoch": 0, "seed": 0, "num_replicas": 2, "rank": 1}
    for key in ("seed", "num_replicas"):
        loader = StatefulDataLoader(DATA, 4, **ours())
        with pytest.raises(ValueError, match=f"the saved state has {key} 7"):
            loader.load_state_dict({"epoch": 0, "batches_yielded": 1, "sampler": {**saved, key: 7}})


@pytest.mark.parametrize("state", [single(8), parallel(8), {"epoch": 0, "batches_yielded": 1, "sampler": {"epoch": 0}}])
def test_foreign_trainer_state_is_refused_with_the_remedy(state: dict[str, Any]) -> None:
    loader = TrainerLoader(DATA, global_batch_size=4)
    with pytest.raises(LoaderStateError, match="load it into StatefulDataLoader with the sampler"):
        loader.load_state_dict(state)

"""What a run must remember besides weights: step, tokens, random generators, scheduler, data position.

Everything here loads with `torch.load(weights_only=True)`: numbers, strings, tensors, and dicts, lists
and tuples of them.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch

from runner.errors import CheckpointError, UserError, nearest

TrainState = dict[str, Any]

RESERVED = (
    "step",
    "tokens_seen",
    "rng",
    "scheduler",
    "dataloader",
    "version",
    "rng_by_rank",
    "dataloader_by_rank",
    "optimizer",
    "model_extra",
)
"""Keys of a train state that `extra` may not use."""


class Stateful(Protocol):
    """Anything with a state: a scheduler, a dataloader."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


def get_rng_state() -> dict[str, Any]:
    """The states of this process's global random generators.

    Returns:
        `python` (the tuple of `random.getstate`), `numpy` (the legacy global generator as a dict of
        numbers and one int64 tensor), `torch_cpu` (uint8 tensor) and, where there is CUDA,
        `torch_cuda` (uint8 tensor of the current device: each rank keeps its own).
    """
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": {
            "kind": str(kind),
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached_gaussian": float(cached),
        },
        "torch_cpu": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["torch_cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Put the global random generators back; a generator that `state` does not name is left alone.

    `numpy` may be the dict of `get_rng_state` or the tuple of `np.random.get_state()`; `torch_cuda` one
    tensor or a list with one for each device.

    Raises:
        CheckpointError: a key is unknown or a value is not the state of such a generator.
    """
    if not isinstance(state, Mapping):
        raise CheckpointError(f"the random generators' state is {state!r}: give what get_rng_state() returned")
    known = ("python", "numpy", "torch_cpu", "torch_cuda")
    for name in state:
        if name not in known:
            raise CheckpointError(
                f"random generator {name!r} is unknown{nearest(str(name), known)}; known are {', '.join(known)}"
            )
    try:
        if "python" in state:
            random.setstate(_tuples(state["python"]))
        if "numpy" in state:
            np.random.set_state(_numpy_legacy(state["numpy"]))
        if "torch_cpu" in state:
            torch.set_rng_state(state["torch_cpu"])
        if "torch_cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(_own_device(state["torch_cuda"]))
    except (TypeError, ValueError, KeyError, RuntimeError, IndexError) as error:
        raise CheckpointError(
            f"the random generators' state cannot be used ({error}); "
            "save it with get_rng_state of this version of Python, numpy and torch"
        ) from error


def _tuples(value: Any) -> Any:
    """Lists as tuples, at every depth: what `random.setstate` wants."""
    return tuple(_tuples(item) for item in value) if isinstance(value, (list, tuple)) else value


def _numpy_legacy(state: Any) -> Any:
    """`np.random.set_state`'s argument from either form."""
    if not isinstance(state, Mapping):
        return tuple(state)
    keys = torch.as_tensor(state["keys"]).numpy().astype(np.uint32)
    return (state["kind"], keys, state["position"], state["has_gauss"], state["cached_gaussian"])


def _own_device(state: Any) -> torch.Tensor:
    """The state for the current device, out of one tensor or a list by device."""
    chosen = state
    if isinstance(state, (list, tuple)):
        chosen = state[torch.cuda.current_device() % len(state)]
    if not isinstance(chosen, torch.Tensor):
        raise TypeError(f"torch_cuda is a {type(chosen).__name__}, expected a uint8 tensor")
    return chosen.cpu()


def rng_for_rank(by_rank: list[dict[str, Any]], rank: int) -> dict[str, Any]:
    """The random state of `rank`, out of those saved by each rank of a run of another size perhaps.

    A rank that was there gets its own back. A rank that is new gets generators seeded with
    SHA-256("rank", its number, the saved torch state of rank 0): the same however often it is resumed,
    different for every rank and every checkpoint.
    """
    if rank < len(by_rank):
        return by_rank[rank]
    base = by_rank[0]["torch_cpu"].numpy().tobytes()
    seed = int.from_bytes(hashlib.sha256(b"rank %d " % rank + base).digest()[:8], "little")
    legacy: Any = np.random.RandomState(seed % 2**32).get_state(legacy=True)
    state = {
        "python": random.Random(seed).getstate(),
        "numpy": {
            "kind": "MT19937",
            "keys": torch.from_numpy(np.asarray(legacy[1]).astype(np.int64)),
            "position": int(legacy[2]),
            "has_gauss": 0,
            "cached_gaussian": 0.0,
        },
        "torch_cpu": torch.Generator().manual_seed(seed).get_state(),
    }
    if torch.cuda.is_available():
        state["torch_cuda"] = torch.Generator("cuda").manual_seed(seed).get_state()
    return state


def build_train_state(
    step: int,
    tokens_seen: int,
    scheduler: Stateful | None = None,
    dataloader: Stateful | None = None,
    extra: Mapping[str, Any] | None = None,
) -> TrainState:
    """The state of a run after `step` complete steps, as it goes into train_state.pt.

    Args:
        step: optimizer steps complete.
        tokens_seen: tokens trained on so far, over all ranks.
        scheduler, dataloader: whose `state_dict()` is kept under that name; a training run always
            passes its dataloader.
        extra: further entries, standing beside the others.

    Raises:
        UserError: `extra` uses a reserved key, or the scheduler or the dataloader has no `state_dict`.
    """
    state: TrainState = {"step": int(step), "tokens_seen": int(tokens_seen), "rng": get_rng_state()}
    if scheduler is not None:
        state["scheduler"] = _state_of("scheduler", scheduler)
    if dataloader is not None:
        state["dataloader"] = _state_of("dataloader", dataloader)
    for key, value in (extra or {}).items():
        if key in RESERVED:
            raise UserError(
                f"extra train state may not be called {key!r}: reserved are {', '.join(RESERVED)}; rename it"
            )
        state[key] = value
    return state


def _state_of(name: str, thing: Stateful) -> dict[str, Any]:
    if not callable(getattr(thing, "state_dict", None)):
        raise UserError(
            f"the {name} is a {type(thing).__name__}, which has no state_dict(): a run could not go on where it was; "
            "give one that has state_dict and load_state_dict"
        )
    return thing.state_dict()


def restore_train_state(
    state: Mapping[str, Any],
    scheduler: Stateful | None = None,
    dataloader: Stateful | None = None,
) -> tuple[int, int, dict[str, Any]]:
    """Put scheduler, dataloader and the random generators back to where `state` was taken.

    The generators come last: restoring a dataloader may draw from them. With several ranks, each
    gets its own generators and its own part of the dataloader's state; see `rng_for_rank`.

    Returns:
        (step, tokens_seen, extra); an empty state is a fresh start: (0, 0, {}).

    Raises:
        CheckpointError: something is asked for that `state` does not hold.
    """
    if not state:
        return 0, 0, {}
    rank, world = rank_and_world()
    if scheduler is not None:
        scheduler.load_state_dict(_entry(state, "scheduler"))
    if dataloader is not None:
        _restore_dataloader(dataloader, state, rank, world)
    if "rng_by_rank" in state:
        set_rng_state(rng_for_rank(state["rng_by_rank"], rank))
    elif "rng" in state:
        set_rng_state(state["rng"])
    extra = {key: value for key, value in state.items() if key not in RESERVED}
    return int(_entry(state, "step")), int(_entry(state, "tokens_seen")), extra


def rank_and_world() -> tuple[int, int]:
    """This process's rank and the number of ranks; (0, 1) without torch.distributed."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def _entry(state: Mapping[str, Any], key: str) -> Any:
    try:
        return state[key]
    except KeyError:
        raise CheckpointError(
            f"the train state has no {key!r}, only {', '.join(map(repr, state))}; it was saved without it"
        ) from None


def _restore_dataloader(dataloader: Any, state: Mapping[str, Any], rank: int, world: int) -> None:
    """Give `dataloader` its part of what all ranks saved; loaders that know how spread it over a new world."""
    by_rank = state.get("dataloader_by_rank") or [_entry(state, "dataloader")]
    if world == len(by_rank):
        own = by_rank[rank]
    elif hasattr(dataloader, "deaggregate_state_dict"):
        own = dataloader.deaggregate_state_dict(dataloader.aggregate_state_dict(by_rank), rank, world)
    else:
        raise CheckpointError(
            f"the checkpoint holds the data position of {len(by_rank)} ranks and this run has {world}; "
            f"{type(dataloader).__name__} cannot spread it (it has no deaggregate_state_dict): "
            f"resume with {len(by_rank)} ranks"
        )
    dataloader.load_state_dict(own)

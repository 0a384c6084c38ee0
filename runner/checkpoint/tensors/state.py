"""Build and restore the train state of a run: step, tokens, random generators, scheduler and data position.

`TrainState` defines the keys of train_state.pt, and `extra` adds further ones. All values can be loaded with
`torch.load(weights_only=True)`: numbers, strings, tensors, and dicts, lists and tuples of them.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import numpy as np
import torch

from exactdata.ranks import current_ranks
from runner.checkpoint.tensors.compare import EVERY, unlike
from runner.errors import CheckpointError, UserError, nearest

StateDict = dict[str, Any]


class Stateful(Protocol):
    """An object with a state, such as a scheduler or a dataloader."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class OptimizerLike(Protocol):
    """The parts of an optimizer that a checkpoint needs. A combination of several also has a `class_name`."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    @property
    def state(self) -> MutableMapping[torch.Tensor, Any]: ...


class Averaged(Protocol):
    """The parts of averaged weights that a checkpoint needs, as in torch.optim.swa_utils.AveragedModel."""

    module: Any
    n_averaged: torch.Tensor


@dataclass(frozen=True)
class OptimizerState:
    """The values of an optimizer that are not tensors. Parameters are named as in the model.

    Attributes:
        class_name: class of the optimizer, or names and classes if several are combined.
        param_groups: the options of each group, and the names of its parameters as `params`.
        values: entries of the state that are not tensors, by parameter and key.
        on_cpu: `<parameter>.<key>` of each tensor that stays on the CPU, regardless of its parameter's device.
    """

    class_name: str
    param_groups: list[dict[str, Any]]
    values: dict[str, dict[str, Any]]
    on_cpu: list[str]


@dataclass(frozen=True)
class TrainState:
    """The content of train_state.pt. Each field except `extra` is a key. Entries that are None are omitted.

    Attributes:
        step: completed optimizer steps.
        tokens_seen: tokens trained on so far, over all ranks.
        rng: random generators of this rank; in the file, those of rank 0. See `get_rng_state`.
        scheduler: state of the learning-rate scheduler.
        dataloader: state of this rank's dataloader; in the file, of rank 0's dataloader.
        rng_by_rank: `rng` of every rank.
        dataloader_by_rank: `dataloader` of every rank, if there were several ranks.
        optimizer: values of the optimizer that are not tensors.
        model_extra: entries of the model's state dict that are not tensors.
        version: format version of the checkpoint.
        extra: further entries, at the same level as the other keys.
    """

    step: int
    tokens_seen: int
    rng: StateDict
    scheduler: StateDict | None = None
    dataloader: StateDict | None = None
    rng_by_rank: list[StateDict] | None = None
    dataloader_by_rank: list[StateDict] | None = None
    optimizer: OptimizerState | None = None
    model_extra: StateDict | None = None
    version: int | None = None
    extra: StateDict = field(default_factory=dict)

    def to_dict(self) -> StateDict:
        """Return the state as plain dicts."""
        entries = {name: getattr(self, name) for name in RESERVED if getattr(self, name) is not None}
        if self.optimizer is not None:
            entries["optimizer"] = dict(vars(self.optimizer))
        return {**entries, **self.extra}

    @staticmethod
    def from_dict(state: Mapping[str, Any], where: str) -> TrainState:
        """Build a train state from plain dicts, the inverse of `to_dict`.

        Args:
            state: a train state.
            where: description of `state`, for messages.

        Raises:
            CheckpointError: an entry is missing or has the wrong type.
        """
        require(state, ("step", "tokens_seen", "rng"), where)
        check_like(state, _EXAMPLE, where)
        entries = {name: state[name] for name in RESERVED if name in state}
        if "optimizer" in entries:
            names = [each.name for each in fields(OptimizerState)]
            require(entries["optimizer"], names, f"the entry 'optimizer' of {where}")
            entries["optimizer"] = OptimizerState(**{name: entries["optimizer"][name] for name in names})
        return TrainState(**entries, extra={key: value for key, value in state.items() if key not in RESERVED})


RESERVED = tuple(each.name for each in fields(TrainState) if each.name != "extra")
"""Keys of a train state that `extra` may not use."""


_EXAMPLE: StateDict = {
    "step": 0,
    "tokens_seen": 0,
    "rng": {},
    "scheduler": {},
    "dataloader": {},
    "rng_by_rank": [{}],
    "dataloader_by_rank": [{}],
    "optimizer": {"class_name": "", "param_groups": [{"params": [""]}], "values": {EVERY: {}}, "on_cpu": [""]},
    "model_extra": {},
    "version": 0,
}


def check_like(state: Any, example: Any, where: str) -> None:
    """Check that the types of an untrusted state match an example; see `unlike`.

    Raises:
        CheckpointError: a type differs. The message names the first entry with a wrong type.
    """
    if difference := unlike(state, example, where):
        raise CheckpointError(f"{difference}: it was edited; use another checkpoint")


def require(state: Mapping[str, Any], keys: Iterable[str], where: str) -> None:
    """Check that `state` has all `keys`.

    Raises:
        CheckpointError: a key is missing. The message names the missing key and lists the existing keys.
    """
    for key in keys:
        if key not in state:
            there = ", ".join(map(repr, state)) or "nothing"
            raise CheckpointError(f"{where} has no {key!r}, only {there}; it was saved without it")


def get_rng_state() -> StateDict:
    """Return the states of this process's global random generators.

    Returns:
        A dict with `python` (the tuple of `random.getstate`), `numpy` (the legacy global generator as a dict of numbers
            and one int64 tensor), `torch_cpu` (uint8 tensor) and, with CUDA, `torch_cuda` (uint8 tensor of the current
            device, because each rank saves the state of its device).

    Example:
        >>> import torch
        >>> from runner.checkpoint import get_rng_state, set_rng_state
        >>> state = get_rng_state()
        >>> first = torch.rand(3)
        >>> set_rng_state(state)
        >>> torch.equal(torch.rand(3), first)
        True
    """
    state: StateDict = {
        "python": random.getstate(),
        "numpy": _numpy_state(np.random.get_state(legacy=True)),
        "torch_cpu": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["torch_cuda"] = torch.cuda.get_rng_state()
    return state


def _numpy_state(legacy: Any) -> StateDict:
    """Convert numpy's state tuple to plain values and a tensor."""
    kind, keys, position, has_gauss, cached = legacy
    return {
        "kind": str(kind),
        "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "position": int(position),
        "has_gauss": int(has_gauss),
        "cached_gaussian": float(cached),
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Set the global random generators. A generator that `state` does not name keeps its state.

    Args:
        state: from `get_rng_state`. `numpy` may also be the tuple of `np.random.get_state()`, and `torch_cuda` a list
            with one tensor per device.

    Raises:
        CheckpointError: a key is unknown, or a value is not a valid state of its generator.
    """
    if not isinstance(state, Mapping):
        raise CheckpointError(f"the state of the random generators is {state!r}: pass what get_rng_state() returned")
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
            f"the state of the random generators cannot be used ({error}); "
            "save it with get_rng_state of this version of Python, numpy and torch"
        ) from error


def _tuples(value: Any) -> Any:
    """Convert lists to tuples at every depth, as `random.setstate` requires."""
    return tuple(_tuples(item) for item in value) if isinstance(value, (list, tuple)) else value


def _numpy_legacy(state: Any) -> Any:
    """Convert either form of numpy's state to the argument of `np.random.set_state`."""
    if not isinstance(state, Mapping):
        return tuple(state)
    keys = torch.as_tensor(state["keys"]).numpy().astype(np.uint32)
    return (state["kind"], keys, state["position"], state["has_gauss"], state["cached_gaussian"])


def _own_device(state: Any) -> torch.Tensor:
    """Return the state for the current device, given one tensor or a list with one tensor per device."""
    chosen = state
    if isinstance(state, (list, tuple)):
        chosen = state[torch.cuda.current_device() % len(state)]
    if not isinstance(chosen, torch.Tensor):
        raise TypeError(f"torch_cuda is a {type(chosen).__name__}, expected a uint8 tensor")
    return chosen.cpu()


def rng_for_rank(by_rank: list[StateDict], rank: int) -> StateDict:
    """Return the generator states for `rank`, given the states of all ranks at the save, which may have been fewer.

    A rank that existed at the save gets its saved state. A new rank gets generators seeded with SHA-256("rank", rank
    number, saved torch state of rank 0). This seed is the same at every resume from the same checkpoint. It differs
    between ranks and between checkpoints.
    """
    if rank < len(by_rank):
        return by_rank[rank]
    require(by_rank[0], ("torch_cpu",), "the state of rank 0's random generators")
    base = torch.as_tensor(by_rank[0]["torch_cpu"]).numpy().tobytes()
    seed = int.from_bytes(hashlib.sha256(b"rank %d " % rank + base).digest()[:8], "little")
    state: StateDict = {
        "python": random.Random(seed).getstate(),
        "numpy": _numpy_state(np.random.RandomState(seed % 2**32).get_state(legacy=True)),
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
) -> StateDict:
    """Return the state of a run after `step` completed steps, in the form of train_state.pt.

    Args:
        step: completed optimizer steps.
        tokens_seen: tokens trained on so far, over all ranks.
        scheduler: its `state_dict()` becomes the entry `scheduler`.
        dataloader: its `state_dict()` becomes the entry `dataloader`. A training run always passes its dataloader.
        extra: further entries, at the same level as the others.

    Raises:
        UserError: `extra` uses a reserved key, or the scheduler or the dataloader has no `state_dict`.

    Example:
        >>> from runner.checkpoint import build_train_state
        >>> state = build_train_state(step=20, tokens_seen=2560, extra={"best_accuracy": 0.9})
        >>> sorted(state)
        ['best_accuracy', 'rng', 'step', 'tokens_seen']
    """
    for key in extra or {}:
        if key in RESERVED:
            raise UserError(
                f"extra train state may not be called {key!r}: reserved are {', '.join(RESERVED)}; rename it"
            )
    return TrainState(
        step=int(step),
        tokens_seen=int(tokens_seen),
        rng=get_rng_state(),
        scheduler=None if scheduler is None else _state_of("scheduler", scheduler),
        dataloader=None if dataloader is None else _state_of("dataloader", dataloader),
        extra=dict(extra or {}),
    ).to_dict()


def _state_of(name: str, thing: Stateful) -> StateDict:
    if not callable(getattr(thing, "state_dict", None)):
        raise UserError(
            f"the {name} is a {type(thing).__name__}, which has no state_dict(), so a run could not be resumed: "
            "pass one that has state_dict and load_state_dict"
        )
    return thing.state_dict()


def restore_train_state(
    state: Mapping[str, Any],
    scheduler: Stateful | None = None,
    dataloader: Stateful | None = None,
) -> tuple[int, int, StateDict]:
    """Restore scheduler, dataloader and the random generators from `state`.

    The generators are restored last, because restoring a dataloader may draw from them. With several ranks, each rank
    restores its own generators and its part of the dataloader state; see `rng_for_rank`.

    Args:
        state: result of `TrainStateManager.load` or `build_train_state`, or empty for a new run.
        scheduler: scheduler to restore, if any.
        dataloader: dataloader to restore, if any.

    Returns:
        (step, tokens_seen, extra), or (0, 0, {}) for an empty state.

    Raises:
        CheckpointError: `state` has no entry for the scheduler or the dataloader.

    Example:
        >>> import torch
        >>> from runner.checkpoint import build_train_state, restore_train_state
        >>> state = build_train_state(step=20, tokens_seen=2560)
        >>> expected = torch.randn(3)
        >>> step, tokens_seen, extra = restore_train_state(state)
        >>> step, tokens_seen, torch.equal(torch.randn(3), expected)  # the generators are restored, too
        (20, 2560, True)
    """
    if not state:
        return 0, 0, {}
    saved = TrainState.from_dict(state, "the train state")
    rank, world_size = current_ranks()
    if scheduler is not None:
        require(state, ("scheduler",), "the train state")
        check_like(state["scheduler"], scheduler.state_dict(), "scheduler in the train state")
        scheduler.load_state_dict(state["scheduler"])
    if dataloader is not None:
        require(state, ("dataloader",), "the train state")
        by_rank = saved.dataloader_by_rank or [state["dataloader"]]
        dataloader.load_state_dict(_dataloader_state(dataloader, by_rank, rank, world_size))
    set_rng_state(rng_for_rank(saved.rng_by_rank, rank) if saved.rng_by_rank else saved.rng)
    return int(saved.step), int(saved.tokens_seen), saved.extra


def _dataloader_state(dataloader: Any, by_rank: list[StateDict], rank: int, world_size: int) -> StateDict:
    """Return the dataloader state for `rank`. If the world size has changed, let the loader redistribute the states.

    Raises:
        CheckpointError: the world size differs, and the loader cannot redistribute the states.
        UserError: raised by the loader if the ranks were saved at different positions.
    """
    can_split = hasattr(dataloader, "aggregate_state_dict") and hasattr(dataloader, "deaggregate_state_dict")
    aggregated = dataloader.aggregate_state_dict(by_rank) if can_split and max(len(by_rank), world_size) > 1 else None
    if aggregated is not None:  # even on the same number of ranks, because the number of workers may differ
        split: StateDict = dataloader.deaggregate_state_dict(aggregated, rank, world_size)
        return split
    if world_size == len(by_rank):
        return by_rank[rank]
    raise CheckpointError(
        f"the checkpoint holds the data position of {len(by_rank)} ranks, this run has {world_size}, and "
        f"{type(dataloader).__name__} cannot split it anew (it has no deaggregate_state_dict): "
        f"resume with {len(by_rank)} ranks"
    )

"""Select the checkpoint to load: the newest valid one, the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from runner.checkpoint.files import choice
from runner.checkpoint.files import manifest as manifests
from runner.checkpoint.files.choice import Intact
from runner.checkpoint.files.manifest import TRAIN_STATE, CorruptionError, Manifest
from runner.checkpoint.files.store import Store
from runner.checkpoint.tensors.checks import check_fingerprint
from runner.checkpoint.tensors.layout import INDEX
from runner.checkpoint.tensors.reader import CheckpointReader, load_train_state
from runner.checkpoint.tensors.state import TrainState
from runner.errors import CheckpointError
from runner.system.distributed import World

T = TypeVar("T")

SMALL = (INDEX, TRAIN_STATE)
"""Files that every rank reads."""


def select(store: Store, world: World, load: Callable[[Intact], T], set_aside: Callable[[int, str], None]) -> T | None:
    """Load the newest valid checkpoint. Log a warning about directories that only look like checkpoints.

    Args:
        store: the checkpoints.
        world: the ranks. All of them must call this function.
        load: function that loads and verifies a checkpoint, called on every rank. If it raises CorruptionError on every
            rank, the checkpoint is set aside, and the checkpoint at the next lower step is tried.
        set_aside: called on rank 0 with the step of a corrupt checkpoint and a description of the corruption.

    Returns:
        The result of `load`, or None if there are no checkpoints.

    Raises:
        CheckpointError: there are checkpoints, but none is valid. Or a checkpoint newer than the newest valid one is
            not readable or has an unknown format version.
        SupersededError: a newer attempt holds the lease.
    """
    corruptions: list[str] = []
    world.run_on_main(lambda: choice.warn_of_strangers(store))
    for candidate in world.run_on_main(lambda: choice.candidates(store)):
        if candidate.error is not None:
            raise candidate.error
        try:
            if not isinstance(candidate, Intact):
                raise CorruptionError(str(candidate.corruption))
            return load(candidate)
        except CorruptionError as corruption:
            corruptions.append(f"{candidate.path.name}: {corruption}")
            world.run_on_main(partial(set_aside, candidate.step, str(corruption)))
    world.run_on_main(lambda: choice.check_never_saved(store, corruptions))
    return None


def agreed(world: World, action: Callable[[], T]) -> T:
    """Run `action` on every rank and return its result on this rank.

    Raises:
        CorruptionError: raised on every rank if any rank found corruption.
        Exception: see `World.run_on_all`.
    """

    def found() -> tuple[T | None, str | None]:
        try:
            return action(), None
        except CorruptionError as corruption:
            return None, str(corruption)

    result, corruption = world.run_on_all(found)
    for each in world.gather(corruption):
        if each is not None:
            raise CorruptionError(each)
    return result  # type: ignore[return-value]


def tensor_files(manifest: Manifest, world: World) -> list[str]:
    """List the tensor files that this rank verifies: the file that it wrote, if the number of ranks is unchanged."""
    return sorted(set(manifest.files) - set(SMALL))[world.rank :: world.size]


def open_checkpoint(found: Intact, fingerprint: Mapping[str, Any]) -> tuple[TrainState, CheckpointReader]:
    """Open a checkpoint and return its train state and a reader for its tensors.

    Args:
        found: the checkpoint. Its index and train state are verified here, but not its tensors.
        fingerprint: fingerprint of this run.

    Raises:
        CorruptionError: a file differs from what was written.
        CheckpointError: the checkpoint belongs to a different run, has an unknown format version, lacks an entry, or
            contains an object that does not belong in a checkpoint.
    """
    corruption = choice.size_error(found)
    if corruption is not None:
        raise CorruptionError(corruption)
    reader = CheckpointReader(found.at, found.manifest)
    loaded = load_train_state(found.at, found.manifest)
    check_fingerprint(found.manifest.fingerprint, fingerprint, f"checkpoint {found.path}")
    where = str(found.path / TRAIN_STATE)
    state = TrainState.from_dict(loaded, where)
    manifests.check_version(state.version, where)
    if state.step != found.step:
        raise CheckpointError(
            f"{where} is of step {state.step}, but its manifest is of step {found.step}: it was edited; remove "
            f"{found.path}, and rerun to resume from an older checkpoint"
        )
    return state, reader

"""Which checkpoint to load, agreed by all ranks: the newest that verifies."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from runner.checkpoint import directory as checkpoint_dir
from runner.checkpoint import manifest as manifests
from runner.checkpoint.checks import check_fingerprint
from runner.checkpoint.directory import Candidate, Fence, Info
from runner.checkpoint.manifest import TRAIN_STATE, CorruptionError
from runner.checkpoint.reader import CheckpointReader, load_train_state
from runner.checkpoint.state import TrainState
from runner.errors import CheckpointError
from runner.system.distributed import World


def select(directory: Path, world: World, fence: Fence) -> Info | None:
    """The highest step that verifies; corrupt checkpoints of higher steps are set aside. What is none is named.

    Returns:
        None if there is no checkpoint at all.

    Raises:
        CheckpointError: there are checkpoints and none is valid, or one of a higher step cannot be judged.
        SupersededError: a newer attempt holds the lease.
    """
    corruptions: list[str] = []
    world.run_on_main(lambda: checkpoint_dir.warn_of_strangers(directory))
    for candidate in world.run_on_main(lambda: checkpoint_dir.candidates(directory)):
        corruption = _corruption_of(candidate, world)
        if corruption is None and candidate.manifest is not None:
            return Info(candidate.path, candidate.manifest)
        corruptions.append(f"{candidate.path.name}: {corruption}")
        world.run_on_main(partial(checkpoint_dir.set_aside, candidate.path, "corrupt", str(corruption), fence))
    world.run_on_main(lambda: checkpoint_dir.check_never_saved(directory, corruptions))
    return None


def _corruption_of(candidate: Candidate, world: World) -> str | None:
    """What is wrong with a checkpoint, or None; each rank reads its share of the files."""
    if candidate.error is not None:
        raise candidate.error
    manifest = candidate.manifest
    if manifest is None:
        return candidate.corruption

    def check() -> str | None:
        try:
            manifests.verify(candidate.path, manifest, world.rank, world.size)
        except CorruptionError as error:
            return str(error)
        return None

    return next((found for found in world.gather(world.run_on_all(check)) if found is not None), None)


def open_checkpoint(info: Info, fingerprint: Mapping[str, Any]) -> tuple[TrainState, CheckpointReader]:
    """The train state and the tensors of a verified checkpoint.

    Raises:
        CheckpointError: it is of another run or an unknown format version, lacks an entry, or contains something that
            does not belong in a checkpoint.
    """
    check_fingerprint(info.manifest.fingerprint, fingerprint, f"checkpoint {info.path}")
    where = str(info.path / TRAIN_STATE)
    if TRAIN_STATE not in info.manifest.files:
        raise CheckpointError(f"{where} is refused: it is not in the manifest")
    state = TrainState.from_dict(load_train_state(info.path), where)
    manifests.check_version(state.version, where)
    if state.step != info.step:
        raise CheckpointError(
            f"{where} is of step {state.step}, but its manifest is of step {info.step}: it was edited; remove "
            f"{info.path}, and rerun to resume from an older checkpoint"
        )
    return state, CheckpointReader(info.path, info.manifest)

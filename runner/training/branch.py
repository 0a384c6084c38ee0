"""The beginning of a branch: what it takes over from its trunk, and what it does differently from there on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from runner.checkpoint.files.adoption import adopt
from runner.checkpoint.files.directory import store_of
from runner.checkpoint.files.reading import newest_step
from runner.checkpoint.files.store import Fence
from runner.config.schema import Config
from runner.errors import CheckpointError, MismatchError, UserError
from runner.metrics import jsonl
from runner.rundir.paths import RunDir
from runner.rundir.trunk import find, missing
from runner.system import files


def take_over(run: RunDir, trunk: RunDir, step: int, fence: Fence) -> None:
    """Take the trunk's records up to `step`, and then its checkpoint, over into the directory of the branch.

    It may be called again after a kill: the checkpoint comes last. Nothing to do once the branch has one.

    Args:
        run: of the branch, with its guard.
        trunk: of the trunk, of which nothing is changed.
        step: of the fork.
        fence: of the branch.

    Raises:
        CheckpointError: the trunk has no valid checkpoint of that step.
        SupersededError: a newer attempt holds the lease of the branch.
        OSError: the file system refused.
    """
    # Another machine may have trained the branch a moment ago: its records must not be replaced.
    with suppress(FileNotFoundError):
        files.look_anew(run.checkpoints)
    if run.newest_step():
        return
    store_of(trunk).look_anew()
    if not files.is_dir(trunk.checkpoint(step)):
        raise CheckpointError(missing(trunk, step))
    jsonl.copy_records(run, trunk, step)
    adopt(trunk.checkpoint(step), run.checkpoints, fence)


def trunk_of(config: Config) -> RunDir | None:
    """The directory of the trunk; None if the run is no branch."""
    return None if config.fork.run is None else find(config.fork.run, Path(config.run.dir or "."))


def restarts_optimizers(config: Config, step: int) -> bool:
    """Whether a branch begins at `step` that changes optimizers or schedules in another way than by a phase."""
    changed = any(key.startswith(("optimizer.", "optimizers.", "scheduler.")) for key in config.fork.was)
    return changed and config.fork.begins_at(step)


@contextmanager
def fitting(run: RunDir, config: Config) -> Iterator[None]:
    """Report what the checkpoint of a trunk does not fit as an error in the command that begins the branch.

    Raises:
        UserError: in place of a MismatchError.
    """
    try:
        yield
    except MismatchError as error:
        fork = config.fork
        if not fork.begins_at(newest_step(run)):
            raise
        # Without its remedy, which is for a run of its own.
        reason = re.split(r"; |: (?=restore|set|use)", str(error))[0]
        raise UserError(
            f"a branch of {fork.run} at step {fork.step} cannot change this: {reason}; leave it as "
            f"the trunk has it, or begin a new run with the weights that fit (init_from={fork.run}@{fork.step} "
            "init_from.strict=false)"
        ) from None

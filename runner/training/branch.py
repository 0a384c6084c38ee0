"""Begin a branch: copy the records and the checkpoint of its trunk, and find the settings that the branch changes."""

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
    """Copy the trunk's records up to `step`, then its checkpoint, to the run directory of the branch.

    The checkpoint is copied last. If a kill interrupts this, call it again. It does nothing if the branch has a
    checkpoint.

    Args:
        run: run directory of the branch, with its guard.
        trunk: run directory of the trunk, which is only read.
        step: step of the fork.
        fence: fence of the branch.

    Raises:
        CheckpointError: the trunk has no valid checkpoint of that step.
        SupersededError: a newer attempt holds the lease of the branch.
        OSError: the file system returned an error.
    """
    # Another machine may have just trained the branch. Do not replace its records.
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
    """Return the run directory of the trunk, or None if the run is not a branch."""
    return None if config.fork.run is None else find(config.fork.run, Path(config.run.dir or "."))


def restarts_optimizers(config: Config, step: int) -> bool:
    """Check whether a branch that changes optimizers or schedules begins at `step`."""
    changed = any(key.startswith(("optimizer.", "optimizers.", "scheduler.")) for key in config.fork.was)
    return changed and config.fork.begins_at(step)


@contextmanager
def fitting(run: RunDir, config: Config) -> Iterator[None]:
    """Convert a mismatch with the trunk's checkpoint into an error about the command that begins the branch.

    Raises:
        UserError: the checkpoint does not match the branch. Raised in place of MismatchError.
    """
    try:
        yield
    except MismatchError as error:
        fork = config.fork
        if not fork.begins_at(newest_step(run)):
            raise
        # Omit the remedy, which does not apply to a branch.
        reason = re.split(r"; |: (?=restore|set|use)", str(error))[0]
        raise UserError(
            f"a branch of {fork.run} at step {fork.step} cannot change this: {reason}; leave it as "
            f"the trunk has it, or begin a new run with the weights that fit (init_from={fork.run}@{fork.step} "
            "init_from.strict=false)"
        ) from None

"""Which checkpoint of a run somebody means: a step, the newest, or the best. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from runner.checkpoint.files import directory as checkpoint_dir
from runner.checkpoint.files.directory import Candidate, Retention
from runner.errors import CheckpointError, UserError

LAST, BEST = "last", "best"


def choose(
    directory: Path, which: str | int = LAST, on_corruption: Callable[[Candidate, str], None] | None = None
) -> Candidate:
    """The checkpoint that `which` means, of which every byte was verified.

    Args:
        directory: of the checkpoints of a run.
        which: a step, `last` or `best`.
        on_corruption: called with each corrupt checkpoint that is newer than the last valid one.

    Raises:
        UserError: there is no such checkpoint.
        CheckpointError: it is corrupt.
    """
    if which == LAST:
        newest = checkpoint_dir.newest(directory, on_corruption)
        if newest is None:
            raise UserError(f"{directory} has no checkpoint")
        return Candidate(newest.path, newest.step, newest.manifest)
    found = checkpoint_dir.candidates(directory)
    if which == BEST:
        chosen = best(found)
        if chosen is None:
            raise UserError(
                f"no checkpoint in {directory} was judged by a metric: evaluate at the steps that are saved "
                f"(eval.every_steps, checkpoint.best.metric), or name a step ({_steps(found)})"
            )
    else:
        chosen = next((one for one in found if str(one.step) == str(which)), None)
        if chosen is None:
            raise UserError(f"there is no checkpoint of step {which} in {directory}; available: {_steps(found)}")
    if corruption := checkpoint_dir.corruption_of(chosen):
        raise CheckpointError(f"{chosen.path} is corrupt: {corruption}")
    return chosen


def best(candidates: Sequence[Candidate]) -> Candidate | None:
    """The best by the metric and the mode of the newest one that has a metric; None if none has."""
    judged = [one.manifest for one in candidates if one.manifest and one.manifest.metric is not None]
    if not judged:
        return None
    by = Retention(best_metric=judged[0].metric_name, best_mode=judged[0].metric_mode)
    return next(iter(by.best(candidates)), None)


def _steps(found: Sequence[Candidate]) -> str:
    return ", ".join(str(step) for step in sorted(one.step for one in found)) or "none"

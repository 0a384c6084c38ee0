"""The trunk of a branch: where it is, and why it has no checkpoint of a step, if it has none."""

from __future__ import annotations

from pathlib import Path

from runner.rundir.attempt_log import Finish, last_step
from runner.rundir.paths import RunDir
from runner.system import files


def find(path: str, branch: Path) -> RunDir:
    """Find the directory of a trunk: where it was when the branch was made, or beside the branch by its name."""
    there, beside = Path(path), branch.parent / Path(path).name
    return RunDir(beside if not files.is_dir(there) and files.is_dir(beside) else there)


def missing(run: RunDir, step: int) -> str:
    """Say that there is no checkpoint of `step`, and which there are."""
    steps = run.checkpoint_steps()
    those = f"that of step {steps[0]}" if len(steps) == 1 else f"those of steps {', '.join(map(str, steps))}"
    there = f"it has {those}" if steps else "it has none"
    return f"{run.path} has no checkpoint of step {step}: {there}"


def remedy(run: RunDir, step: int, total: int | None, every_steps: int | None) -> str:
    """Say what to do about a checkpoint of `step` that is not there.

    Args:
        run: the trunk.
        step: to fork.
        total: the length of the trunk in steps, if that is known.
        every_steps: how often it saves, if it counts steps.
    """
    reached = last_step(run)
    if total is not None and step > total:
        return f"it ends at step {total}: fork a step up to that, or make it longer"
    if Finish.of(run).steps or step <= run.newest_step():
        return "fork one of those"
    cadence = f"saves every {every_steps} steps and at its end" if every_steps else "saves by the clock and at its end"
    doing = f"it is at step {reached}{f' of {total}' if total else ''}, and {cadence}"
    if step != total and every_steps and step % every_steps:
        return f"{doing}: fork one of those steps"
    job = files.read_object(run.job).get("job_id")
    waiting = f", or let a job wait for it: sbatch --dependency=afterok:{job} --wrap='THIS COMMAND'" if job else ""
    return f"{doing}: rerun this command once step {step} is saved{waiting}"

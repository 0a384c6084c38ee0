"""Find the trunk of a branch, and explain missing checkpoints."""

from __future__ import annotations

from pathlib import Path

from runner.rundir.attempt_log import Finish, last_step
from runner.rundir.paths import RunDir
from runner.system import files


def find(path: str, branch: Path) -> RunDir:
    """Find the trunk's directory at its recorded path, or else next to the branch under the same name."""
    there, beside = Path(path), branch.parent / Path(path).name
    return RunDir(beside if not files.is_dir(there) and files.is_dir(beside) else there)


def missing(run: RunDir, step: int) -> str:
    """Return a message that `step` has no checkpoint, with a list of the steps that have one."""
    steps = run.checkpoint_steps()
    those = f"that of step {steps[0]}" if len(steps) == 1 else f"those of steps {', '.join(map(str, steps))}"
    there = f"it has {those}" if steps else "it has none"
    return f"{run.path} has no checkpoint of step {step}: {there}"


def remedy(run: RunDir, step: int, total: int | None, every_steps: int | None) -> str:
    """Return a suggestion for what to do if `step` has no checkpoint.

    Args:
        run: the trunk.
        step: the step to fork.
        total: the trunk's length in steps, or None if unknown.
        every_steps: the number of steps between the trunk's saves, or None if its cadence is not in steps.
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

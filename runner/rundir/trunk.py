"""What a branch needs of its trunk: whether the checkpoint that it begins with is there, will be, or never will."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from runner.rundir.attempt_log import finished_at, last_step
from runner.rundir.paths import RunDir
from runner.system import files


@dataclass(frozen=True)
class Trunk:
    """A run that others branch off.

    Attributes:
        run: its directory.
        total: its length in steps, if that is known.
        every_steps: how often it saves, if it counts steps.
    """

    run: RunDir
    total: int | None
    every_steps: int | None

    def waits_for(self, step: int) -> bool:
        """Whether a branch at `step` has to wait for the trunk. Not if its checkpoint is there.

        Raises:
            LookupError: there will never be one; the message says why, and which steps could be forked.
        """
        steps = self.run.checkpoint_steps()
        if step in steps:
            return False
        saved = steps[-1] if steps else 0
        if self.total is not None and step > self.total:
            raise LookupError(f"{self.run.path} ends at step {self.total}: fork a step up to it, or make it longer")
        # A step that was reached, but not saved yet, is saved in a moment, or by the next attempt.
        if step <= saved or finished_at(self.run) or (step <= last_step(self.run) and not self._saves(step)):
            raise LookupError(missing(self.run, step, steps))
        if not self._saves(step):
            raise LookupError(
                f"{self.run.path} is at step {last_step(self.run)} and will not save step {step}: it saves every "
                f"{self.every_steps or '?'} steps and at its end; fork one of those"
            )
        return True

    def _saves(self, step: int) -> bool:
        return step == self.total or bool(self.every_steps and step % self.every_steps == 0)


def missing(run: RunDir, step: int, steps: Sequence[int] | None = None) -> str:
    """That there is no checkpoint of `step`, and which there are."""
    steps = run.checkpoint_steps() if steps is None else steps
    those = f"that of step {steps[0]}" if len(steps) == 1 else f"those of steps {', '.join(map(str, steps))}"
    there = f"it has {those}" if steps else "it has none"
    return f"{run.path} has no checkpoint of step {step}: {there}"


def find(path: str, branch: Path) -> RunDir:
    """The directory of a trunk: where it was when the branch was made, or beside the branch under the same name."""
    there, beside = Path(path), branch.parent / Path(path).name
    return RunDir(beside if not files.is_dir(there) and files.is_dir(beside) else there)

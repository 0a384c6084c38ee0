"""Run a drill: a reference run, the same run under faults, and a record of how the run handled each fault."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runner.chaos.display import Display
from runner.chaos.faults import KINDS
from runner.chaos.plan import Outcome, PlannedFault, replan
from runner.chaos.stage import START_S, BrokenError, Stage, TooLateError, UnansweredError
from runner.chaos.target import Target
from runner.checkpoint.files.directory import leftovers
from runner.errors import UserError
from runner.rundir.paths import RunDir
from runner.system import files

FUTILE_RUNS = 3  # runs in a row without a fault, until the drill gives up: they are too short


@dataclass
class Drill:
    """A reference run in `root/reference`, and runs under faults in `root/killed-1`, `root/killed-2`, ...

    If a run finishes before all faults are injected, the drill starts another one. Injected faults are recorded in
    `root/faults.jsonl`, so that an interrupted drill can be continued.
    """

    root: Path
    make_target: Callable[[Path, Path], Target]  # creates the target from (run directory, log file)
    display: Display
    steps: int
    save_every: int
    eval_every: int
    seed: int
    start_s: float = START_S
    ranks: Sequence[int] = ()  # the numbers of ranks that an attempt may have

    @property
    def reference(self) -> RunDir:
        return RunDir(self.root / "reference")

    @property
    def journal(self) -> Path:
        return self.root / "faults.jsonl"

    def killed(self) -> list[RunDir]:
        """Return the runs under faults, in order of creation."""
        found = self.root.glob("killed-*[0-9]")
        return [RunDir(path) for path in sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))]

    def open(self, key: dict[str, Any]) -> bool:
        """Create or reopen `root`. Return True if it contains an interrupted drill with the same `key`.

        Raises:
            UserError: `root` contains other files, or cannot be created.
        """
        mark = self.root / "drill.json"
        found = files.read_json(mark)
        try:
            if self.root.is_dir() and found is None and any(self.root.iterdir()):
                raise UserError(f"--root {self.root} contains other files: choose an empty or a new directory")
            if found and found.get("key") == key and not found.get("over"):
                return True
            for path in [*self.root.glob("reference*"), *(run.path for run in self.killed())] if found else []:
                shutil.rmtree(path, ignore_errors=True)
            for path in (self.journal, *self.root.glob("*.log")) if found else ():
                path.unlink(missing_ok=True)
            self.root.mkdir(parents=True, exist_ok=True)
            files.write_json(mark, {"key": key, "over": False})
        except OSError as error:
            raise UserError(f"--root {self.root} cannot be used ({error.strerror}): choose another") from None
        return False

    def mark_over(self, key: dict[str, Any]) -> None:
        """Record that this drill is over, so that the next drill in `root` starts from the beginning."""
        files.write_json(self.root / "drill.json", {"key": key, "over": True})

    def outcomes(self) -> list[Outcome]:
        """Return the outcomes of the faults injected so far, in order, checked against the runs' attempt logs."""
        outcomes = [Outcome(**line) for line in files.read_lines(self.journal)]
        for run in self.killed():
            attempts = {line.get("attempt"): line for line in files.read_lines(run.attempts)}
            for outcome in outcomes:
                if outcome.run == run.path.name:
                    _check_next_attempt(outcome, attempts)
        return outcomes

    def run_reference(self, name: str = "reference") -> RunDir:
        """Train the reference run to its end without faults.

        Raises:
            UserError: the run fails even without faults.
        """
        with self._staged(self.root / name) as stage:
            stage.ensure_running()
            status = stage.wait_for_or_end(stage.owned)
            if status is None and stage.wait_for_or_end(stage.made_steps) is None:
                self.start_s = max(0.05, stage.seconds_since_owned())
            try:
                stage.finish()
            except BrokenError as error:
                raise UserError(f"the run does not work without faults: {error}") from None
        return stage.run

    def run_under_faults(self, plan: Sequence[PlannedFault]) -> None:
        """Inject the remaining faults in as many runs as needed, and let each run finish.

        Raises:
            BrokenError: a run ended unexpectedly or hangs.
        """
        number, futile = max(len(self.killed()), 1), 0
        while futile < FUTILE_RUNS:
            done = {outcome.number for outcome in self.outcomes()}
            left = [fault for fault in plan if fault.number not in done]
            self._one_run(number, replan(left, self.steps, self.seed, number - 1) if number > 1 else left)
            injected = len(self.outcomes()) - len(done)
            if injected == len(left):
                return
            # In a short run, or on a busy machine, some faults are not injected in time.
            futile = 0 if injected else futile + 1
            number += 1

    def _one_run(self, number: int, plan: Sequence[PlannedFault]) -> None:
        with self._staged(self.root / f"killed-{number}") as stage:
            for fault in plan:
                self.display.waiting_for(fault, stage.run.path.name)
                try:
                    outcome = self._inject(stage, fault)
                except TooLateError:
                    continue
                files.append_line(self.journal, asdict(outcome))
                self.display.injected(outcome)
            stage.finish()

    def _inject(self, stage: Stage, fault: PlannedFault) -> Outcome:
        """Inject one fault into the run and return the outcome.

        Raises:
            TooLateError: the run finished before the fault could be injected.
        """
        if stage.run.finished.exists():
            raise TooLateError
        stage.resumes_at, stage.steps_lost, answered = None, 0, True
        stage.injected_at = stage.here()
        try:
            answer = KINDS[fault.kind].inject(stage, fault)
        except UnansweredError as error:
            answer, answered = str(error), False
            stage.stop()
        step, attempt = stage.injected_at
        return Outcome(
            number=fault.number,
            kind=fault.kind,
            trigger=fault.trigger,
            run=stage.run.path.name,
            step=step,
            attempt=attempt,
            answer=answer,
            answered=answered,
            resumes_at=stage.resumes_at,
            steps_lost=stage.steps_lost,
        )

    @contextmanager
    def _staged(self, path: Path) -> Iterator[Stage]:
        self.display.run(path)
        target = self.make_target(path, self.root / f"{path.name}.log")
        every = (self.steps, self.save_every, self.eval_every)
        stage = Stage(RunDir(path), target, self.display, *every, self.start_s, self.ranks)
        try:
            yield stage
        finally:
            stage.stop()

    def leftover_errors(self) -> list[str]:
        """Return one line for each temporary directory that a finished run left behind."""
        return [
            f"{path} was left behind by an interrupted save"
            for run in self.killed()
            if run.finished.exists()
            for path in leftovers(run.checkpoints)
        ]


def _check_next_attempt(outcome: Outcome, attempts: dict[Any, dict[str, Any]]) -> None:
    """Mark the outcome as unanswered if the next attempt did not resume at the expected step."""
    following = attempts.get((outcome.attempt or 0) + 1)
    if outcome.attempt is None or following is None or outcome.resumes_at is None:
        return
    if following.get("start_step") != outcome.resumes_at:
        outcome.answered = False
        outcome.answer += f", but the next attempt resumed at step {following.get('start_step')}"

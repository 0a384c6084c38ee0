"""The drill: the reference, the same run under faults, and what came of each of them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from runner.chaos.display import Display
from runner.chaos.faults import KINDS, TooLateError, UnansweredError
from runner.chaos.moments import MOMENTS
from runner.chaos.plan import Planned, replan
from runner.chaos.victim import Victim
from runner.chaos.watch import Watch
from runner.checkpoint.store import leftovers
from runner.errors import TrainingError, UserError
from runner.files import append_line, read_json, read_lines, write_json
from runner.run_dir import RunDir

PATIENCE_S = 900.0  # without a step, an attempt or a byte printed: the run hangs
POLL_S = 0.0003
SHOW_EVERY_S = 0.2
FUTILE_RUNS = 3  # so many in a row that ended before any fault struck: there is no room for what is left
START_S = 1.0  # from the lease to the first step, until it has been measured


@dataclass
class Outcome:
    """What came of one fault.

    `step` and `attempt`: where it struck. `resumes`: where the run has to go on; `lost`: the steps from there
    to where it was, which are made again.
    """

    number: int
    kind: str
    moment: str
    run: str
    step: int
    attempt: int | None
    answer: str
    answered: bool
    resumes: int | None = None
    lost: int = 0


class BrokenError(TrainingError):
    """The run under faults ended by itself, or hangs."""


@dataclass
class Stage:
    """One run directory under faults: what the kinds of fault work with."""

    run: RunDir
    victim: Victim
    display: Display
    steps: int
    save_every: int
    eval_every: int
    start_s: float = START_S
    children: list[Victim] = field(default_factory=list)
    resumes: int | None = None
    lost: int = 0
    struck: tuple[int, int | None] = (0, None)
    _metrics: int | None = None
    _owned_at: tuple[int, float] = (0, 0.0)
    _shown: float = 0.0

    def __post_init__(self) -> None:
        self.watch = Watch(self.run)
        self.children.append(self.victim)

    # What a fault asks for

    def ensure(self) -> None:
        """See to it that an attempt lives."""
        if self.victim.ended() is not None or self._metrics is None:
            self._metrics = self._metrics_file()
        self.victim.begin()

    def _metrics_file(self) -> int:
        """Which file the metrics are in; an attempt replaces it when it has restored its state. 0: none."""
        try:
            return self.run.metrics.stat().st_ino
        except FileNotFoundError:
            return 0

    def hold(self, planned: Planned) -> None:
        """Let the run come to the moment of a fault and freeze it there, where that can be done.

        Raises:
            TooLateError: the run was finished first.
            BrokenError: it ended by itself.
        """
        self.ensure()
        moment = MOMENTS[planned.moment]
        while True:
            # An attempt that has ended cannot be struck, whatever it left behind.
            self.wait_for(lambda: self.victim.ended() is None and moment(self, planned))
            self.struck = self.here()
            if self.victim.freeze() and moment(self, planned) and not self.run.finished.exists():
                self.struck = self.here()
                return
            self.victim.resume()
            if self.run.finished.exists():
                self.wait_for_end()
                raise TooLateError

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Return when `condition` holds; the attempt must not end before."""
        status = self.wait_for_or_end(condition)
        if status == 0:
            raise TooLateError
        if status is not None:
            raise BrokenError(f"the run ended by itself with status {status}\n{self.victim.tail()}")

    def wait_for_or_end(self, condition: Callable[[], object]) -> int | None:
        """None when `condition` holds, or the status with which the attempt ended before."""
        for _ in self._patiently():
            # In this order: what an attempt did at its very end counts.
            status = self.victim.ended()
            if condition():
                return None
            if status is not None:
                return status
        return None

    def wait_for_end(self, victim: Victim | None = None) -> int:
        """Exit status of the attempt, or of another process on its run."""
        victim = victim or self.victim
        for _ in self._patiently():
            status = victim.ended()
            if status is not None:
                return status
        return 1

    def owned(self) -> bool:
        """Whether the attempt holds the run directory."""
        number, holder = self.watch.holder()
        if not self.victim.owns(holder):
            return False
        if self._owned_at[0] != number:
            self._owned_at = (number, time.monotonic())
        return True

    def since_owned(self) -> float:
        """Seconds since the attempt was first seen to hold the run directory."""
        return time.monotonic() - self._owned_at[1]

    def made_steps(self) -> bool:
        """Whether the attempt has brought the run further than where it began."""
        attempt = self.watch.attempt()
        return (
            self.victim.owns(attempt)
            and self._metrics_file() != self._metrics
            and self.watch.step() > attempt["start_step"]
        )

    def closed(self) -> dict[str, Any]:
        """The line of the last attempt that ended by itself."""
        return dict(next(iter(reversed(list(read_lines(self.run.attempts)))), {}))

    def committed(self, fence: int | None = None) -> set[Path]:
        """Checkpoints on disk; with `fence`, those that this incarnation wrote."""
        paths = {self.run.checkpoints / f"step_{step:08d}" for step in self.run.checkpoint_steps()}
        if fence is None:
            return paths
        return {path for path in paths if (read_json(path / "manifest.json") or {}).get("fence") == fence}

    def goes_on_from(self, step: int) -> None:
        """Where the next attempt has to begin, told while no attempt makes steps."""
        self.resumes, self.lost = step, max(0, self.watch.step() - step)

    def also(self, victim: Victim) -> Victim:
        """Look after one more process on this run."""
        self.children.append(victim)
        return victim

    def replace(self, victim: Victim) -> None:
        """Another process is the run from here on."""
        self.victim = self.also(victim)
        self._metrics = None

    def here(self) -> tuple[int, int | None]:
        """Steps complete, and the number of the attempt under way."""
        attempt = self.watch.attempt()
        step = self.watch.step() if self.made_steps() else max(self.run.checkpoint_steps(), default=0)
        return step, attempt.get("attempt") if self.victim.owns(attempt) else None

    def finish(self) -> None:
        """Let the run come to its end.

        Raises:
            BrokenError: it does not.
        """
        self.ensure()
        while (status := self.wait_for_end()) == 75:
            self.ensure()  # a job that was asked to leave just before its end
        if status:
            raise BrokenError(f"the run ended by itself with status {status}\n{self.victim.tail()}")

    def stop(self) -> None:
        """End whatever still lives."""
        for child in self.children:
            child.stop()

    def _patiently(self) -> Iterator[None]:
        """Poll until the run shows no sign of life for too long."""
        alive, signs = time.monotonic(), self._signs()
        while True:
            yield
            time.sleep(POLL_S)
            now = time.monotonic()
            if now - self._shown < SHOW_EVERY_S:
                continue
            self._shown = now
            self.display.step(self.watch.step(), self.steps)
            if (newer := self._signs()) != signs:
                alive, signs = now, newer
            elif now - alive > PATIENCE_S:
                raise BrokenError(f"no sign of life for {PATIENCE_S:.0f} s\n{self.victim.tail()}")

    def _signs(self) -> tuple[Any, ...]:
        return self.watch.step(), self.watch.holder()[0], self.victim.tail()


@dataclass
class Drill:
    """All of it: the reference in `root/reference`, the runs under faults in `root/killed-1` and so on.

    Several, where a run is over before all faults have struck. What has struck is kept in
    `root/faults.jsonl`, so that an interrupted drill goes on.
    """

    root: Path
    make_victim: Callable[[Path, Path], Victim]  # of a run directory and a log
    display: Display
    steps: int
    save_every: int
    eval_every: int
    seed: int
    start_s: float = START_S

    @property
    def reference(self) -> RunDir:
        return RunDir(self.root / "reference")

    @property
    def journal(self) -> Path:
        return self.root / "faults.jsonl"

    def killed(self) -> list[RunDir]:
        """The runs under faults, in their order."""
        found = self.root.glob("killed-*[0-9]")
        return [RunDir(path) for path in sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))]

    def open(self, key: dict[str, Any]) -> bool:
        """Make or take up `root`; True if an interrupted drill of the same `key` goes on.

        Raises:
            UserError: `root` holds something else, or cannot be made.
        """
        mark = self.root / "drill.json"
        found = read_json(mark)
        try:
            if self.root.is_dir() and found is None and any(self.root.iterdir()):
                raise UserError(f"--root {self.root} holds something else: give an empty or a new directory")
            if found and found.get("key") == key and not found.get("over"):
                return True
            for path in [*self.root.glob("reference*"), *(run.path for run in self.killed())] if found else []:
                shutil.rmtree(path, ignore_errors=True)
            for path in (self.journal, *self.root.glob("*.log")) if found else ():
                path.unlink(missing_ok=True)
            self.root.mkdir(parents=True, exist_ok=True)
            write_json(mark, {"key": key, "over": False})
        except OSError as error:
            raise UserError(f"--root {self.root} cannot be used ({error.strerror}): give another") from None
        return False

    def over(self, key: dict[str, Any]) -> None:
        """The next drill here begins anew."""
        write_json(self.root / "drill.json", {"key": key, "over": True})

    def outcomes(self) -> list[Outcome]:
        """What has struck so far, in order, checked against the books of the runs."""
        outcomes = [Outcome(**line) for line in read_lines(self.journal)]
        for run in self.killed():
            attempts = {line.get("attempt"): line for line in read_lines(run.attempts)}
            for outcome in outcomes:
                if outcome.run == run.path.name:
                    _check_next(outcome, attempts)
        return outcomes

    def run_reference(self, name: str = "reference") -> RunDir:
        """Run to the end without a fault.

        Raises:
            UserError: the configuration does not work as it is.
        """
        stage = self._stage(self.root / name)
        with self._staged(stage):
            stage.ensure()
            status = stage.wait_for_or_end(stage.owned)
            if status is None and stage.wait_for_or_end(stage.made_steps) is None:
                self.start_s = max(0.05, stage.since_owned())
            try:
                stage.finish()
            except BrokenError as error:
                raise UserError(f"the run does not work without faults: {error}") from None
        return stage.run

    def run_under_faults(self, plan: Sequence[Planned]) -> None:
        """Inject what has not struck yet, in as many runs as it takes, and let each come to its end.

        Raises:
            BrokenError: the run ended by itself.
        """
        number, futile = max(len(self.killed()), 1), 0
        while futile < FUTILE_RUNS:
            done = {outcome.number for outcome in self.outcomes()}
            left = [fault for fault in plan if fault.number not in done]
            self._one_run(number, replan(left, self.steps, self.seed, number - 1) if number > 1 else left)
            struck = len(self.outcomes()) - len(done)
            if struck == len(left):
                return
            # A run that is quick, or a drill that gets no processor, lets a fault come too late now and then.
            futile = 0 if struck else futile + 1
            number += 1

    def _one_run(self, number: int, plan: Sequence[Planned]) -> None:
        stage = self._stage(self.root / f"killed-{number}")
        with self._staged(stage):
            for fault in plan:
                self.display.fault(fault, stage.run.path.name)
                try:
                    outcome = self._inject(stage, fault)
                except TooLateError:
                    continue
                append_line(self.journal, asdict(outcome))
                self.display.struck(outcome)
            stage.finish()

    def _inject(self, stage: Stage, fault: Planned) -> Outcome:
        """Raises TooLateError: the run is finished and nothing was injected."""
        if stage.run.finished.exists():
            raise TooLateError
        stage.resumes, stage.lost, answered = None, 0, True
        stage.struck = stage.here()
        try:
            answer = KINDS[fault.kind].strike(stage, fault)
        except UnansweredError as error:
            answer, answered = str(error), False
            stage.stop()
        step, attempt = stage.struck
        return Outcome(
            number=fault.number,
            kind=fault.kind,
            moment=fault.moment,
            run=stage.run.path.name,
            step=step,
            attempt=attempt,
            answer=answer,
            answered=answered,
            resumes=stage.resumes,
            lost=stage.lost,
        )

    def _stage(self, path: Path) -> Stage:
        self.display.run(path)
        victim = self.make_victim(path, self.root / f"{path.name}.log")
        return Stage(RunDir(path), victim, self.display, self.steps, self.save_every, self.eval_every, self.start_s)

    @contextmanager
    def _staged(self, stage: Stage) -> Iterator[None]:
        try:
            yield
        finally:
            stage.stop()

    def faults_of_runs(self) -> list[str]:
        """What is wrong with the runs under faults besides their results."""
        return [
            f"{path} was left behind by a save that was cut short"
            for run in self.killed()
            if run.finished.exists()
            for path in leftovers(run.checkpoints)
        ]


def _check_next(outcome: Outcome, attempts: dict[Any, dict[str, Any]]) -> None:
    """Find fault where the next attempt went on elsewhere than it had to."""
    following = attempts.get((outcome.attempt or 0) + 1)
    if outcome.attempt is None or following is None or outcome.resumes is None:
        return
    if following.get("start_step") != outcome.resumes:
        outcome.answered = False
        outcome.answer += f", but the next attempt went on from step {following.get('start_step')}"

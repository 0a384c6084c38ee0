"""Observe and control a run under faults, and decide when a fault may be injected."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.chaos.display import Display
from runner.chaos.plan import PlannedFault
from runner.chaos.target import Target
from runner.chaos.watch import Watch
from runner.errors import ExitStatus, TrainingError
from runner.rundir.paths import RunDir
from runner.system import clock, files

PATIENCE_S = 900.0  # a run hangs if it has no step, new holder or line of output for this long
POLL_S = 0.0003
SHOW_EVERY_S = 0.2
START_S = 1.0  # initial estimate of the time from acquiring the lease to the first step


class TooLateError(Exception):
    """The run finished before the fault could be injected."""


class UnansweredError(Exception):
    """The run did not react as the fault requires. The message describes how it reacted."""


class BrokenError(TrainingError):
    """The run under faults ended unexpectedly, or hangs."""


@dataclass
class Stage:
    """A run under faults, with its directory and the processes or job that train it."""

    run: RunDir
    target: Target
    display: Display
    steps: int
    save_every: int
    eval_every: int
    start_s: float = START_S
    ranks: Sequence[int] = ()  # the numbers of ranks that an attempt may have
    targets: list[Target] = field(default_factory=list)
    resumes_at: int | None = None
    steps_lost: int = 0
    injected_at: tuple[int, int | None] = (0, None)
    _metrics: tuple[int, int] | None = None
    _owned_at: tuple[int, float] = (0, 0.0)
    _shown: float = 0.0

    def __post_init__(self) -> None:
        self.watch = Watch(self.run)
        self.targets.append(self.target)

    def ensure_running(self) -> None:
        """Start an attempt if none is running."""
        if self.target.ended() is not None or self._metrics is None:
            self._metrics = self._metrics_state()
        self.target.begin()

    def _metrics_state(self) -> tuple[int, int]:
        """Return a value that changes whenever an attempt truncates, replaces or extends metrics.jsonl.

        An attempt changes the file only after it has restored its state.
        """
        try:
            state = self.run.metrics.stat()
        except FileNotFoundError:
            return 0, 0
        return state.st_ino, state.st_mtime_ns

    def freeze_at(self, planned: PlannedFault) -> None:
        """Wait until a fault's trigger is true, and freeze the run at that moment if possible.

        Raises:
            TooLateError: the run finished before the trigger was true.
            BrokenError: the run ended unexpectedly, or hangs.
        """
        self.ensure_running()
        trigger = TRIGGERS[planned.trigger]
        while True:
            # A fault cannot be injected into an attempt that has ended, even if its files match the trigger.
            self.wait_for(lambda: self.target.ended() is None and trigger(self, planned))
            self.injected_at = self.here()
            if self.target.freeze() and trigger(self, planned) and not self.run.finished.exists():
                self.injected_at = self.here()
                return
            self.target.unfreeze()
            if self.run.finished.exists():
                self.wait_for_end()
                raise TooLateError

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Wait until `condition` is true.

        Raises:
            TooLateError: the run finished before the condition was true.
            BrokenError: the attempt ended before the condition was true, or hangs.
        """
        status = self.wait_for_or_end(condition)
        if status == 0:
            raise TooLateError
        if status is not None:
            raise BrokenError(f"the run ended by itself with status {status}\n{self.target.tail()}")

    def wait_for_or_end(self, condition: Callable[[], object]) -> int | None:
        """Wait until `condition` is true or the attempt ends.

        Returns:
            None if `condition` became true, else the exit status of the attempt.
        """
        for _ in self._poll():
            # The status is read first, so that the condition still sees the attempt's last actions.
            status = self.target.ended()
            if condition():
                return None
            if status is not None:
                return status
        return None

    def wait_for_end(self, target: Target | None = None) -> int:
        """Wait until the attempt, or another process on its run, ends, and return the exit status."""
        target = target or self.target
        for _ in self._poll():
            status = target.ended()
            if status is not None:
                return status
        return 1

    def owned(self) -> bool:
        """Return whether the attempt holds the run directory."""
        number, holder = self.watch.holder()
        if not self.target.owns(holder):
            return False
        if self._owned_at[0] != number:
            self._owned_at = (number, clock.monotonic())
        return True

    def seconds_since_owned(self) -> float:
        """Return the seconds since the attempt was first observed to hold the run directory."""
        return clock.monotonic() - self._owned_at[1]

    def made_steps(self) -> bool:
        """Return whether the attempt has completed a step."""
        attempt = self.watch.attempt()
        return (
            self.target.owns(attempt)
            and self._metrics_state() != self._metrics
            and self.watch.step() > attempt["start_step"]
        )

    def last_ended(self) -> dict[str, Any]:
        """Return the last entry of the attempt log."""
        return dict(next(iter(reversed(list(files.read_lines(self.run.attempts)))), {}))

    def committed(self, fence: int | None = None) -> set[Path]:
        """Return the checkpoints on disk. If `fence` is set, return only those written by that holder of the lease."""
        paths = {self.run.checkpoint(step) for step in self.run.checkpoint_steps()}
        if fence is None:
            return paths
        return {path for path in paths if files.read_object(path / "manifest.json").get("fence") == fence}

    def must_resume_at(self, step: int) -> None:
        """Record the step at which the next attempt must resume. Call this while no attempt trains."""
        self.resumes_at, self.steps_lost = step, max(0, self.watch.step() - step)

    def add(self, target: Target) -> Target:
        """Register another process on this run, which is stopped at the end of the drill, and return it."""
        self.targets.append(target)
        return target

    def replace(self, target: Target) -> None:
        """Use another process as the target from now on."""
        self.target = self.add(target)
        self._metrics = None

    def here(self) -> tuple[int, int | None]:
        """Return the number of complete steps, and the number of the attempt in progress."""
        attempt = self.watch.attempt()
        step = self.watch.step() if self.made_steps() else self.run.newest_step()
        return step, attempt.get("attempt") if self.target.owns(attempt) else None

    def finish(self) -> None:
        """Wait until the run has finished. Start attempts if needed.

        Raises:
            BrokenError: the run does not finish.
        """
        self.ensure_running()
        while (status := self.wait_for_end()) == ExitStatus.INTERRUPTED:
            self.ensure_running()  # needed if a job was asked to stop shortly before it would have ended
        if status:
            raise BrokenError(f"the run ended by itself with status {status}\n{self.target.tail()}")

    def stop(self) -> None:
        """Stop every process that is still running."""
        for target in self.targets:
            target.stop()

    def _poll(self) -> Iterator[None]:
        """Poll until the run has made no progress for too long."""
        progressed, signs = clock.monotonic(), self._signs()
        while True:
            yield
            clock.sleep(POLL_S)
            now = clock.monotonic()
            if now - self._shown < SHOW_EVERY_S:
                continue
            self._shown = now
            self.display.step(self.watch.step(), self.steps)
            if (newer := self._signs()) != signs:
                progressed, signs = now, newer
            elif now - progressed > PATIENCE_S:
                raise BrokenError(f"no progress for {PATIENCE_S:.0f} s\n{self.target.tail()}")

    def _signs(self) -> tuple[Any, ...]:
        return self.watch.step(), self.watch.holder()[0], self.target.tail()


Trigger = Callable[[Stage, PlannedFault], bool]
"""A condition on the observed run. It is polled until it is true."""


def start(stage: Stage, planned: PlannedFault) -> bool:
    """Trigger while an attempt imports modules, builds its objects and restores its state."""
    return stage.owned() and (stage.seconds_since_owned() >= planned.fraction * stage.start_s or stage.made_steps())


def step(stage: Stage, planned: PlannedFault) -> bool:
    """Trigger while a training step is in progress."""
    return stage.watch.step() >= planned.step and stage.made_steps()


def evaluation(stage: Stage, planned: PlannedFault) -> bool:
    """Trigger while an evaluation is in progress."""
    return stage.watch.evaluating(stage.eval_every) and step(stage, planned)


def save(stage: Stage, planned: PlannedFault) -> bool:
    """Trigger while the files of a checkpoint are being written."""
    return bool(stage.watch.saves()) and stage.watch.step() >= planned.step and stage.owned()


def rename(stage: Stage, planned: PlannedFault) -> bool:
    """Trigger when a checkpoint is complete except for its final name."""
    return bool(stage.watch.renames()) and stage.watch.step() >= planned.step and stage.owned()


def after_a_save(stage: Stage, planned: PlannedFault) -> bool:
    """Trigger during a step, after the attempt has saved a checkpoint."""
    saved = stage.run.newest_step()
    return step(stage, planned) and saved > int(stage.watch.attempt().get("start_step") or 0)


def two_checkpoints(stage: Stage, planned: PlannedFault) -> bool:
    """Trigger during a step while two checkpoints are on disk."""
    return step(stage, planned) and len(stage.run.checkpoint_steps()) >= 2


def room_left(stage: Stage, planned: PlannedFault) -> bool:
    """Trigger during a step, if a checkpoint is on disk and enough steps are left for two more saves."""
    early = stage.watch.step() <= stage.steps - 2 * stage.save_every
    return early and step(stage, planned) and bool(stage.run.checkpoint_steps())


TRIGGERS: dict[str, Trigger] = {
    "start": start,
    "step": step,
    "evaluation": evaluation,
    "save": save,
    "rename": rename,
    "after a save": after_a_save,
    "two checkpoints": two_checkpoints,
    "room left": room_left,
}

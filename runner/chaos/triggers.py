"""When a fault may be injected: each trigger is a condition on the observed run, polled until it is true."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from runner.chaos.plan import PlannedFault
from runner.chaos.watch import Watch


class ObservedRun(Protocol):
    """What a trigger may ask about the run (`runner.chaos.stage.Stage`)."""

    steps: int
    save_every: int
    eval_every: int
    start_s: float

    @property
    def watch(self) -> Watch: ...
    def owned(self) -> bool: ...
    def seconds_since_owned(self) -> float: ...
    def made_steps(self) -> bool: ...


Trigger = Callable[[ObservedRun, PlannedFault], bool]


def start(run: ObservedRun, planned: PlannedFault) -> bool:
    """An attempt imports, builds and restores."""
    return run.owned() and (run.seconds_since_owned() >= planned.fraction * run.start_s or run.made_steps())


def step(run: ObservedRun, planned: PlannedFault) -> bool:
    """During a step."""
    return run.watch.step() >= planned.step and run.made_steps()


def evaluation(run: ObservedRun, planned: PlannedFault) -> bool:
    """During an evaluation."""
    return run.watch.evaluating(run.eval_every) and step(run, planned)


def save(run: ObservedRun, planned: PlannedFault) -> bool:
    """The files of a checkpoint are being written."""
    return bool(run.watch.saves()) and run.watch.step() >= planned.step and run.owned()


def rename(run: ObservedRun, planned: PlannedFault) -> bool:
    """A checkpoint lacks only its final name."""
    return bool(run.watch.renames()) and run.watch.step() >= planned.step and run.owned()


def after_a_save(run: ObservedRun, planned: PlannedFault) -> bool:
    """During a step, once the attempt has saved."""
    saved = run.watch.run.newest_step()
    return step(run, planned) and saved > int(run.watch.attempt().get("start_step") or 0)


def two_checkpoints(run: ObservedRun, planned: PlannedFault) -> bool:
    """During a step, with two checkpoints on disk."""
    return step(run, planned) and len(run.watch.run.checkpoint_steps()) >= 2


def room_left(run: ObservedRun, planned: PlannedFault) -> bool:
    """During a step, with a checkpoint on disk and time for two more saves before the end."""
    early = run.watch.step() <= run.steps - 2 * run.save_every
    return early and step(run, planned) and bool(run.watch.run.checkpoint_steps())


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

"""The moments at which a fault may strike, each a question to the stage, asked until it is answered yes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runner.chaos.drill import Stage
    from runner.chaos.plan import Planned

Moment = Callable[["Stage", "Planned"], bool]


def start(stage: Stage, planned: Planned) -> bool:
    """While an attempt imports, builds and restores."""
    return stage.owned() and (stage.since_owned() >= planned.fraction * stage.start_s or stage.made_steps())


def step(stage: Stage, planned: Planned) -> bool:
    """During a step."""
    return stage.watch.step() >= planned.step and stage.made_steps()


def evaluation(stage: Stage, planned: Planned) -> bool:
    """During an evaluation."""
    return stage.watch.evaluating(stage.eval_every) and step(stage, planned)


def save(stage: Stage, planned: Planned) -> bool:
    """While the files of a checkpoint are written."""
    return bool(stage.watch.saves()) and stage.watch.step() >= planned.step and stage.owned()


def rename(stage: Stage, planned: Planned) -> bool:
    """When a checkpoint lacks only its final name."""
    return bool(stage.watch.renames()) and stage.watch.step() >= planned.step and stage.owned()


def after_a_save(stage: Stage, planned: Planned) -> bool:
    """During a step, once the attempt has saved."""
    saved = max(stage.run.checkpoint_steps(), default=0)
    return step(stage, planned) and saved > int(stage.watch.attempt().get("start_step") or 0)


def two_checkpoints(stage: Stage, planned: Planned) -> bool:
    """During a step, with two checkpoints on disk."""
    return step(stage, planned) and len(stage.run.checkpoint_steps()) >= 2


def room_left(stage: Stage, planned: Planned) -> bool:
    """During a step, with a checkpoint on disk and time for two more saves before the end."""
    far = stage.watch.step() <= stage.steps - 2 * stage.save_every
    return far and step(stage, planned) and bool(stage.run.checkpoint_steps())


MOMENTS: dict[str, Moment] = {
    "start": start,
    "step": step,
    "evaluation": evaluation,
    "save": save,
    "rename": rename,
    "after a save": after_a_save,
    "two checkpoints": two_checkpoints,
    "room left": room_left,
}
